"""An OpenAI-compatible endpoint on loopback, through which an agent that knows nothing of training is recorded.

A request whose messages begin with those of an earlier request, and the reply that it got, continues that one's tokens:
nothing that was generated is tokenised again. One that does not is a dialogue of its own. Each generated token is
trained in one trajectory only, also where an agent goes back and takes another way.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from megatron_rl.api import ContextOutgrown, InferenceEngine, RequestRefused
from megatron_rl.config import GenerationConfig
from megatron_rl.types import LLMRequest, LLMResponse, Trajectory
from megatron_rl.workflows.agent_request import BadRequest, as_rendered, check_options, messages_of, normal
from megatron_rl.workflows.conversation import ChatTemplate, Conversation, Message
from megatron_rl.workflows.multi_turn import within
from megatron_rl.workflows.tools import ToolCall, split_tool_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_BYTES, BYTES_PER_TOKEN = 2**20, 64
"""A request may have so many, and so many more for each token of the context: more text than any dialogue's."""
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
    longest_token: int = field(init=False)
    """Characters of the longest one in the vocabulary."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest_token", max(map(len, self.tokenizer.get_vocab())))


@dataclass
class Line:
    """A dialogue as far as it has come. All its states share it: each with tokens of its own would be quadratic."""

    conversation: Conversation


@dataclass
class State:
    """A dialogue after one of its replies."""

    line: Line
    length: int
    """Tokens of the line up to here."""
    replies: int
    last_reply: list[int]
    is_continued: bool = False

    def fork(self) -> Conversation:
        copy = self.line.conversation.fork(self.length)
        copy.replies, copy.last_reply = self.replies, self.last_reply
        return copy


@dataclass
class AgentSession:
    """The requests of one run of an agent, and the replies it got."""

    engine: InferenceEngine
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
        self._asked: Counter[str] = Counter()
        self._calls: set[asyncio.Task[tuple[Message, LLMResponse]]] = set()

    def trajectories(self, reward: float, **sequence: float) -> list[Trajectory]:
        """Return one for each dialogue, and each way that it took, in the order of their first replies' ends."""
        tips = [state for states in self._states.values() for state in states if not state.is_continued]
        return [tip.line.conversation.trajectory(reward, turns=tip.replies, **sequence) for tip in tips]

    async def close(self) -> None:
        """End what is generated for it, and answer nothing any more."""
        self.is_over = True
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    async def answer(self, body: dict[str, Any]) -> tuple[Message, LLMResponse]:
        """The same as `complete`, until `close`. SessionOver after that."""
        call = asyncio.get_running_loop().create_task(self.complete(body), context=self.context)
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

    async def complete(self, body: dict[str, Any]) -> tuple[Message, LLMResponse]:
        """Answer a request of the chat completions API: the assistant's message, and the reply that it was read from.

        BadRequest and RequestRefused for what cannot be answered.
        """
        try:
            message, reply = await self._complete(body)
        except ContextOutgrown as error:
            self.outgrown = str(error)
            raise
        self.outgrown = None
        return message, reply

    async def _complete(self, body: dict[str, Any]) -> tuple[Message, LLMResponse]:
        check_options(body)
        messages = messages_of(body)
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        names = prefix_names(messages, tools)
        parent, kept = self._continued(names)
        if parent is None:
            asked = {"messages": as_rendered(messages), "tools": tools}
            conversation = Conversation(await self._tokens(asked, partial(self.options.template.opening, asked)))
        else:
            conversation = parent.fork()
            added, reply_ids = as_rendered(messages[kept:]), conversation.last_reply
            conversation.add(await self._tokens(added, partial(self.options.template.following, added, reply_ids)))
        reply = await self._generate(conversation, body, names[-1])
        conversation.take(reply)
        # Asked behind the await: agents ask in parallel, and of several requests that continue one state the first to
        # come back takes its line along. The others are lines of their own, without the tokens that it trains.
        if parent is None or parent.is_continued:
            conversation.leave_out_before(0 if parent is None else parent.length)
            line = Line(conversation)
        else:
            parent.is_continued, line = True, parent.line
            line.conversation = conversation  # the line's other states are its beginnings, which stay as they are
        # Named as it will come back in the next request, whatever the agent's client adds to it or leaves out.
        message = self._message(reply, bool(tools))
        name = name_after(names[-1], normal(message, "reply"))
        state = State(line, len(conversation), conversation.replies, conversation.last_reply)
        self._states.setdefault(name, []).append(state)
        self.last_reply = reply
        return message, reply

    def _continued(self, names: list[str]) -> tuple[State | None, int]:
        """Return the state with the most of these messages, and how many that is; one nobody has continued first."""
        # Never the whole request: its last message is what the agent has to say.
        for kept in range(len(names) - 1, 0, -1):
            if states := self._states.get(names[kept - 1]):
                return min(states, key=lambda state: state.is_continued), kept
        return None, 0

    async def _tokens(self, rendered: Any, render: Callable[[], list[int]]) -> list[int]:
        """Render and tokenise what an agent said, not on the event loop where that takes long."""
        characters = sum(map(len, texts_in(rendered)))
        # Refused by its length alone: to tokenise megabytes takes seconds.
        if characters > self.options.max_tokens * self.options.longest_token:
            raise ContextOutgrown(
                f"messages: have {characters} characters, more than the {self.options.max_tokens} tokens of the "
                f"context can"
            )
        return render() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(render)

    async def _generate(self, conversation: Conversation, body: dict[str, Any], name: str) -> LLMResponse:
        room = self.options.max_tokens - len(conversation)
        if room < 1:
            raise ContextOutgrown(
                f"messages: have {len(conversation)} tokens, and the context is {self.options.max_tokens}"
            )
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or room
        stop = body.get("stop") or []
        gconfig = within(self.options.gconfig, min(room, asked))
        # Temperature and top-p stay the run's: the trainer's log-probabilities are those of its config.
        gconfig = gconfig.new(stop=[*gconfig.stop, *([stop] if isinstance(stop, str) else stop)])
        # Agents ask in parallel, so a number in the order of asking would not be the same after a restart.
        self._asked[name] += 1
        metadata = {}
        if self.sample_key is not None:
            metadata = {"sample_key": f"{self.sample_key}/{name[:16]}/{self._asked[name]}"}
        request = LLMRequest(rid=self._rid, input_ids=list(conversation.ids), gconfig=gconfig, metadata=metadata)
        return await self.engine.agenerate(request)

    def _message(self, reply: LLMResponse, may_call: bool) -> Message:
        text = str(self.options.tokenizer.decode(reply.output_tokens, skip_special_tokens=True))
        content, calls = split_tool_calls(text) if may_call else (text, [])
        if not calls or any(call.fault for call in calls):  # the agent sees what was said in place of a call
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": content, "tool_calls": list(map(tool_call, calls))}


