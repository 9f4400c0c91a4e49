"""The client of one or more rollout servers, SGLang or embedded: replies for workflows, control for the publisher.

A reply is complete whatever happens on the way: a failed call is sent again (to another server where there is one), an
interrupted one continues from its partial output, with the log-probability and policy version of every token kept.
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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_rl.api import ContextOutgrown, InferenceEngine, RequestRefused, RolloutWorkflow
from megatron_rl.config import RolloutConfig
from megatron_rl.launch import open_files
from megatron_rl.rollout.events import RolloutEvents
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.rollout.rollout_metrics import Counts, RolloutMetrics, metrics_of
from megatron_rl.servers.client import BadReply, Busy, ServerClient, ServerError, backoff, sampling_params
from megatron_rl.servers.event_loop import EventLoopThread
from megatron_rl.servers.pool import Fleet
from megatron_rl.servers.reply_check import Asked, ReplyPart
from megatron_rl.servers.weight_receiver import ServerWeights
from megatron_rl.telemetry.spans import Span, Spans
from megatron_rl.types import FinetuneSpec, LLMRequest, LLMResponse, TrajectoryBatch

logger = logging.getLogger(__name__)

REQUEST_ATTEMPTS = 4
"""Tries of one HTTP call; the executor's `episode_attempts` come on top."""
FIRST_RETRY_S = 0.1
FRUITLESS_RESUMES = 8
"""Interruptions in a row without a new token, after which a reply is returned as aborted."""
REMEMBERED_RIDS = 65_536
EARLY_END_S = 5.0
"""Longest that a cancelled reply waits for the tokens that its server has of it."""
TOKENS_IN_TIME = 6_000
"""Tokens of a reply for which rollout.request_timeout_s is meant."""


