"""Common interface of the agent APIs. Each converts its requests to chat completions, and replies to its own format.

The three APIs are in `chat_api`, `responses_api` and `messages_api`.
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
"""A stream event: (name, data). The name is None if the API does not name events."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A reply as it is reported to the agent."""

    message: Message
    """Assistant message in chat-completions form."""
    thoughts: str | None
    """The reply's first thought; None if there is none, or if the API does not report thoughts separately."""
    reply: LLMResponse
    stop: str | None = None
    """The stop string of the request that ended the reply; None if none did. The message's text does not include it."""

    @property
    def calls(self) -> list[Message]:
        return self.message.get("tool_calls", [])

    @property
    def is_cut_off(self) -> bool:
        return not self.calls and self.stop is None and self.reply.stop_reason == "length"


class AgentApi(abc.ABC):
    """Base class of the APIs. An instance serves one session, and may store responses that later requests refer to."""

    path: str
    shows_thoughts = False
    """True if thoughts are reported separately. An agent may then send a reply back with or without its thoughts."""

    @abc.abstractmethod
    def as_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Convert a request to the form of chat completions. Raises BadRequest for unsupported fields."""

    @abc.abstractmethod
    def result(self, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
        """Return the body of a complete answer."""

    @abc.abstractmethod
    def stream(self, body: dict[str, Any]) -> ReplyStream:
        """Return the object that produces a streamed answer's events."""

    last_line: bytes = b""
    """Bytes sent at the end of a stream."""

    @abc.abstractmethod
    def error(self, status: int, message: str, field: str | None, code: str | None) -> dict[str, Any]:
        """Return the body of an error response. field: the request field at fault."""


class ReplyStream(abc.ABC):
    """The events of one streamed answer. Call `begin`, then `advance` whenever more text is known, then `finish`."""

    def __init__(self) -> None:
        self._thoughts: str | None = None
        self._said = ""

    def advance(self, thoughts: str | None, said: str) -> Iterator[Event]:
        """Yield events for new text. Raises RuntimeError if already streamed text has changed.

        thoughts, said: the reply's thoughts (or None) and content so far, from their beginning.
        """
        if not ((thoughts or "").startswith(self._thoughts or "") and said.startswith(self._said)):
            raise RuntimeError("the reply's text is not the one that was streamed so far; ask again.")
        if thoughts is not None and thoughts != self._thoughts:
            more, self._thoughts = thoughts[len(self._thoughts or "") :], thoughts
            yield from self.add_thoughts(more)
        if said != self._said:
            more, self._said = said[len(self._said) :], said
            yield from self.add_said(more)

    def finish(self, answer: Answer) -> Iterator[Event]:
        """Yield the remaining events."""
        yield from self.advance(answer.thoughts, answer.message["content"])
        yield from self.end(answer)

    @abc.abstractmethod
    def begin(self, input_len: int) -> Iterator[Event]:
        """Yield the events that open the answer. input_len: number of prompt tokens."""

    def add_thoughts(self, text: str) -> Iterator[Event]:
        """Yield events for more thought text. The first call may have an empty text."""
        return iter(())

    @abc.abstractmethod
    def add_said(self, text: str) -> Iterator[Event]: ...

    @abc.abstractmethod
    def end(self, answer: Answer) -> Iterator[Event]:
        """Yield the events for calls and the stop reason. All text has already been streamed."""


def text_of(content: Any, kinds: tuple[str, ...], field: str) -> str:
    """Return the text of a message's content: a string, or a list of text parts whose `type` is among `kinds`."""
    if is_text(content):
        return str(content)
    require(isinstance(content, list), field, content, "must be text or a list of parts")
    for number, part in enumerate(content):
        kind = part.get("type") if is_object(part) else None
        is_right = kind in kinds and is_text(part.get("text"))
        require(is_right, f"{field}[{number}]", part, f"must be a part with a text, of type {' or '.join(kinds)}")
    return "".join(part["text"] for part in content)


def functions(tools: Any, schema: str) -> list[Message] | None:
    """Convert tool definitions that are flat objects to the nested form of chat completions.

    schema: name of the field that holds the schema of a tool's parameters.
    """
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