class AgentProxy:
    """The HTTP side of some sessions, from `async with` to its end; after that agents find nothing there."""

    def __init__(self, max_tokens: int) -> None:
        """max_tokens: of the longest dialogue."""
        self._sessions: dict[str, AgentSession] = {}
        self._most_bytes = LEAST_BYTES + BYTES_PER_TOKEN * max_tokens
        app = web.Application(client_max_size=self._most_bytes)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        # An agent that goes away ends what was generated for it.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        self.base_url = ""

    async def __aenter__(self) -> AgentProxy:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @asynccontextmanager
    async def serving(self, session: AgentSession) -> AsyncIterator[None]:
        """Answer a session's requests; afterwards they are refused, whatever its agent still does."""
        self._sessions[session.key] = session
        try:
            yield
        finally:
            await session.close()

    def _session(self, request: web.Request) -> AgentSession | None:
        return self._sessions.get(request.headers.get("Authorization", "").removeprefix("Bearer "))

    async def _models(self, request: web.Request) -> web.Response:
        if self._session(request) is None:
            return refusal(401, "wrong API key")
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "run"}]}
        )

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise ContextOutgrown(
                f"the body has more than {self._most_bytes} bytes, and no dialogue of the context's tokens has"
            ) from error

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        if session is None:
            return refusal(401, "wrong API key; use the one that the agent was started with")
        try:
            body = json.loads(await self._body(request))
            if not isinstance(body, dict):
                return refusal(400, f"the body is a JSON {type(body).__name__}: must be an object")
            message, reply = await session.answer(body)
        except BadRequest as error:
            return refusal(400, str(error), error.field)
        except SessionOver as error:
            return refusal(403, str(error))
        except ContextOutgrown as error:  # before RequestRefused, whose kind it is
            session.outgrown = str(error)  # also of a body too large to read, which the session never saw
            return refusal(400, str(error), "messages", "context_length_exceeded")
        except (RequestRefused, ValueError, RecursionError) as error:
            return refusal(400, str(error))
        except RuntimeError as error:  # no server can answer now: OpenAI's clients try again by themselves
            return refusal(503, str(error))
        model = body.get("model") or "policy"
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        usage = {
            "prompt_tokens": reply.input_len,
            "completion_tokens": reply.output_len,
            "total_tokens": reply.input_len + reply.output_len,
        }
        finish = "tool_calls" if "tool_calls" in message else reply.stop_reason
        if body.get("stream"):
            return await stream(request, head, message, finish, usage, body)
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": token_logprobs(session.options.tokenizer, reply)}
        return web.json_response(head | {"object": "chat.completion", "choices": [choice], "usage": usage})