class RemoteSGLangEngine(ServerWeights, InferenceEngine):
    """Implements InferenceEngine and WeightReceiver. One trainer rank makes it; HTTP runs on a thread of its own."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        seed: int | None = None,
        events: Sequence[RolloutEvents] = (),
        on_drop: Callable[[str, str], None] | None = None,
        run_name: str = "",
        vocab_size: int | None = None,
    ) -> None:
        """`on_drop(url, reason)` is called, on the rollout thread, for a server that fails a publication, or whose
        replies are not to be believed. `vocab_size`: the model's, where it is known.

        With `run_name`, servers that register for it in rollout.registry come and go. The client that publishes needs
        it; others follow that one, by `mark_published`.
        """
        self.config, self.seed, self.events, self.on_drop = config, seed, events, on_drop
        self.run_name, self.vocab_size = run_name, vocab_size
        self._version = 0
        self._client_id = uuid.uuid4().hex[:8]
        self._rid_numbers = itertools.count()
        self._homes: OrderedDict[str, ServerClient] = OrderedDict()
        self._metrics = RolloutMetrics()
        self.spans = Spans(on_end=self._count_reward)
        """What is under way: episodes, replies, the calls for them, rewards, commands to servers."""
        self._thread: EventLoopThread | None = None

    def initialize(self, addr: str | list[str] | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Connect to the servers at `addr` (default: config.servers). RuntimeError names a server that is not there."""
        urls = [addr] if isinstance(addr, str) else list(addr or self.config.servers)
        if not urls:
            raise ValueError(
                "rollout.servers = []: no server to connect to; set it, or start servers and give their URLs."
            )
        if self._thread is not None:
            raise RuntimeError("RemoteSGLangEngine.initialize: is initialized already; call destroy() first.")
        open_files.raise_limit()
        self._thread = EventLoopThread("rollout", blocking_steps=self.config.max_concurrent_episodes)
        self._executor = RolloutExecutor(self, self.config, self._metrics, self.events, self.spans)

        async def connect() -> None:
            self._fleet = Fleet(
                self.config,
                urls,
                self.on_drop,
                run_name=self.run_name,
                spans=self.spans,
                version=self.get_version,
                vocab_size=self.vocab_size,
                on_failure=self._executor.fail,
            )
            await self._fleet.connect()

        try:
            self._thread.run(connect())
        except (ServerError, RequestRefused) as error:
            error.args = (f"rollout.servers: {error}",)
            self.destroy()
            raise

    def destroy(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel what is in flight and disconnect; the servers stay up. May be called twice.

        last: closes what was used on this event loop beside the engine, once nothing uses it any more.
        """
        if self._thread is None:
            if last is not None:
                asyncio.run(last)
            return
        thread, self._thread = self._thread, None
        thread.loop.call_soon_threadsafe(self._executor.fail, "the rollout engine was destroyed.")
        thread.run(self._fleet.close())
        thread.stop(last)

    def _count_reward(self, span: Span) -> None:
        if span.row == "rewards" and span.end_s is not None:
            self._metrics.add(rewards=1, reward_s=span.end_s - span.begin_s)
            self._metrics.observe(span.args.get("metrics", {}))

    # -- replies

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Generate one reply; an interrupted one is continued. Awaitable on any event loop.

        ValueError for a request that no server would take, RuntimeError where the servers do not manage it.
        """
        thread = self._running_thread()
        if asyncio.get_running_loop() is thread.loop:
            return await self._generate(req)
        return await asyncio.wrap_future(thread.submit(self._generate(req)))

    async def _generate(self, req: LLMRequest) -> LLMResponse:
        with self.spans("replies", str(req.metadata.get("sample_key", req.rid))) as span:
            reply = await self._whole_reply(req)
            span.args |= {"tokens": reply.output_len, "stop_reason": reply.stop_reason}
            span.args |= {"interruptions": reply.interruptions}
        return reply

    async def _whole_reply(self, req: LLMRequest) -> LLMResponse:
        reply = req.begun or LLMResponse.nothing(req.input_ids)
        started, fruitless, timeout_s = time.monotonic(), 0, self._deadline_s(req)
        self._metrics.enter()
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                while fruitless <= FRUITLESS_RESUMES:
                    part = await self._generate_part(req, reply.output_tokens, deadline)
                    add_part(reply, part)
                    if reply.stop_reason != "abort":
                        break
                    if reply.output_len >= req.gconfig.max_new_tokens:
                        reply.stop_reason = "length"
                        break
                    reply.interruptions += 1
                    fruitless = 0 if part.tokens else fruitless + 1
                    # The server may have been told to abort before this client hears of the pause that follows.
                    await asyncio.sleep(FIRST_RETRY_S if part.tokens else FIRST_RETRY_S * 2**fruitless)
        except TimeoutError as error:
            for_length = " for its length" if timeout_s > self.config.request_timeout_s else ""
            raise RuntimeError(
                f"request {req.rid}: no complete reply within rollout.request_timeout_s = "
                f"{timeout_s:g} s{for_length} ({reply.output_len} of {req.gconfig.max_new_tokens} tokens came, "
                f"{reply.interruptions} interruptions). Raise it, or ask for fewer tokens."
            ) from error
        finally:
            self._metrics.leave()
        reply.latency_s = time.monotonic() - started
        self._metrics.add(
            replies=1,
            tokens=reply.output_len,
            truncated=reply.stop_reason == "length",
            interruptions=reply.interruptions,
            latency_s=reply.latency_s,
        )
        return reply

    async def _generate_part(self, req: LLMRequest, generated: list[int], deadline: asyncio.Timeout) -> ReplyPart:
        """Send prompt + generated tokens until a server answers sensibly, at most REQUEST_ATTEMPTS times."""
        params = sampling_params(req.gconfig, generated=len(generated), seed=self._seed_of(req, len(generated)))
        tokens = [*req.input_ids, *generated]
        failed: ServerClient | None = None
        refused: dict[ServerClient, RequestRefused] = {}
        attempt, busy = 1, 0
        async with self._slot(deadline):
            while True:
                server = await self._choose_server(req.rid, avoid=failed, deadline=deadline)
                check_request(server, tokens, params["max_new_tokens"])
                # SGLang refuses a rid that is in use, by this client or another; one episode may have many at a time.
                rid = f"{req.rid}-{self._client_id}-{next(self._rid_numbers)}"
                try:
                    part = await self._generate_on(server, rid, tokens, params, deadline, req.begun)
                except Busy as error:
                    failed = server
                    logger.info("%s", error)
                    with not_counted(deadline):
                        await asyncio.sleep(max(error.wait_s, backoff(busy)))
                    busy += 1
                except RequestRefused as refusal:
                    # One that refuses everything would soon be the one with the fewest requests, and end them all.
                    if refused or not self._fleet.has_another(server):
                        raise
                    refused[server] = refusal
                    failed = server
                except ServerError as error:
                    if attempt == REQUEST_ATTEMPTS:
                        raise
                    failed = server
                    self._metrics.add(request_retries=1)
                    logger.info("%s; attempt %d of %d", error, attempt, REQUEST_ATTEMPTS)
                    await asyncio.sleep(FIRST_RETRY_S * 2 ** (attempt - 1))
                    attempt += 1
                else:
                    for one, refusal in refused.items():
                        self._fleet.record_failure(one, BadReply(f"{refusal} (which another server did not)"))
                    self._metrics.add(stale_cache_tokens=server.cache.stale_tokens(part), bad_replies=len(refused))
                    return part

    def _deadline_s(self, req: LLMRequest) -> float:
        """rollout.request_timeout_s, and in proportion more for a reply that may be longer than it is meant for."""
        return self.config.request_timeout_s * max(1.0, req.gconfig.max_new_tokens / TOKENS_IN_TIME)

    @contextlib.asynccontextmanager
    async def _slot(self, deadline: asyncio.Timeout) -> AsyncIterator[None]:
        """One of the connections that this process may have open; to wait for it does not count."""
        with not_counted(deadline):
            await self._fleet.slots.acquire()
        try:
            yield
        finally:
            self._fleet.slots.release()

    async def _generate_on(
        self,
        server: ServerClient,
        rid: str,
        tokens: list[int],
        params: dict[str, Any],
        deadline: asyncio.Timeout,
        begun: LLMResponse | None,
    ) -> ReplyPart:
        """Generate on one server; ServerError, and the server is lost, where it fails or is dropped meanwhile.

        begun: is added what there is where the caller is cancelled.
        """
        fleet, since = self._fleet, time.monotonic()
        asked = fleet.asked(server, rid, tokens, params)
        call = asyncio.create_task(server.generate(asked, tokens, params))
        server.open_call(call)
        try:
            with self.spans("replies", "generate", server=server.url, rid=rid, version=asked.version) as span:
                part = await asyncio.shield(call)
                span.args |= {"tokens": len(part.tokens), "cached_tokens": part.cached_tokens, "timing": part.timing}
                span.args |= {"stop_reason": part.stop_reason, "versions": part.spans}
            await fleet.accept(server, part, asked)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if deadline.expired():
                fleet.note_overdue(server, since)
            if task is None or task.cancelling():  # this episode is cancelled, not the call
                if begun is not None and not self._executor.has_failed:
                    await self._end_early(server, call, asked, begun)
                raise
            raise ServerError(f"{server.url}/generate: the server was dropped meanwhile.") from None
        except ServerError as error:
            fleet.record_failure(server, error)
            if not isinstance(error, Busy):
                self._metrics.add(server_failures=1, bad_replies=isinstance(error, BadReply))
            raise
        finally:
            call.cancel()  # which hangs up, so that the server generates no more
            server.calls.discard(call)
        return part

    async def _end_early(
        self, server: ServerClient, call: asyncio.Task[ReplyPart], asked: Asked, begun: LLMResponse
    ) -> None:
        """Have the server end a request at once, and keep what it had generated, if it can say so soon."""
        try:
            async with asyncio.timeout(EARLY_END_S):
                await server.call("POST", "/abort_request", {"rid": asked.rid}, timeout_s=EARLY_END_S)
                part = await call
                await self._fleet.accept(server, part, asked)
        except (ServerError, RequestRefused, TimeoutError) as error:
            logger.info("%s: request %s is ended without its tokens: %s", server.url, asked.rid, error)
        else:
            add_part(begun, part)

    async def _choose_server(self, rid: str, *, avoid: ServerClient | None, deadline: asyncio.Timeout) -> ServerClient:
        """Return the server that this rid used last, else the one with the fewest requests.

        Waits while the servers are paused or none is left; that time does not count towards the deadline.
        """
        members = self._fleet.members
        if not (self._fleet.open.is_set() and members.serving):
            with not_counted(deadline):
                while not (self._fleet.open.is_set() and members.serving):
                    await self._fleet.open.wait()
                    await members.wait_for_one(self.config.start_timeout_s)
        if (entrance := self._fleet.entrance()) is not None:
            return entrance
        home = self._homes.pop(rid, None)
        if home is None or home is avoid or home not in members.serving:
            others = [server for server in members.serving if server is not avoid]
            home = min(others or members.serving, key=lambda server: len(server.calls))
        self._homes[rid] = home
        if len(self._homes) > REMEMBERED_RIDS:
            self._homes.popitem(last=False)
        return home

    def _seed_of(self, req: LLMRequest, generated: int) -> int | None:
        """Derive the sampling seed from the run's seed and the sample's name: the same on every server, rank and retry.

        A continuation has a seed of its own; the embedded server numbers draws per request and would repeat them.
        """
        key = req.metadata.get("sample_key")
        if req.gconfig.seed is not None:
            root = f"request {req.gconfig.seed}"
        elif self.seed is not None and key is not None:
            root = f"run {self.seed} {key}"
        else:
            return None
        return int.from_bytes(hashlib.sha256(f"{root} {generated}".encode()).digest()[:8]) >> 1

    # -- episodes

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        self._running_thread().run(self._executor.submit(data, workflow))

    def wait(self, count: int, timeout_s: float | None = None) -> TrajectoryBatch:
        return self._running_thread().run(self._executor.wait(count, timeout_s))

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TrajectoryBatch:
        return self._running_thread().run(self._executor.rollout_batch(data, workflow))

    def evaluate(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> Future[TrajectoryBatch]:
        return self._running_thread().submit(self._executor.evaluate(data, workflow))

    def prepare_batch(
        self, prompts: Iterator[dict[str, Any]], workflow: RolloutWorkflow, count: int
    ) -> TrajectoryBatch:
        return self._running_thread().run(self._executor.prepare_batch(prompts, workflow, count))

    def fail(self, message: str) -> None:
        """Make calls that wait for replies or servers, and later ones, raise RuntimeError(message). From any thread."""
        if self._thread is not None:
            self._thread.loop.call_soon_threadsafe(self._executor.fail, message)

    def metrics(self) -> dict[str, float]:
        """Return what happened since the last call of this or `counts`, under `rollout/`."""
        return metrics_of([self.counts()])

    def counts(self) -> Counts:
        """The same of one client among several, to be added up."""
        counts = self._metrics.take()
        if self._thread is not None:  # all clients have the same servers
            counts.most["servers"] = len(self._fleet.members.serving)
            counts.most["cache_age"] = max(server.cache.age for server in self._fleet.servers)
        return counts

    @property
    def stands_still_s(self) -> float:
        """For how long its event loop has been kept from its work by something that runs on it."""
        return 0.0 if self._thread is None else self._thread.stands_still_s

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version
        if self._thread is not None:
            self._thread.loop.call_soon_threadsafe(self._executor.notice_version)

    # -- servers

    @property
    def needs_weights(self) -> bool:
        """True where requests wait for a publication: only servers without the weights are left."""
        return self._fleet.members.needs_weights

    @property
    def serving(self) -> list[str]:
        """URLs of the servers that get requests."""
        return [server.url for server in self._fleet.members.serving]

    def select_servers(self) -> None:
        """Select which servers take part in the next publication: all that answer, those started anew included.

        Waits for one where none is left; RuntimeError where none comes back, or after `fail`.
        """
        patience_s = self.config.start_timeout_s * (1 + self.config.server_restarts)
        select_servers = self._fleet.members.select_servers(patience_s, check=self._executor.raise_if_fatal)
        self._running_thread().run(select_servers)

    def mark_published(self, serving: list[str], version: int) -> None:
        """Another client has published `version` to the servers `serving`: send requests to these alone."""
        self._running_thread().run(self._fleet.follow(serving, version))
        self.set_version(version)

    @property
    def wants_folder(self) -> bool:
        """True where a server that may come back soon could have the weights just published from a folder alone."""
        return self._fleet.wants_folder

    def offer_folder(self, path: str, version: int) -> None:
        """The weights of `version` lie at `path`, which servers can read, until the next publication."""

        async def offer() -> None:
            self._fleet.offer_folder(path, str(version))

        self._running_thread().run(offer())

    def set_memory(self, parts: frozenset[str], starts: dict[str, int]) -> list[str]:
        """Have the servers hold these parts of their memory; with fewer than all they generate nothing. Return the URLs
        of those that failed."""
        return self._running_thread().run(self._fleet.set_memory(parts, starts))

    # -- weights; what a publication needs is in ServerWeights

    def pause(self) -> None:
        """Stop generation as rollout.interruption says; requests in flight continue after `resume`.

        Caches are kept while they have outlived at most rollout.max_cache_age publications, and flushed otherwise.
        """
        self._running_thread().run(self._fleet.pause())

    def resume(self) -> None:
        self._running_thread().run(self._fleet.resume())

    def update_weights(self, path: str | Path, version: int) -> None:
        """Load a HF folder, which the servers must be able to read, into all servers; pauses them for it."""
        self._running_thread().run(self._update_from_disk(str(path), version))

    # -- the event loop's thread

    async def _update_from_disk(self, path: str, version: int) -> None:
        body = {"model_path": path, "weight_version": str(version), "flush_cache": False}
        timeout_s, fleet = self.config.start_timeout_s, self._fleet
        was_open = fleet.open.is_set()
        if was_open:
            await fleet.pause()
        try:
            fleet.begin_update(folder=path)
            await fleet.on_all(lambda server: server.command("/update_weights_from_disk", body, timeout_s=timeout_s))
            fleet.finish_update(version)
            self.set_version(version)  # before the first reply that has it
        finally:
            if was_open:
                await fleet.resume()

    def _running_thread(self) -> EventLoopThread:
        if self._thread is None:
            raise RuntimeError("RemoteSGLangEngine: not initialized, or destroyed; call initialize() first.")
        return self._thread


def add_part(reply: LLMResponse, part: ReplyPart) -> None:
    reply.output_tokens += part.tokens
    reply.output_logprobs += part.logprobs
    reply.output_versions += part.versions
    reply.text += part.text
    reply.stop_reason = part.stop_reason


@contextlib.contextmanager
def not_counted(deadline: asyncio.Timeout) -> Iterator[None]:
    """What is waited for within does not count towards the deadline."""
    clock, when = asyncio.get_running_loop().time, deadline.when()
    left_s = None if when is None else when - clock()
    deadline.reschedule(None)
    try:
        yield
    finally:
        if left_s is not None:
            deadline.reschedule(clock() + left_s)


def check_request(server: ServerClient, tokens: list[int], max_new_tokens: int) -> None:
    """Raise RequestRefused for what the server could not serve. An id past the vocabulary would kill a CPU SGLang."""
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
    if info.context_length is not None and len(tokens) + max_new_tokens > info.context_length:
        raise ContextOutgrown(
            f"{len(tokens)} tokens of prompt + {max_new_tokens} of generation.max_new_tokens exceed the context of "
            f"{info.context_length} of {server.url}. Lower max_new_tokens, drop long prompts, or start the server with "
            "a larger --context-length."
        )
