"""Generation: the engine under every workflow, which gets replies from one or more rollout servers.

Replies are complete in spite of failures: a failed call is retried, on another server if there is one. An interrupted
reply continues from its partial output, and keeps the log-probability and policy version of every token.

    agenerate   gets one reply: requests part after part until the reply is finished, and each part until a server
                answers
    _try        makes one HTTP call and checks the answer token by token (reply_check.py), because status 200 alone
                proves nothing
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
import torch

from megatron_rl import support
from megatron_rl.api import RequestRefused, Sampler
from megatron_rl.config import RolloutConfig
from megatron_rl.servers.client import ADAPTERS, ServerClient
from megatron_rl.servers.event_stream import MOST_EVENTS, EventStream
from megatron_rl.servers.http_connections import Exchange
from megatron_rl.servers.pool import ALONE, ClientOptions, Fleet
from megatron_rl.servers.reply_check import Asked, NoLogprob, ReplyPart, read_reply
from megatron_rl.servers.request_rules import adjusting_of, check_counting, check_request, sampling_params
from megatron_rl.servers.server_http import (
    JSON,
    MAX_ANSWER_BYTES,
    BadReply,
    Busy,
    Dropped,
    OutOfFiles,
    ServerError,
    UnknownLogprob,
    backoff,
)
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics
from megatron_rl.telemetry.spans import Span, Spans
from megatron_rl.types import LLMRequest, LLMResponse, SampledTokens

logger = logging.getLogger(__name__)

REQUEST_ATTEMPTS = 4
"""Maximum number of tries to get one part of a reply. A retried episode (`episode_attempts`) counts them anew."""
FIRST_RETRY_S = 0.1
FRUITLESS_RESUMES = 8
"""Maximum number of consecutive interruptions without a new token. After one more, the reply is returned as aborted."""
REMEMBERED_RIDS = 65_536
EARLY_END_S = 5.0
"""Maximum seconds to wait for the tokens that a server has generated for a cancelled reply."""
TOKENS_IN_TIME = 6_000
"""Reply length for which rollout.request_timeout_s is meant. Requests for more tokens get proportionally more time."""
READ_HERE_BYTES = 32 * 1024
"""Replies of at least this size are parsed in another thread. Smaller ones are parsed on the event loop, because it
takes longer to pass them to another thread than to parse them."""
OF_THE_REQUEST = (400, 413, 422)
"""HTTP statuses with which a server rejects the request itself. Others indicate a fault of the server or its proxy."""


@dataclass(kw_only=True)
class Asking:
    """A request for the next part of a reply, and the outcomes of the tries so far."""

    req: LLMRequest
    tokens: list[int]
    """The prompt and the reply so far."""
    params: dict[str, Any]
    """Sampling parameters under SGLang's names."""
    room: int
    """Maximum new tokens of this part and all parts that may follow, together."""
    routed: int
    """Number of leading tokens whose expert routes are already known and are not requested again."""
    tell: Callable[[list[int]], None] | None
    """Function that is called, as tokens arrive, with the ids of all tokens of this part so far. None: not called."""
    failed: ServerClient | None = None
    """Server of the last failed try, which the next try avoids."""
    refused: dict[ServerClient, RequestRefused] = field(default_factory=dict)
    attempt: int = 1
    busy: int = 0
    """Number of tries so far that failed because the server was busy."""


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
        """Create the client without contacting servers.

        on_failure: called with a message if one of the client's permanent tasks has ended. has_failed: returns True
        once the rollout has failed.
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
        """Connect to the servers at `urls`.

        If one of them cannot be reached or used, raises ServerError or RequestRefused, which names it.
        """
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
        """Disconnect from the servers, which keep running. May be called twice."""
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
        """Generate one reply, and continue it after interruptions. May be awaited on any event loop.

        Raises ValueError if every server would refuse the request, and RuntimeError if the servers fail.
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
                        asking, part = self._asking(req, reply, most), None
                        await self._take_slot(deadline)  # before a server is chosen, which could be gone by then
                        try:
                            while part is None:
                                part = await self._try(asking, deadline)
                        finally:
                            self.fleet.slots.release()
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

    def _deadline_s(self, req: LLMRequest) -> float:
        """Return the timeout of a reply: rollout.request_timeout_s, or more if it may exceed TOKENS_IN_TIME tokens."""
        return self.config.request_timeout_s * max(1.0, req.gconfig.max_new_tokens / TOKENS_IN_TIME)

    async def _take_slot(self, deadline: asyncio.Timeout) -> None:
        """Wait until this process may open one more connection. The time does not count towards the deadline."""
        with not_counted(deadline) if self.fleet.slots.locked() else contextlib.nullcontext():
            await self.fleet.slots.acquire()

    def _asking(self, req: LLMRequest, reply: LLMResponse, most: int) -> Asking:
        """Return the request for the next part of a reply.

        reply: the parts that have arrived. most: maximum new tokens of the next part.
        """
        generated = reply.sampled.ids.tolist()
        params = sampling_params(req.gconfig, generated=len(generated), seed=self._seed_of(req, len(generated)))
        params |= req.grammar or {}
        room = params["max_new_tokens"]
        params["max_new_tokens"], params["min_new_tokens"] = most, min(params["min_new_tokens"], most)
        return Asking(
            req=req,
            tokens=[*req.input_ids, *generated],
            params=params,
            room=room,
            routed=0 if reply.routes is None else len(reply.routes),
            tell=req.on_tokens and partial(told, req.on_tokens, generated),
        )

    async def _try(self, asking: Asking, deadline: asyncio.Timeout) -> ReplyPart | None:
        """Request a part of a reply from one server. If this fails but may be tried again, wait, and return None.

        Raises ServerError after REQUEST_ATTEMPTS failures, and RequestRefused if all servers would refuse the request.
        A server that fails is taken out of service, unless its reply merely lacks a log-probability. If the caller is
        cancelled, the tokens generated so far are added to the request's partial reply.
        """
        req, fleet, size = asking.req, self.fleet, asking.req.gconfig.support_size
        server = await self._choose_server(req.rid, avoid=asking.failed, deadline=deadline)
        check_request(server, asking.tokens, asking.room, size)
        if size or req.changed_size:
            check_counting(server, req.gconfig, self.config.interruption)
        # SGLang refuses a rid that is in use by any client, and one episode may have many requests in flight.
        rid = f"{req.rid}-{self._id}-{next(self._rid_numbers)}"
        # before sending: a publication may end meanwhile
        asked = fleet.asked(
            server, rid, asking.tokens, asking.params, asking.routed, size, adjusting_of(req.gconfig), req.changed_size
        )  # fmt: skip
        streams = asking.tell is not None and (server.info is None or server.info.streams_whole)
        events = EventStream(asking.tell) if asking.tell is not None and streams else None
        body = body_of(server, asked, asking, is_streamed=events is not None)
        failure, since = None, time.monotonic()
        call = Exchange(min(asked.bytes_at_most, MAX_ANSWER_BYTES), events)
        server.open_call(call)
        try:
            with self.spans("replies", "generate", server=server.url, rid=rid, version=asked.version) as span:
                server.connections.send(call, server.origin, "POST", "/generate", body, JSON)
                part = await self._read(server, call, asked, events)
                span.args |= {"tokens": len(part.sampled), "cached_tokens": part.cached_tokens, "timing": part.timing}
                span.args |= {"stop_reason": part.stop_reason, "versions": part.spans}
            await fleet.accept(server, part, asked)
        except asyncio.CancelledError:
            if deadline.expired():  # cancelled by the timeout, not by the episode's end
                fleet.note_overdue(server, since)
            if (begun := begun_by(req)) is not None and not self._has_failed():
                await self._end_early(server, call, asked, events, begun)
            raise
        except (ServerError, RequestRefused) as error:
            failure = error
        finally:
            call.close()  # otherwise the server would continue to generate
            server.calls.discard(call)
        if failure is not None:
            await self._wait_after(failure, server, asking, deadline)
            return None
        for one, said in asking.refused.items():  # one server replied, so those that refused are at fault
            fleet.record_failure(one, BadReply(f"{said} (which another server did not)"))
        self.metrics.add(stale_cache_tokens=server.cache.stale_tokens(part), bad_replies=len(asking.refused))
        return part

    async def _wait_after(
        self, error: ServerError | RequestRefused, server: ServerClient, asking: Asking, deadline: asyncio.Timeout
    ) -> None:
        """Count a failed try, and wait before the next one. Raise `error` again if there must be no further try."""
        if isinstance(error, RequestRefused):
            # A faulty server that refuses everything would soon be the least busy one and end every episode.
            if asking.refused or not self.fleet.has_another(server):
                raise error
            asking.refused[server], asking.failed = error, server
            return
        if not isinstance(error, Dropped):
            self.fleet.record_failure(server, error)
        if isinstance(error, OutOfFiles):
            with not_counted(deadline):
                await asyncio.sleep(error.wait_s)
            return
        asking.failed = server
        if isinstance(error, Busy):
            logger.info("%s", error)
            with not_counted(deadline):
                await asyncio.sleep(max(error.wait_s, backoff(asking.busy)))
            asking.busy += 1
            return
        if not isinstance(error, Dropped):
            is_unknown = isinstance(error, UnknownLogprob)
            self.metrics.add(server_failures=not is_unknown, bad_replies=isinstance(error, BadReply))
            self.metrics.add(unknown_logprobs=is_unknown)
        if asking.attempt == REQUEST_ATTEMPTS:
            raise error
        self.metrics.add(request_retries=1)
        logger.info("%s; attempt %d of %d", error, asking.attempt, REQUEST_ATTEMPTS)
        await asyncio.sleep(FIRST_RETRY_S * 2 ** (asking.attempt - 1))
        asking.attempt += 1

    async def _read(self, server: ServerClient, call: Exchange, asked: Asked, events: EventStream | None) -> ReplyPart:
        """Wait for the answer to `call` and check it. Raises BadReply if the answer is invalid.

        asked: the facts against which the answer is checked. events: parser of a streamed answer; None if it is not
        streamed. If a server dies while it streams, the tokens that came are returned as an aborted reply.
        """
        try:
            pieces = await server.answer(call, "/generate")
        except RequestRefused as refusal:
            if refusal.status in OF_THE_REQUEST:
                raise
            raise ServerError(str(refusal)) from refusal  # credentials or proxy: another server may accept the prompt
        except ServerError as error:
            if events is None or not events.is_begun or isinstance(error, Dropped):
                raise
            logger.info("%s; the reply goes on from the %d tokens that had come", error, events.count)
        if events is not None:
            pieces = [events.reply(f"{server.url}/generate")]
        try:
            if sum(map(len, pieces)) < READ_HERE_BYTES:
                part = read_reply(pieces, asked)
            else:  # an abort returns all replies at once, which would block the event loop
                loop = asyncio.get_running_loop()
                part = await loop.run_in_executor(self.fleet.reply_readers, read_reply, pieces, asked)
                if isinstance(call.error, Dropped):
                    raise call.error
        except ValueError as error:
            kind = UnknownLogprob if isinstance(error, NoLogprob) else BadReply
            raise kind(f"{server.url}/generate: the reply cannot be used: {error}") from error
        server.last_reply_s = time.monotonic()  # only for good replies: bad ones do not show that it works
        return part

    async def _end_early(
        self, server: ServerClient, call: Exchange, asked: Asked, events: EventStream | None, begun: LLMResponse
    ) -> None:
        """Abort a request on the server, and add the tokens that it returns within EARLY_END_S to `begun`."""
        try:
            async with asyncio.timeout(EARLY_END_S):
                await server.call("POST", "/abort_request", {"rid": asked.rid}, timeout_s=EARLY_END_S)
                part = await self._read(server, call, asked, events)
                await self.fleet.accept(server, part, asked)
        except (ServerError, RequestRefused, TimeoutError) as error:
            logger.info("%s: request %s is ended without its tokens: %s", server.url, asked.rid, error)
        else:
            add_part(begun, part)

    async def _choose_server(self, rid: str, *, avoid: ServerClient | None, deadline: asyncio.Timeout) -> ServerClient:
        """Return the server for the next part of the reply `rid`: that of the last part, or else the `least_busy` one.

        Waits while the servers are paused or none is available. That time does not count towards the deadline. avoid:
        server that is returned only if there is no other.
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
        """Derive the sampling seed of a request from the run's seed and the sample's name; None if it has no seed.

        The result is the same on every server, rank and retry. generated: number of tokens that the reply already has.
        A continuation must have another seed, because the embedded server numbers its draws per request: with the same
        seed it would repeat them.
        """
        key = req.metadata.get("sample_key")
        if req.gconfig.seed is not None:
            root = f"request {req.gconfig.seed}"
        elif self.options.seed is not None and key is not None:
            root = f"run {self.options.seed} {key}"
        else:
            return None
        return int.from_bytes(hashlib.sha256(f"{root} {generated}".encode()).digest()[:8]) >> 1


def body_of(server: ServerClient, asked: Asked, asking: Asking, *, is_streamed: bool) -> bytes:
    """Return the body of a /generate request, in JSON."""
    params = asking.params
    body: dict[str, Any] = {"rid": asked.rid, "input_ids": asking.tokens}
    body |= {"sampling_params": params, "return_logprob": True}
    if server.uses_adapters:
        body["lora_path"] = ADAPTERS
    if asked.routes is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": asked.routes_from}
    if asked.support:
        body["return_sampling_mask"] = True
    if is_streamed:
        every = -(-asked.max_new_tokens // MOST_EVENTS)
        body |= {"stream": True, "sampling_params": params | ({"stream_interval": every} if every > 1 else {})}
    return orjson.dumps(body)


def least_busy(
    serving: list[ServerClient], *, rank: int, ranks: int, avoid: ServerClient | None = None
) -> ServerClient:
    """Return the server with the fewest requests of this client. `avoid` is returned only if there is no other.

    Among equally busy servers, it is the first one on a ring of all servers. The clients start at equal distances on
    this ring, so they fill the servers evenly without knowing of each other. If all clients have equally many groups,
    the servers' loads differ by at most one.

    rank, ranks: this client's number among the clients of the same servers, and the number of these clients.
    """
    ring = sorted(serving, key=lambda server: server.url)  # `serving` is in the order in which servers returned
    begin = rank * len(ring) // ranks
    ring = ring[begin:] + ring[:begin]
    return min([server for server in ring if server is not avoid] or ring, key=lambda server: len(server.calls))


def begun_by(req: LLMRequest) -> LLMResponse | None:
    """Return the partial reply that a request continues, or None. A reply with a grammar cannot be continued."""
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
    """Postpone the deadline by the time spent inside the `with` block."""
    clock, when = asyncio.get_running_loop().time, deadline.when()
    left_s = None if when is None else when - clock()
    deadline.reschedule(None)
    try:
        yield
    finally:
        if left_s is not None:
            deadline.reschedule(clock() + left_s)
