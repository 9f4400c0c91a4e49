"""One run of an agent: its dialogues with the policy, as tokens.

A request continues an earlier request if its messages begin with the earlier messages and the reply to them. Messages
are compared in canonical form (`agent_history`). The request then reuses the earlier tokens, so that generated text is
never retokenized. Any other request begins a new dialogue. Each generated token is trained in one trajectory only, even
if an agent goes back and continues a dialogue in another way.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import secrets
import string
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_rl.agents.agent_api import Answer
from megatron_rl.agents.agent_history import Beginning, History, beginnings
from megatron_rl.agents.agent_request import OPTIONS, check, messages_of, normal
from megatron_rl.agents.constrained import grammar_of
from megatron_rl.agents.streamed_text import HALF, Progress, split_thoughts, sure_parts, up_to
from megatron_rl.agents.tool_formats import ToolFormat, text_arguments
from megatron_rl.api import ContextOutgrown, Sampler
from megatron_rl.config import GenerationConfig
from megatron_rl.types import LLMRequest, LLMResponse, Trajectory
from megatron_rl.workflows.conversation import Conversation, within
from megatron_rl.workflows.messages import Message
from megatron_rl.workflows.rendering import ChatTemplate
from megatron_rl.workflows.tools import THINK, THOUGHT, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EDGE_TOKENS = 16
"""A thought's opening is searched for in this many tokens at a prompt's end, and at a reply's beginning."""
THOUGHTS = (THINK, THOUGHT)
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9
"""Characters and length of call ids; some chat templates accept no others."""
INLINE_CHARACTERS = 8192
"""Messages with more characters are tokenized in a thread, because that takes more than a few milliseconds."""


class SessionOver(Exception):
    """Raised for a request of an agent whose run has ended."""


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """Settings shared by all sessions of a workflow."""

    tokenizer: PreTrainedTokenizerBase
    gconfig: GenerationConfig
    max_tokens: int
    template: ChatTemplate
    tools: ToolFormat
    """The model's format for tool calls."""
    constrained: str = "refuse"
    """One of constrained.CHOICES."""
    longest_token: int = field(init=False)
    """Number of characters of the vocabulary's longest token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest_token", max(map(len, self.tokenizer.get_vocab())))


@dataclass
class Line:
    """A dialogue so far. Its states (see State) share one copy of the tokens: copies would need quadratic memory."""

    conversation: Conversation
    split: str
    """Reason, as returned by `History.reason`, why this dialogue is not the continuation of an earlier one."""


@dataclass
class State:
    """A dialogue after one of its replies."""

    line: Line
    length: int
    """Number of the line's tokens up to this state."""
    replies: int
    last_reply: list[int]
    name: str
    """Hash of the exact messages. It distinguishes states that have the same canonical hash."""
    is_continued: bool = False

    def trajectory(self, reward: float, **sequence: float) -> Trajectory:
        made = self.line.conversation.trajectory(reward, turns=self.replies, **sequence)
        return dataclasses.replace(made, split=self.line.split)

    def fork(self) -> Conversation:
        copy = self.line.conversation.fork(self.length)
        copy.replies, copy.last_reply = self.replies, self.last_reply
        return copy


