"""One run of an agent: the dialogues that it leads, and the tokens they are made of.

A request whose messages begin with those of an earlier request, and the reply that it got, continues that one's tokens:
nothing that was generated is tokenised again. Messages are compared in their canonical form (`agent_history`). One that
does not is a dialogue of its own. Each generated token is trained in one trajectory only, also where an agent goes back
and takes another way.
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
from megatron_rl.api import ContextOutgrown, Sampler
from megatron_rl.config import GenerationConfig
from megatron_rl.types import LLMRequest, LLMResponse, Trajectory
from megatron_rl.workflows.conversation import Conversation
from megatron_rl.workflows.messages import Message
from megatron_rl.workflows.multi_turn import within
from megatron_rl.workflows.rendering import ChatTemplate
from megatron_rl.workflows.tool_formats import ToolFormat, text_arguments
from megatron_rl.workflows.tools import THINK, THOUGHT, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EDGE_TOKENS = 16
"""Of a prompt's end, and a reply's beginning, in which a thought may be opened."""
THOUGHTS = (THINK, THOUGHT)
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9
"""Of a call's id: some chat templates take no others."""
INLINE_CHARACTERS = 8192
"""Longer ones are rendered and tokenised in a thread, as that takes longer than a few milliseconds."""


class SessionOver(Exception):
    """An agent asked for something after its end."""


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """The settings that all sessions of a workflow share."""

    tokenizer: PreTrainedTokenizerBase
    gconfig: GenerationConfig
    max_tokens: int
    template: ChatTemplate
    tools: ToolFormat
    """How the model writes calls."""
    constrained: str = "refuse"
    """As constrained.CHOICES has it."""
    longest_token: int = field(init=False)
    """Characters of the longest one in the vocabulary."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest_token", max(map(len, self.tokenizer.get_vocab())))


@dataclass
class Line:
    """A dialogue as far as it has come. All its states share it: each with tokens of its own would be quadratic."""

    conversation: Conversation
    split: str
    """Why it continues no earlier dialogue, or shares its beginning with one; empty for a first request."""


@dataclass
class State:
    """A dialogue after one of its replies."""

    line: Line
    length: int
    """Tokens of the line up to here."""
    replies: int
    last_reply: list[int]
    name: str
    """The exact one of its messages, of which other dialogues may have the same canonical form."""
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
    """The requests of one run of an agent, and the replies it got."""

    engine: Sampler
    options: ProxyOptions
    sample_key: str | None
    """The key of its sample; the keys of its requests begin with it."""
    key: str = field(default_factory=lambda: secrets.token_hex(24))
    """The agent's API key: it names the session, and opens nothing else. Hexadecimal, as an agent may make it a word of
    a command, where a dash would begin an option."""
    last_reply: LLMResponse | None = None
    outgrown: str | None = None
    """Why the last request was not answered, where its dialogue had no room for a reply."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Of the task that made the session: requests come in on the HTTP server's tasks, which belong to no attempt."""
    is_over: bool = False

    def __post_init__(self) -> None:
        self._rid = uuid.uuid4().hex
        self._states: dict[str, list[State]] = {}
        """By the canonical names of their messages."""
        self._history = History()
        self._replied: list[State] = []
        """After each reply, in the order in which they came."""
        self._asked: Counter[str] = Counter()
        self._calls: set[asyncio.Task[Answer]] = set()

    def trajectories(self, reward: float | list[float], **sequence: float) -> list[Trajectory]:
        """Return one for each dialogue, and each way that it took, in the order of their first replies' ends.

        reward: of each of them; or of each reply, in the order in which they came. Then a trajectory has the sum of
        those that are trained in it. ValueError for another number of rewards than replies.
        """
        tips = [state for states in self._states.values() for state in states if not state.is_continued]
        if not isinstance(reward, list):
            for tip in tips:
                tip.line.conversation.earn(reward)  # all trajectories of a run have the same columns
            return [tip.trajectory(reward, **sequence) for tip in tips]
        if len(reward) != len(self._replied):
            raise ValueError(f"{len(reward)} rewards for {len(self._replied)} replies: must be one for each.")
        for state, own in zip(self._replied, reward, strict=True):
            state.line.conversation.earn(own, end=state.length)
        return [tip.trajectory(sum(own for _, own in tip.line.conversation.earned or []), **sequence) for tip in tips]

    async def close(self) -> None:
        """End what is generated for it, and answer nothing any more."""
        self.is_over = True
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    async def answer(
        self, body: dict[str, Any], *, shows_thoughts: bool = False, progress: Progress | None = None
    ) -> Answer:
        """The same as `complete`, until `close`. SessionOver after that."""
        completing = self.complete(body, shows_thoughts=shows_thoughts, progress=progress)
        call = asyncio.get_running_loop().create_task(completing, context=self.context)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            if self.is_over:
                call.cancel()
            return await call
        except asyncio.CancelledError:  # by `close`, or because the agent hung up
            if self.is_over:
                raise SessionOver("the agent's time is over: nobody waits for its answer any more") from None
            raise

    async def complete(
        self, body: dict[str, Any], *, shows_thoughts: bool = False, progress: Progress | None = None
    ) -> Answer:
        """Answer a request of the chat completions API.

        shows_thoughts: they are no part of the message, and the dialogue goes on whether it comes back with them or
        without. progress: is told the reply as it comes. BadRequest and RequestRefused for what cannot be answered.
        """
        try:
            answer = await self._complete(body, shows_thoughts, progress)
        except ContextOutgrown as error:
            self.outgrown = str(error)
            raise
        self.outgrown = None
        return answer

    async def count(self, body: dict[str, Any]) -> int:
        """Return the tokens of what a request asks with."""
        return len((await self._prompt(body))[0])

    async def _prompt(self, body: dict[str, Any]) -> tuple[Conversation, State | None, list[Message]]:
        """Return the dialogue up to the reply, the state that it continues, and its messages."""
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
        # Some templates open a thought themselves.
        is_opened = decode(conversation.ids[-EDGE_TOKENS:]).rstrip().endswith(THINK)

        def thinks(ids: list[int]) -> bool:
            # Also where its mark is a special token, which the reply's text does not show.
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
        conversation.take(reply, is_trained=grammar is None)
        # Asked behind the await: agents ask in parallel, and of several requests that continue one state the first to
        # come back takes its line along. The others are lines of their own, without the tokens that it trains.
        if parent is None or parent.is_continued:
            conversation.leave_out_before(0 if parent is None else parent.length)
            line = Line(conversation, self._history.reason(names, messages))
        else:
            parent.is_continued, line = True, parent.line
            line.conversation = conversation  # the line's other states are its beginnings, which stay as they are
        # Named as it will come back in the next request, whatever the agent's client adds to it or leaves out.
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
        """Return the state with the most of these messages, and how many that is.

        Of several the one with the very same messages comes first, then one that nobody has continued.
        """
        # Never the whole request: its last message is what the agent has to say.
        for kept in range(len(names) - 1, 0, -1):
            if states := self._states.get(names[kept - 1].canonical):
                exact = names[kept - 1].exact
                return min(states, key=lambda state: (state.name != exact, state.is_continued)), kept
        return None, 0

    @contextmanager
    def _marking(self, parent: State | None) -> Iterator[None]:
        """Note of the dialogue up to `parent` that it was cut off, where it has no room for what is asked next."""
        try:
            yield
        except ContextOutgrown:
            if parent is not None and not parent.is_continued:
                parent.line.conversation.is_cut_off = True
            raise

    async def _tokens(self, rendered: Any, render: Callable[[], list[int]]) -> list[int]:
        """Render and tokenise what an agent said, not on the event loop where that takes long."""
        characters = len(json.dumps(rendered, ensure_ascii=False))  # templates write keys and numbers, too
        # Refused by its length alone: to tokenise megabytes takes seconds.
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
        # Temperature and top-p stay the run's: the trainer's log-probabilities are those of its config.
        gconfig = gconfig.new(stop=[*gconfig.stop, *stops_of(body)])
        # Agents ask in parallel, so a number in the order of asking would not be the same after a restart.
        self._asked[name] += 1
        metadata = {}
        if self.sample_key is not None:
            metadata = {"sample_key": f"{self.sample_key}/{name[:16]}/{self._asked[name]}"}
        ids = list(conversation.ids)
        request = LLMRequest(rid=self._rid, input_ids=ids, gconfig=gconfig, metadata=metadata, grammar=grammar)
        if progress is not None:
            progress.input_len = len(conversation)
            # The engine may have an event loop of its own.
            request.on_tokens = partial(asyncio.get_running_loop().call_soon_threadsafe, grown)
        return await self.engine.agenerate(request)

    def _answer(self, reply: LLMResponse, body: dict[str, Any], *, shows_thoughts: bool, is_open: bool) -> Answer:
        """Return what the agent is told of a reply. is_open: a thought was opened before it, or as it begins."""
        form, tools = self.options.tools, tools_of(body)
        text, stop = until_stop(form.text(self.options.tokenizer, reply.output_tokens, keeps=THOUGHTS), stops_of(body))
        thoughts, said = split_thoughts(text, is_open=is_open) if shows_thoughts else (None, text)
        # Calls in a thought are drafts; where it is told with the reply, it is opened again for the parser.
        opening = THINK if is_open and not shows_thoughts and not said.lstrip().startswith(THINK) else ""
        content, calls = form.split(opening + said, text_arguments(tools)) if tools else (said, [])
        is_one = body.get("parallel_tool_calls") is not False or len(calls) == 1
        # The agent sees what was said in place of a call.
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
        """Leave out the marks of thoughts that are special tokens, as decoding leaves out others."""
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
    """Return the text up to the stop string that comes first in it, and that one."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return text, None
    place, stop = min(found)
    return text[:place], stop


def told_calls(calls: Iterable[ToolCall]) -> Iterator[Message]:
    """Go through calls as chat completions have them, with the policy's ids where it gave them."""
    ids: set[str] = set()
    for call in calls:
        identity = call.id if call.id and call.id not in ids else new_call_id()
        ids.add(identity)
        function = {"name": call.name, "arguments": json.dumps(call.arguments, allow_nan=False)}
        yield {"id": identity, "type": "function", "function": function}


def new_call_id() -> str:
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
