"""Generation: the engine under every workflow, which gets replies from one or more rollout servers.

Replies are complete in spite of failures: a failed call is retried, on another server if there is one. An interrupted
reply continues from its partial output, and keeps the log-probability and policy version of every token.

    agenerate -> one reply: sends parts until one finishes by itself
    _part     -> one part: tries until a server returns a valid answer
    _try      -> one HTTP call; its answer is checked token by token (reply_check.py), because a 200 proves nothing
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any

import orjson
import torch

from megatron_rl import support
from megatron_rl.api import ContextOutgrown, RequestRefused, Sampler
from megatron_rl.config import UNADJUSTED, GenerationConfig, RolloutConfig
from megatron_rl.config.rollout_section import COUNTS_LATE, FORGETS_COUNTS, NO_ORDER
from megatron_rl.servers.client import ADAPTERS, ServerClient
from megatron_rl.servers.pool import ALONE, ClientOptions, Fleet
from megatron_rl.servers.reply_check import Asked, NoLogprob, ReplyPart, read_reply
from megatron_rl.servers.server_http import (
    BUSY,
    MAX_ANSWER_BYTES,
    BadReply,
    Busy,
    OutOfFiles,
    ServerError,
    UnknownLogprob,
    backoff,
    message_of,
)
from megatron_rl.support import NOT_ADJUSTED, Adjusting
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics
from megatron_rl.telemetry.spans import Span, Spans
from megatron_rl.types import LLMRequest, LLMResponse, SampledTokens

logger = logging.getLogger(__name__)

REQUEST_ATTEMPTS = 4
"""Maximum tries of one part of a reply, in each of the executor's `episode_attempts`."""
FIRST_RETRY_S = 0.1
FRUITLESS_RESUMES = 8
"""Consecutive interruptions without a new token, after which a reply is returned as aborted."""
REMEMBERED_RIDS = 65_536
EARLY_END_S = 5.0
"""Maximum wait for the tokens that a server has generated for a cancelled reply."""
TOKENS_IN_TIME = 6_000
"""Reply length for which rollout.request_timeout_s is meant. Requests for more tokens get proportionally more time."""
READ_HERE_BYTES = 32 * 1024
"""Replies of at least this size are parsed in another thread. For smaller ones the handover costs more than parsing."""
OF_THE_REQUEST = (400, 413, 422)
"""Statuses with which a server rejects the request itself. Others point to a problem of the server or its proxy."""
MOST_EVENTS = 512
"""Maximum SSE events per reply. Each repeats all tokens so far, so the total grows quadratically."""
SUPPORTS_SINCE = (0, 5, 19)
"""First SGLang version that is known to return each token's sampling mask."""
OUTPUT_IDS, UNFINISHED = re.compile(rb'"output_ids":\s*(\[[^\]]*\])'), re.compile(rb'"finish_reason":\s*null')