@dataclass
class AgentSession:
    """One run of an agent: its requests and the replies to them."""

    engine: Sampler
    options: ProxyOptions
    sample_key: str | None
    """Key of the sample. The keys of the sample's requests begin with this key."""
    key: str = field(default_factory=lambda: secrets.token_hex(24))
    """The agent's API key, which identifies the session and grants nothing else.

    It is hexadecimal because an agent may pass it on a command line, where a leading dash would look like an option.
    """
    last_reply: LLMResponse | None = None
    outgrown: str | None = None
    """Error message if the last request was refused because its dialogue had no room for a reply; otherwise None."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Context of the task that created the session. Requests run in this context.

    The contexts of the HTTP server's own tasks are not used, because those tasks belong to no attempt at an episode.
    """
    is_over: bool = False

    def __post_init__(self) -> None:
        self._rid = uuid.uuid4().hex
        self._states: dict[str, list[State]] = {}
        """{canonical hash of the messages: all states with these messages}."""
        self._history = History()
        self._replied: list[State] = []
        """The state after each reply, in the order received."""
        self._asked: Counter[str] = Counter()
        self._calls: set[asyncio.Task[Answer]] = set()

    def trajectories(self, reward: float | list[float], **sequence: float) -> list[Trajectory]:
        """Return one trajectory per dialogue and branch, in the order in which their first replies ended.

        reward: one reward for all trajectories, or a list with one reward per reply, in the order received. With a
        list, a trajectory's reward is the sum over the replies that it trains. Raises ValueError if the list's length
        is not the number of replies.
        """
        tips = [state for states in self._states.values() for state in states if not state.is_continued]
        if not isinstance(reward, list):
            for tip in tips:
                tip.line.conversation.earn(reward)  # all trajectories of a run need the same columns
            return [tip.trajectory(reward, **sequence) for tip in tips]
        if len(reward) != len(self._replied):
            raise ValueError(f"{len(reward)} rewards for {len(self._replied)} replies: must be one for each.")
        for state, own in zip(self._replied, reward, strict=True):
            state.line.conversation.earn(own, end=state.length)
        return [tip.trajectory(sum(own for _, own in tip.line.conversation.earned or []), **sequence) for tip in tips]

    async def close(self) -> None:
        """Cancel the session's generation and refuse further requests."""
        self.is_over = True
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    async def answer(
        self, body: dict[str, Any], *, shows_thoughts: bool = False, progress: Progress | None = None
    ) -> Answer:
        """Return the result of `complete`, or raise SessionOver once the session is closed."""
        completing = self.complete(body, shows_thoughts=shows_thoughts, progress=progress)
        call = asyncio.get_running_loop().create_task(completing, context=self.context)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            if self.is_over:
                call.cancel()
            return await call
        except asyncio.CancelledError:  # by `close`, or because the agent disconnected
            if self.is_over:
                raise SessionOver("the agent's time is over: nobody waits for its answer any more") from None
            raise

    async def complete(
        self, body: dict[str, Any], *, shows_thoughts: bool = False, progress: Progress | None = None
    ) -> Answer:
        """Answer a request of the chat completions API. Raises BadRequest or RequestRefused.

        shows_thoughts: True to report thoughts separately from the message. The agent may then continue the dialogue
        with or without the thoughts. progress: updated as the reply is generated.
        """
        try:
            answer = await self._complete(body, shows_thoughts, progress)
        except ContextOutgrown as error:
            self.outgrown = str(error)
            raise
        self.outgrown = None
        return answer

    async def count(self, body: dict[str, Any]) -> int:
        """Return the number of prompt tokens of a request."""
        return len((await self._prompt(body))[0])

    async def _prompt(self, body: dict[str, Any]) -> tuple[Conversation, State | None, list[Message]]:
        """Return the dialogue before the new reply, the state that it continues or None, and the request's messages."""
        check(body, OPTIONS)
        messages, tools = messages_of(body), tools_of(body)
        names = beginnings(messages, tools)
        parent, kept = self._continued(names)
        if parent is None:
            asked = {"messages": messages, "tools": tools}
            opening = await self._tokens(asked, partial(self.options.template.opening, asked))
            return Conversation(opening), None, messages
        conversation = parent.fork()
        added, calls = messages[kept:], messages[kept - 1].get("tool_calls", ())
        follow = partial(self.options.template.following, added, conversation.last_reply, calls)
        with self._marking(parent):
            conversation.add(await self._tokens(added, follow))
        return conversation, parent, messages

    async def _complete(self, body: dict[str, Any], shows_thoughts: bool, progress: Progress | None) -> Answer:
        conversation, parent, messages = await self._prompt(body)
        tools, stops = tools_of(body), stops_of(body)
        names = beginnings(messages, tools)
        form, decode = self.options.tools, self.options.tokenizer.decode
        # Some templates open a thought at the end of the prompt.
        is_opened = decode(conversation.ids[-EDGE_TOKENS:]).rstrip().endswith(THINK)

        def thinks(ids: list[int]) -> bool:
            # Check the tokens: if the mark is a special token, the reply's text does not show it.
            return is_opened or decode(ids[:EDGE_TOKENS]).lstrip().startswith(THINK)

        def grown(ids: list[int]) -> None:
            assert progress is not None
            text = up_to(form.text(self.options.tokenizer, ids, keeps=THOUGHTS).rstrip(HALF), stops)
            is_open = shows_thoughts and thinks(ids)
            thoughts, said = sure_parts(
                text, is_open=is_open, shows_thoughts=shows_thoughts, tools=form if tools else None
            )
            progress.grown(thoughts, said if shows_thoughts else self._without_special(said))

        grammar = grammar_of(body, tools, form, choice=self.options.constrained, is_opened=is_opened)
        with self._marking(parent):
            reply = await self._generate(conversation, body, names[-1].exact, progress, grown, grammar)
        conversation.take(reply, is_trained=grammar is None or self.options.constrained == "trained")
        # Check this only after the await, because agents send requests in parallel. Of several requests that continue
        # one state, the first to finish extends its line. The others become new lines, which do not train the shared
        # tokens.
        if parent is None or parent.is_continued:
            conversation.leave_out_before(0 if parent is None else parent.length)
            line = Line(conversation, self._history.reason(names, messages))
        else:
            parent.is_continued, line = True, parent.line
            line.conversation = conversation  # the line's other states are prefixes and stay valid
        # Hash the reply in the form that the next request will contain, whatever the agent's client adds or drops.
        answer = self._answer(reply, body, shows_thoughts=shows_thoughts, is_open=thinks(reply.output_tokens))
        whole = [*messages, normal(answer.message, "reply")]
        names = beginnings(whole, tools)
        self._history.add(names, whole)
        state = State(line, len(conversation), conversation.replies, conversation.last_reply, names[-1].exact)
        self._states.setdefault(names[-1].canonical, []).append(state)
        self._replied.append(state)
        self.last_reply = reply
        return answer

    def _continued(self, names: list[Beginning]) -> tuple[State | None, int]:
        """Return the state that matches the longest prefix of a request's messages, and the prefix's length.

        names: the Beginnings of the messages, shortest first.

        If several states match, prefer one with exactly the same messages, then one that is not continued yet.
        """
        # Never match the whole request: its last message is new.
        for kept in range(len(names) - 1, 0, -1):
            if states := self._states.get(names[kept - 1].canonical):
                exact = names[kept - 1].exact
                return min(states, key=lambda state: (state.name != exact, state.is_continued)), kept
        return None, 0

    @contextmanager
    def _marking(self, parent: State | None) -> Iterator[None]:
        """If the block raises ContextOutgrown, mark the dialogue of `parent` as cut off unless it was continued."""
        try:
            yield
        except ContextOutgrown:
            if parent is not None and not parent.is_continued:
                parent.line.conversation.is_cut_off = True
            raise

    async def _tokens(self, rendered: Any, render: Callable[[], list[int]]) -> list[int]:
        """Render and tokenize messages, in a thread if they are long.

        Raises ContextOutgrown if the context cannot hold the text, however long its tokens are.
        """
        characters = len(json.dumps(rendered, ensure_ascii=False))  # templates also write keys and numbers
        # Refuse by length alone: tokenizing megabytes takes seconds.
        if characters > self.options.max_tokens * self.options.longest_token:
            raise ContextOutgrown(
                f"messages: have {characters} characters, more than the {self.options.max_tokens} tokens of the "
                f"context can"
            )
        return render() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(render)

    async def _generate(
        self,
        conversation: Conversation,
        body: dict[str, Any],
        name: str,
        progress: Progress | None,
        grown: Callable[[list[int]], None],
        grammar: dict[str, str] | None,
    ) -> LLMResponse:
        room = self.options.max_tokens - len(conversation)
        if room < 1:
            raise ContextOutgrown(
                f"messages: have {len(conversation)} tokens, and the context is {self.options.max_tokens}"
            )
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or room
        gconfig = within(self.options.gconfig, min(room, asked))
        # Temperature and top_p stay the run's, because the trainer computes log-probabilities with them.
        gconfig = gconfig.new(stop=[*gconfig.stop, *stops_of(body)])
        # The key uses the messages' hash: agents ask in parallel, so a running number could differ after a restart.
        self._asked[name] += 1
        metadata = {}
        if self.sample_key is not None:
            metadata = {"sample_key": f"{self.sample_key}/{name[:16]}/{self._asked[name]}"}
        ids = list(conversation.ids)
        request = LLMRequest(rid=self._rid, input_ids=ids, gconfig=gconfig, metadata=metadata, grammar=grammar)
        if progress is not None:
            progress.input_len = len(conversation)
            # The engine may run in another event loop.
            request.on_tokens = partial(asyncio.get_running_loop().call_soon_threadsafe, grown)
        return await self.engine.agenerate(request)

    def _answer(self, reply: LLMResponse, body: dict[str, Any], *, shows_thoughts: bool, is_open: bool) -> Answer:
        """Convert a reply for the agent. is_open: True if a thought was opened before the reply or at its beginning."""
        form, tools = self.options.tools, tools_of(body)
        text, stop = until_stop(form.text(self.options.tokenizer, reply.output_tokens, keeps=THOUGHTS), stops_of(body))
        thoughts, said = split_thoughts(text, is_open=is_open) if shows_thoughts else (None, text)
        # Calls in a thought are drafts. If the thought is part of the reply, reopen it for the parser.
        opening = THINK if is_open and not shows_thoughts and not said.lstrip().startswith(THINK) else ""
        content, calls = form.split(opening + said, text_arguments(tools)) if tools else (said, [])
        is_one = body.get("parallel_tool_calls") is not False or len(calls) == 1
        # If a call is invalid, the agent sees the raw text instead.
        if not calls or any(call.fault for call in calls) or not is_one:
            content, calls = opening + said, []
        content = content.removeprefix(opening)
        if calls:
            content = content.strip()
        if not shows_thoughts:
            content = self._without_special(content)
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = list(told_calls(calls))
        return Answer(message=message, thoughts=thoughts, reply=reply, stop=stop)

    def _without_special(self, text: str) -> str:
        """Remove thought marks that are special tokens, just as decoding removes other special tokens."""
        special = {str(added) for added in self.options.tokenizer.added_tokens_decoder.values() if added.special}
        for mark in special.intersection(THOUGHTS):
            text = text.replace(mark, "")
        return text


def tools_of(body: dict[str, Any]) -> list[Message] | None:
    return body.get("tools") if body.get("tool_choice") != "none" else None


def stops_of(body: dict[str, Any]) -> list[str]:
    stop = body.get("stop") or []
    return [stop] if isinstance(stop, str) else stop


def until_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before its first stop string, and that string; all of it and None if it has no stop string."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return text, None
    place, stop = min(found)
    return text[:place], stop


def told_calls(calls: Iterable[ToolCall]) -> Iterator[Message]:
    """Yield calls in chat-completions form. A call keeps the id that the policy wrote if that id is unique."""
    ids: set[str] = set()
    for call in calls:
        identity = call.id if call.id and call.id not in ids else new_call_id()
        ids.add(identity)
        function = {"name": call.name, "arguments": json.dumps(call.arguments, allow_nan=False)}
        yield {"id": identity, "type": "function", "function": function}


def new_call_id() -> str:
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
