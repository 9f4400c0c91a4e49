"""What the APIs that agents speak have in common: each becomes a request of chat completions, and its answer the API's.

`chat_api`, `responses_api` and `messages_api` are the three.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rl.agents.agent_request import is_object, is_text, require
from megatron_rl.types import LLMResponse
from megatron_rl.workflows.messages import Message

Event = tuple[str | None, dict[str, Any]]
"""The name of an event of a stream, where the API names them, and its data."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A reply as the agent is told of it."""

    message: Message
    """The assistant's, in the form of chat completions."""
    thoughts: str | None
    """Its first thoughts, of an API that shows them apart from the reply."""
    reply: LLMResponse
    stop: str | None = None
    """The agent's stop string that ended it, which its text is without."""

    @property
    def calls(self) -> list[Message]:
        return self.message.get("tool_calls", [])

    @property
    def is_cut_off(self) -> bool:
        return not self.calls and self.stop is None and self.reply.stop_reason == "length"


class AgentApi(abc.ABC):
    """One API. An object serves one session, and may remember what its agent refers to later."""

    path: str
    shows_thoughts = False
    """Thoughts are a part of their own, and an agent may send a reply back with them or without."""

    @abc.abstractmethod
    def as_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the same request of chat completions. BadRequest names the field that cannot be taken."""

    @abc.abstractmethod
    def result(self, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
        """Return the body of the whole answer."""

    @abc.abstractmethod
    def stream(self, body: dict[str, Any]) -> ReplyStream:
        """Return what tells the answer piece by piece."""

    last_line: bytes = b""
    """The end of a stream."""

    @abc.abstractmethod
    def error(self, status: int, message: str, field: str | None, code: str | None) -> dict[str, Any]:
        """Return the body of a refusal; `field` is the one of the request that is at fault."""


class ReplyStream(abc.ABC):
    """The events of one streamed answer: `begin`, then `advance` as often as more of it is known, then `finish`."""

    def __init__(self) -> None:
        self._thoughts: str | None = None
        self._said = ""

    def advance(self, thoughts: str | None, said: str) -> Iterator[Event]:
        """Tell what is new. RuntimeError where what was told before has become another text."""
        if not ((thoughts or "").startswith(self._thoughts or "") and said.startswith(self._said)):
            raise RuntimeError("the reply's text is not the one that was streamed so far; ask again.")
        if thoughts is not None and thoughts != self._thoughts:
            more, self._thoughts = thoughts[len(self._thoughts or "") :], thoughts
            yield from self.add_thoughts(more)
        if said != self._said:
            more, self._said = said[len(self._said) :], said
            yield from self.add_said(more)

    def finish(self, answer: Answer) -> Iterator[Event]:
        """Tell the rest."""
        yield from self.advance(answer.thoughts, answer.message["content"])
        yield from self.end(answer)

    @abc.abstractmethod
    def begin(self, input_len: int) -> Iterator[Event]:
        """Open the answer. input_len: tokens of the prompt."""

    def add_thoughts(self, text: str) -> Iterator[Event]:
        """Tell more of what was thought; the first time, it may be none yet."""
        return iter(())

    @abc.abstractmethod
    def add_said(self, text: str) -> Iterator[Event]: ...

    @abc.abstractmethod
    def end(self, answer: Answer) -> Iterator[Event]:
        """Tell the calls, and how it ended. All its text has been told."""


def text_of(content: Any, kinds: tuple[str, ...], field: str) -> str:
    """Return the text of a content that is text, or a list of parts of these kinds."""
    if is_text(content):
        return str(content)
    require(isinstance(content, list), field, content, "must be text or a list of parts")
    for number, part in enumerate(content):
        kind = part.get("type") if is_object(part) else None
        is_right = kind in kinds and is_text(part.get("text"))
        require(is_right, f"{field}[{number}]", part, f"must be a part with a text, of type {' or '.join(kinds)}")
    return "".join(part["text"] for part in content)


def functions(tools: Any, schema: str) -> list[Message] | None:
    """Return tools that are written flat in the form of chat completions; `schema` is the field of their parameters."""
    if tools is None:
        return None
    require(isinstance(tools, list), "tools", tools, "must be a list")
    found = []
    for number, tool in enumerate(tools):
        kind = tool.get("type") or "function" if is_object(tool) else None
        is_right = kind in ("function", "custom") and is_text(tool.get("name")) and is_object(tool.get(schema))
        rule = f"must be a function with a name and {schema}; tools that a service runs itself are not supported"
        require(is_right, f"tools[{number}]", tool, rule)
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool[schema]}
        found.append({"type": "function", "function": function})
    return found or None


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