class SamplingClient(Sampler):
    """Generates replies on one client's servers. It belongs to the event loop that called `connect`.

    `version` is the current policy version.

    For example:

        client = SamplingClient(RolloutConfig(), ClientOptions(seed=1))
        await client.connect(["http://127.0.0.1:30000"])
        reply = await client.agenerate(LLMRequest(rid="a", input_ids=[1, 2, 3]))
        await client.close()
    """

    fleet: Fleet
    """The servers; set by `connect`."""

    def __init__(
        self,
        config: RolloutConfig,
        options: ClientOptions = ALONE,
        *,
        on_failure: Callable[[str], None] | None = None,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        """on_failure(message): called if something that the run depends on has ended.

        has_failed(): True once the rollout has failed.
        """
        self.config, self.options, self.version = config, options, 0
        self.is_connected = False
        self._on_failure, self._has_failed = on_failure, has_failed
        self._id = uuid.uuid4().hex[:8]
        self._rid_numbers = itertools.count()
        self._homes: OrderedDict[str, ServerClient] = OrderedDict()
        self.metrics = RolloutMetrics()
        self.spans = Spans(on_end=self._count_reward)
        """Spans of the work in progress: episodes, replies, their HTTP calls, rewards, commands to servers."""

    async def connect(self, urls: list[str]) -> None:
        """Connect to the servers at `urls`. Raises ServerError or RequestRefused, naming one that cannot be reached."""
        self._loop = asyncio.get_running_loop()
        self.fleet = Fleet(
            self.config,
            urls,
            self.options,
            spans=self.spans,
            version=self.get_version,
            on_failure=self._on_failure,
        )
        self.is_connected = True  # set early, so that `close` closes the session if connecting fails
        await self.fleet.connect()

    async def close(self) -> None:
        """Disconnect. The servers keep running. May be called twice."""
        if self.is_connected:
            self.is_connected = False
            await self.fleet.close()

    def get_version(self) -> int:
        return self.version

    def _count_reward(self, span: Span) -> None:
        if span.row == "rewards" and span.end_s is not None:
            self.metrics.add(rewards=1, reward_s=span.end_s - span.begin_s)
            self.metrics.observe(span.args.get("metrics", {}))

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Generate one reply, continuing after interruptions. Awaitable on any event loop.

        Raises ValueError for a request that every server would refuse, RuntimeError if the servers fail.
        """
        if not self.is_connected:
            raise RuntimeError("rollout client: not connected, or closed; connect it to its servers first.")
        if asyncio.get_running_loop() is not self._loop:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.agenerate(req), self._loop))
        with self.spans("replies", str(req.metadata.get("sample_key", req.rid))) as span:
            # Each round sends the prompt and all tokens so far to a server, which may be another one each time.
            reply = begun_by(req) or LLMResponse.nothing(req.input_ids)
            started, fruitless, timeout_s = time.monotonic(), 0, self._deadline_s(req)
            self.metrics.enter()
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    while fruitless <= FRUITLESS_RESUMES:
                        left = req.gconfig.max_new_tokens - reply.output_len
                        # A reply with a grammar cannot be continued, and a stop string could span two parts.
                        # Penalties would not count the tokens of earlier parts.
                        is_whole = req.grammar is not None or req.gconfig.stop or req.gconfig.counts_tokens
                        most = left if is_whole else min(left, self.config.part_tokens or left)
                        part = await self._part(req, reply, most, deadline)
                        add_part(reply, part)
                        self.metrics.add(guessed_passes=part.guessed_passes, right_guesses=part.right_guesses)
                        if part.stop_reason == "length" and len(part.sampled) == most < left:
                            fruitless = 0
                            continue
                        if reply.stop_reason != "abort":
                            break
                        if reply.output_len >= req.gconfig.max_new_tokens:
                            reply.stop_reason = "length"
                            break
                        reply.interruptions += 1
                        # Otherwise a server that aborts every part immediately would hold the request forever.
                        fruitless = 0 if len(part.sampled) else fruitless + 1
                        if req.grammar is not None:  # servers apply a grammar from the first generated token
                            reply, before = LLMResponse.nothing(req.input_ids), reply
                            reply.interruptions = before.interruptions
                        # The server may have been told to abort before this client hears of the pause that follows.
                        await asyncio.sleep(FIRST_RETRY_S * (1 if len(part.sampled) else 2**fruitless))
            except TimeoutError as error:
                for_length = " for its length" if timeout_s > self.config.request_timeout_s else ""
                raise ServerError(
                    f"request {req.rid}: no complete reply within rollout.request_timeout_s = "
                    f"{timeout_s:g} s{for_length} ({reply.output_len} of {req.gconfig.max_new_tokens} tokens came, "
                    f"{reply.interruptions} interruptions). Raise it, or ask for fewer tokens."
                ) from error
            finally:
                self.metrics.leave()
            reply.latency_s = time.monotonic() - started
            self.metrics.add(
                replies=1,
                tokens=reply.output_len,
                constrained_tokens=0 if req.grammar is None else reply.output_len,
                truncated=reply.stop_reason == "length",
                interruptions=reply.interruptions,
                latency_s=reply.latency_s,
            )
            if reply.support is not None and req.gconfig.support_size:
                self.metrics.add(supports=len(reply.support), support_tokens=int(support.sizes(reply.support).sum()))
            span.args |= {"tokens": reply.output_len, "stop_reason": reply.stop_reason}
            span.args |= {"interruptions": reply.interruptions}
        return reply

    async def _part(self, req: LLMRequest, reply: LLMResponse, most: int, deadline: asyncio.Timeout) -> ReplyPart:
        """Send prompt + generated tokens until a server returns a valid answer, at most REQUEST_ATTEMPTS times.

        most: new tokens to request.
        """
        generated, routed = reply.sampled.ids, 0 if reply.routes is None else len(reply.routes)
        params = sampling_params(req.gconfig, generated=len(generated), seed=self._seed_of(req, len(generated)))
        params |= req.grammar or {}
        room = params["max_new_tokens"]
        params |= {"max_new_tokens": most, "min_new_tokens": min(params["min_new_tokens"], most)}
        tokens = [*req.input_ids, *generated.tolist()]
        tell = req.on_tokens and partial(told, req.on_tokens, tokens[len(req.input_ids) :])
        failed: ServerClient | None = None
        refused: dict[ServerClient, RequestRefused] = {}
        attempt, busy = 1, 0
        await self._take_slot(deadline)  # before choosing, as a chosen server could be gone when a slot is free
        try:
            while True:
                server = await self._choose_server(req.rid, avoid=failed, deadline=deadline)
                check_request(server, tokens, room, req.gconfig.support_size)
                if req.gconfig.support_size or req.changed_size:
                    check_counting(server, req.gconfig, self.config.interruption)
                # SGLang refuses a rid that is in use by any client, and one episode may have many requests in flight.
                rid = f"{req.rid}-{self._id}-{next(self._rid_numbers)}"
                try:
                    rest = routed, req.gconfig.support_size, adjusting_of(req.gconfig), req.changed_size
                    part = await self._try(server, rid, tokens, params, deadline, begun_by(req), *rest, tell)
                except OutOfFiles as error:
                    with not_counted(deadline):
                        await asyncio.sleep(error.wait_s)
                except Busy as error:
                    failed = server
                    logger.info("%s", error)
                    with not_counted(deadline):
                        await asyncio.sleep(max(error.wait_s, backoff(busy)))
                    busy += 1
                except RequestRefused as refusal:
                    # A faulty server that refuses everything would soon be the least busy one and end every episode.
                    if refused or not self.fleet.has_another(server):
                        raise
                    refused[server] = refusal
                    failed = server
                except ServerError as error:
                    if attempt == REQUEST_ATTEMPTS:
                        raise
                    failed = server
                    self.metrics.add(request_retries=1)
                    logger.info("%s; attempt %d of %d", error, attempt, REQUEST_ATTEMPTS)
                    await asyncio.sleep(FIRST_RETRY_S * 2 ** (attempt - 1))
                    attempt += 1
                else:  # another server could: blame those that refused, not the request
                    for one, said in refused.items():
                        self.fleet.record_failure(one, BadReply(f"{said} (which another server did not)"))
                    self.metrics.add(stale_cache_tokens=server.cache.stale_tokens(part), bad_replies=len(refused))
                    return part
        finally:
            self.fleet.slots.release()

    def _deadline_s(self, req: LLMRequest) -> float:
        """Return rollout.request_timeout_s, scaled up for replies that may exceed TOKENS_IN_TIME tokens."""
        return self.config.request_timeout_s * max(1.0, req.gconfig.max_new_tokens / TOKENS_IN_TIME)

    async def _take_slot(self, deadline: asyncio.Timeout) -> None:
        """Wait for one of the connections that this process may open. The wait does not count towards the deadline."""
        with not_counted(deadline) if self.fleet.slots.locked() else contextlib.nullcontext():
            await self.fleet.slots.acquire()

    async def _try(
        self,
        server: ServerClient,
        rid: str,
        tokens: list[int],
        params: dict[str, Any],
        deadline: asyncio.Timeout,
        begun: LLMResponse | None,
        routed: int,
        support: int,
        adjusting: Adjusting,
        changed: int,
        on_tokens: Callable[[list[int]], None] | None,
    ) -> ReplyPart:
        """Generate on one server. Raises ServerError if the server fails or is dropped meanwhile.

        The failed server is then taken out of service, unless its reply merely lacks a log-probability. begun: the
        partial reply, to which the tokens generated so far are added if the caller is cancelled. routed: number of
        leading rows whose routes are known. support, adjusting, changed: as in `Fleet.asked`.
        """
        fleet, since = self.fleet, time.monotonic()
        # before sending: a publication may end meanwhile
        asked = fleet.asked(server, rid, tokens, params, routed, support, adjusting, changed)
        # In a separate task: dropping a server cancels its calls, but not the episodes that await them.
        call = asyncio.create_task(generate(server, asked, tokens, params, fleet.reply_readers, on_tokens))
        server.open_call(call)
        try:
            with self.spans("replies", "generate", server=server.url, rid=rid, version=asked.version) as span:
                part = await asyncio.shield(call)
                span.args |= {"tokens": len(part.sampled), "cached_tokens": part.cached_tokens, "timing": part.timing}
                span.args |= {"stop_reason": part.stop_reason, "versions": part.spans}
            await fleet.accept(server, part, asked)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if deadline.expired():  # the timeout cancels this task, as the episode's end does
                fleet.note_overdue(server, since)
            if task is None or task.cancelling():  # this episode is cancelled, not the call
                if begun is not None and not self._has_failed():
                    await self._end_early(server, call, asked, begun)
                raise
            raise ServerError(f"{server.url}/generate: the server was dropped meanwhile.") from None
        except ServerError as error:
            fleet.record_failure(server, error)
            if not isinstance(error, Busy):
                is_unknown = isinstance(error, UnknownLogprob)
                self.metrics.add(server_failures=not is_unknown, bad_replies=isinstance(error, BadReply))
                self.metrics.add(unknown_logprobs=is_unknown)
            raise
        finally:
            call.cancel()  # closes the connection, so that the server stops generating
            server.calls.discard(call)
        return part

    async def _end_early(
        self, server: ServerClient, call: asyncio.Task[ReplyPart], asked: Asked, begun: LLMResponse
    ) -> None:
        """Abort a request on the server, and keep the tokens that it returns within EARLY_END_S."""
        try:
            async with asyncio.timeout(EARLY_END_S):
                await server.call("POST", "/abort_request", {"rid": asked.rid}, timeout_s=EARLY_END_S)
                part = await call
                await self.fleet.accept(server, part, asked)
        except (ServerError, RequestRefused, TimeoutError) as error:
            logger.info("%s: request %s is ended without its tokens: %s", server.url, asked.rid, error)
        else:
            add_part(begun, part)

    async def _choose_server(self, rid: str, *, avoid: ServerClient | None, deadline: asyncio.Timeout) -> ServerClient:
        """Return the server that this rid used last, or else the `least_busy` one.

        Waits while the servers are paused or none is available. That time does not count towards the deadline.
        """
        members = self.fleet.members
        if not (self.fleet.open.is_set() and members.serving):
            with not_counted(deadline):
                # In a loop, because either condition may change while the other is awaited.
                while not (self.fleet.open.is_set() and members.serving):
                    await self.fleet.open.wait()
                    await members.wait_for_one(self.config.start_timeout_s)
        if self.fleet.router is not None:  # the router accepts requests like a server and distributes them
            return self.fleet.router.client
        home = self._homes.pop(rid, None)
        if home is None or home is avoid or home not in members.serving:
            home = least_busy(members.serving, rank=self.options.rank, ranks=self.options.ranks, avoid=avoid)
        self._homes[rid] = home  # its KV cache has this part, in case another part follows
        if len(self._homes) > REMEMBERED_RIDS:
            self._homes.popitem(last=False)
        return home

    def _seed_of(self, req: LLMRequest, generated: int) -> int | None:
        """Derive the sampling seed from the run's seed and the sample's name: equal on every server, rank and retry.

        A continuation gets a different seed, because the embedded server numbers draws per request and would repeat
        them.
        """
        key = req.metadata.get("sample_key")
        if req.gconfig.seed is not None:
            root = f"request {req.gconfig.seed}"
        elif self.options.seed is not None and key is not None:
            root = f"run {self.options.seed} {key}"
        else:
            return None
        return int.from_bytes(hashlib.sha256(f"{root} {generated}".encode()).digest()[:8]) >> 1


async def generate(
    server: ServerClient,
    asked: Asked,
    input_ids: list[int],
    params: dict[str, Any],
    readers: Executor,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> ReplyPart:
    """Generate once, without a timeout: the caller enforces the deadline. Raises BadReply for an invalid answer.

    params: SGLang's sampling parameters. readers: threads that parse long replies. on_tokens: called with all token ids
    so far as they arrive. If the server dies, those tokens are returned as an aborted reply.
    """
    body = {"rid": asked.rid, "input_ids": input_ids, "sampling_params": params, "return_logprob": True}
    if server.uses_adapters:
        body["lora_path"] = ADAPTERS
    if asked.routes is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": asked.routes_from}
    if asked.support:
        body["return_sampling_mask"] = True
    at_most = min(asked.bytes_at_most, MAX_ANSWER_BYTES)
    events = EventStream(on_tokens) if on_tokens and (server.info is None or server.info.streams_whole) else None
    if events is not None:
        every = -(-asked.max_new_tokens // MOST_EVENTS)
        body |= {
            "stream": True,
            "sampling_params": params | ({"stream_interval": every} if every > 1 else {}),
        }
    try:
        pieces = await server.call_once("POST", "/generate", body, at_most=at_most, stream=events)
    except RequestRefused as refusal:
        if refusal.status in OF_THE_REQUEST:
            raise
        raise ServerError(str(refusal)) from refusal  # credentials or proxy: another server may accept the prompt
    except ServerError as error:
        if events is None or not events.is_begun:
            raise
        logger.info("%s; the reply goes on from the %d tokens that had come", error, events.count)
    if events is not None:
        pieces = [events.reply(f"{server.url}/generate")]
    try:
        if sum(map(len, pieces)) < READ_HERE_BYTES:
            part = read_reply(pieces, asked)
        else:  # an abort returns all replies at once, which would block the event loop
            part = await asyncio.get_running_loop().run_in_executor(readers, read_reply, pieces, asked)
    except ValueError as error:
        kind = UnknownLogprob if isinstance(error, NoLogprob) else BadReply
        raise kind(f"{server.url}/generate: the reply cannot be used: {error}") from error
    server.last_reply_s = time.monotonic()  # only for good replies: bad ones do not show that it works
    return part


class EventStream:
    """Parser for a streamed reply. Each event repeats the whole reply so far, so the last event is the reply."""

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self._on_tokens = on_tokens
        self.rest, self._last = bytearray(), b""
        self.count = 0
        """Tokens received so far."""

    @property
    def is_begun(self) -> bool:
        return self.count > 0

    def take(self, piece: bytes) -> None:
        """Parse the next piece of the body. Raises RequestRefused or ServerError for an error event."""
        self.rest += piece
        *events, rest = self.rest.split(b"\n\n")
        self.rest = rest
        for event in events:
            content = bytes(event).removeprefix(b"data: ")
            if content.startswith(b'{"error"'):
                raise self._error(content)
            if (found := OUTPUT_IDS.search(content)) is not None:
                ids = orjson.loads(found[1])
                self._last, self.count = content, len(ids)
                self._on_tokens(ids)

    def _error(self, content: bytes) -> Exception:
        error = orjson.loads(content)["error"]
        code, words = (error.get("code"), message_of(content)) if isinstance(error, dict) else (None, str(error))
        if isinstance(code, int) and 400 <= code < 500 and code not in BUSY:
            return RequestRefused(words, code)
        return ServerError(f"the stream ended: {words}")

    def reply(self, what: str) -> bytes:
        """Return the body of the whole reply. A stream that was cut off becomes an aborted reply."""
        if not self._last:
            raise ServerError(f"{what}: the stream had no reply.")
        return UNFINISHED.sub(b'"finish_reason":{"type":"abort","message":"the stream was cut off"}', self._last)


def sampling_params(gconfig: GenerationConfig, *, generated: int, seed: int | None) -> dict[str, Any]:
    """Translate options into SGLang's fields, for a reply that already has `generated` tokens."""
    params: dict[str, Any] = {
        # Temperature 0 makes SGLang decode greedily; it then reports log-probabilities at temperature 1.
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": 1.0 if gconfig.greedy else gconfig.top_p,
        "top_k": 1 if gconfig.greedy else gconfig.top_k,
        "max_new_tokens": gconfig.max_new_tokens - generated,
        "min_new_tokens": max(0, gconfig.min_new_tokens - generated),
        "ignore_eos": gconfig.ignore_eos,
        "skip_special_tokens": False,
    }
    if gconfig.min_p and not gconfig.greedy:
        params["min_p"] = gconfig.min_p
    if gconfig.adjustment_size:
        params |= {
            name: getattr(gconfig, name) for name, nothing in UNADJUSTED.items() if getattr(gconfig, name) != nothing
        }
    if gconfig.logit_bias:  # JSON has only texts as keys
        params["logit_bias"] = {str(token): bias for token, bias in gconfig.logit_bias.items()}
    if gconfig.stop:
        params["stop"] = list(gconfig.stop)
    if gconfig.stop_token_ids:
        params["stop_token_ids"] = list(gconfig.stop_token_ids)
    if seed is not None and not gconfig.greedy:
        params["sampling_seed"] = seed
    return params


def adjusting_of(gconfig: GenerationConfig) -> Adjusting:
    """Return the options that change logits, as they are sent to servers."""
    if not gconfig.adjustment_size:
        return NOT_ADJUSTED
    penalties = {name: getattr(gconfig, name) for name in UNADJUSTED if name != "logit_bias"}
    return Adjusting(**penalties, logit_bias=tuple(gconfig.logit_bias.items()))


def least_busy(
    serving: list[ServerClient], *, rank: int, ranks: int, avoid: ServerClient | None = None
) -> ServerClient:
    """Return the server with the fewest requests of this client. `avoid` is returned only if there is no other.

    rank, ranks: this client's number among the clients of the same servers, and their count. Ties go to the first
    server on a ring of all servers, on which the ranks start at equal distances. So ranks fill the servers evenly
    without knowing of each other: if they have equally many groups, the servers' loads differ by at most one.
    """
    ring = sorted(serving, key=lambda server: server.url)  # `serving` is in the order in which servers returned
    begin = rank * len(ring) // ranks
    ring = ring[begin:] + ring[:begin]
    return min([server for server in ring if server is not avoid] or ring, key=lambda server: len(server.calls))


def begun_by(req: LLMRequest) -> LLMResponse | None:
    """Return the partial reply to continue, or None. A reply with a grammar cannot be continued."""
    return req.begun if req.grammar is None else None


def told(on_tokens: Callable[[list[int]], None], before: list[int], ids: list[int]) -> None:
    on_tokens([*before, *ids])


def add_part(reply: LLMResponse, part: ReplyPart) -> None:
    reply.sampled = SampledTokens.cat([reply.sampled, part.sampled]) if reply.output_len else part.sampled
    if part.routes is not None:
        reply.routes = part.routes if reply.routes is None else torch.cat([reply.routes, part.routes])
    if part.support is not None and len(part.support):
        reply.support = part.support if reply.support is None else torch.cat([reply.support, part.support])
        if part.adjustment is not None:
            known = part.adjustment[:0] if reply.adjustment is None else reply.adjustment
            reply.adjustment = torch.cat([known, part.adjustment])
    reply.text += part.text
    reply.stop_reason = part.stop_reason


@contextlib.contextmanager
def not_counted(deadline: asyncio.Timeout) -> Iterator[None]:
    """Stop the deadline's clock inside the block."""
    clock, when = asyncio.get_running_loop().time, deadline.when()
    left_s = None if when is None else when - clock()
    deadline.reschedule(None)
    try:
        yield
    finally:
        if left_s is not None:
            deadline.reschedule(clock() + left_s)


def check_request(server: ServerClient, tokens: list[int], max_new_tokens: int, support: int = 0) -> None:
    """Raise RequestRefused for a request that the server could not serve.

    support: as in `Fleet.asked`.

    A token id beyond the vocabulary would crash SGLang on a CPU.
    """
    if not tokens:
        raise RequestRefused("input_ids = []: a prompt needs at least one token.")
    info = server.info
    if info is None:
        return
    if info.vocab_size is not None and not 0 <= min(tokens) <= max(tokens) < info.vocab_size:
        wrong = max(tokens) if max(tokens) >= info.vocab_size else min(tokens)
        raise RequestRefused(
            f"input_ids hold {wrong}: {server.url} has a vocabulary of {info.vocab_size} ids from 0; "
            "use the tokenizer of the served model."
        )
    if support and info.version < SUPPORTS_SINCE:
        since, version = (".".join(map(str, number)) for number in (SUPPORTS_SINCE, info.version))
        raise RequestRefused(
            f"generation.top_k: {server.url} is SGLang {version}, which does not tell which tokens it sampled from; "
            f"use SGLang {since} or later, or set generation.top_k=-1."
        )
    if info.context_length is not None and len(tokens) + max_new_tokens > info.context_length:
        raise ContextOutgrown(
            f"{len(tokens)} tokens of prompt + {max_new_tokens} of generation.max_new_tokens exceed the context of "
            f"{info.context_length} of {server.url}. Lower max_new_tokens, drop long prompts, or start the server with "
            "a larger --context-length."
        )


def check_counting(server: ServerClient, gconfig: GenerationConfig, interruption: str) -> None:
    """Raise RequestRefused for penalties if the server does not apply them exactly to the tokens of a reply so far.

    interruption: rollout.interruption.
    """
    info = server.info
    if info is None or info.is_embedded or not gconfig.counts_tokens:
        return
    name = next(name for name, nothing in UNADJUSTED.items() if getattr(gconfig, name) != nothing)
    key = f"generation.{name} = {getattr(gconfig, name)}: {server.url}"
    if info.counts_late:
        raise RequestRefused(
            f"{key}: {COUNTS_LATE}; start it with --disable-overlap-schedule, in rollout.server_args if the run starts "
            f"it, and without --speculative-algorithm."
        )
    if gconfig.mixes_penalties:
        raise RequestRefused(f"{key}: {NO_ORDER}; set it to 1, or the others to 0.")
    if interruption == "retract":
        raise RequestRefused(f"{key}: {FORGETS_COUNTS}; set rollout.interruption=abort.")