def texts_in(value: Any) -> Iterator[str]:
    """Go through all texts of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)


def refusal(status: int, message: str, field: str | None = None, code: str | None = None) -> web.Response:
    """Say no as OpenAI's API does; `field` is the one of the request that is at fault."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": field, "code": code}
    return web.json_response({"error": error}, status=status)


def name_after(name: str, message: Message) -> str:
    return hashlib.sha256((name + json.dumps(message, sort_keys=True)).encode()).hexdigest()


def prefix_names(messages: list[Message], tools: list[Message] | None) -> list[str]:
    """Return a name for each beginning of the dialogue: of the first message, of the first two, and so on."""
    # The template renders the tools into the dialogue's beginning: with others it is another dialogue.
    names, name = [], hashlib.sha256(json.dumps(tools or None, sort_keys=True).encode()).hexdigest()
    for message in messages:
        name = name_after(name, message)
        names.append(name)
    return names


def tool_call(call: ToolCall) -> Message:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def token_logprobs(tokenizer: PreTrainedTokenizerBase, reply: LLMResponse) -> list[dict[str, Any]]:
    pairs = zip(reply.output_tokens, reply.output_logprobs, strict=True)
    texts = [(tokenizer.decode([token]), logprob) for token, logprob in pairs]
    return [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in texts]


async def stream(
    request: web.Request,
    head: dict[str, Any],
    message: Message,
    finish: str,
    usage: dict[str, int],
    body: dict[str, Any],
) -> web.StreamResponse:
    """Send the reply, which is whole, as the events of a stream."""
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await answer.prepare(request)
    calls = [{"index": n} | call for n, call in enumerate(message.get("tool_calls", []))]
    delta = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
    choices = (
        [{"index": 0, "delta": delta, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": finish}],
    )
    events = [head | {"object": "chat.completion.chunk", "choices": choice} for choice in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(head | {"object": "chat.completion.chunk", "choices": [], "usage": usage})
    for event in events:
        await answer.write(f"data: {json.dumps(event)}\n\n".encode())
    await answer.write(b"data: [DONE]\n\n")
    await answer.write_eof()
    return answer
