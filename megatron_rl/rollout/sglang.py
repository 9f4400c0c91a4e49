"""The client of one or more rollout servers, SGLang or embedded: replies for workflows, control for the publisher.

A reply is complete whatever happens on the way: a failed call is sent again (to another server where there is one), an
interrupted one continues from its partial output, with the log-probability and policy version of every token kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import socket
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from megatron_rl.api import InferenceEngine, RolloutWorkflow
from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.event_loop import EventLoopThread
from megatron_rl.rollout.events import RolloutEvents
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.rollout.server_client import ReplyPart, RequestRefused, ServerClient, ServerError, sampling_params
from megatron_rl.rollout.tally import Tally
from megatron_rl.types import FinetuneSpec, LLMRequest, LLMResponse, TrajectoryBatch

logger = logging.getLogger(__name__)

REQUEST_ATTEMPTS = 4
"""Tries of one HTTP call; the executor's `episode_attempts` come on top."""
FIRST_RETRY_S = 0.1
FRUITLESS_RESUMES = 8
"""Interruptions in a row without a new token, after which a reply is returned as aborted."""
REMEMBERED_RIDS = 65_536
KEEPALIVE_S = 2.0
"""Shorter than uvicorn's 5 s: a connection that the server is just closing would lose a control call half way."""
PROBE_TIMEOUT_S = 30.0


class RemoteSGLangEngine(InferenceEngine):
    """Implements InferenceEngine and WeightReceiver. One trainer rank makes it; HTTP runs on a thread of its own."""

    def __init__(self, config: RolloutConfig, *, seed: int | None = None, events: Sequence[RolloutEvents] = ()) -> None:
        self.config, self.seed, self.events = config, seed, events
        self._version = 0
        self._servers: list[ServerClient] = []
        self._client_id = uuid.uuid4().hex[:8]
        self._rid_numbers = itertools.count()
        self._homes: OrderedDict[str, ServerClient] = OrderedDict()
        self._tally = Tally()
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
        self._thread = EventLoopThread("rollout")
        # Clear while the servers are paused: a request sent then would be pinned to the version that is on its way out.
        self._open = asyncio.Event()
        self._open.set()
        self._executor = RolloutExecutor(self, self.config, self._tally, self.events)
        try:
            self._thread.run(self._connect(urls))
        except (ServerError, RequestRefused):
            self.destroy()
            raise

    def destroy(self) -> None:
        """Cancel what is in flight and disconnect; the servers stay up. May be called twice."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        thread.loop.call_soon_threadsafe(self._executor.fail, "the rollout engine was destroyed.")
        thread.run(self._session.close())
        thread.stop()
        self._servers = []

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
        reply = LLMResponse(
            input_tokens=list(req.input_ids),
            output_tokens=[],
            output_logprobs=[],
            output_versions=[],
            stop_reason="abort",
        )
        started, fruitless = time.monotonic(), 0
        self._tally.enter()
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                while fruitless <= FRUITLESS_RESUMES:
                    part = await self._generate_part(req, reply.output_tokens)
                    reply.output_tokens += part.tokens
                    reply.output_logprobs += part.logprobs
                    reply.output_versions += part.versions
                    reply.text += part.text
                    if part.stop_reason != "abort":
                        reply.stop_reason = part.stop_reason
                        break
                    if reply.output_len >= req.gconfig.max_new_tokens:
                        reply.stop_reason = "length"
                        break
                    reply.interruptions += 1
                    fruitless = 0 if part.tokens else fruitless + 1
                    # The server may have been told to abort before this client hears of the pause that follows.
                    await asyncio.sleep(FIRST_RETRY_S if part.tokens else FIRST_RETRY_S * 2**fruitless)
        except TimeoutError as error:
            raise RuntimeError(
                f"request {req.rid}: no complete reply within rollout.request_timeout_s = "
                f"{self.config.request_timeout_s:g} s ({reply.output_len} of {req.gconfig.max_new_tokens} tokens came, "
                f"{reply.interruptions} interruptions). Raise it, or ask for fewer tokens."
            ) from error
        finally:
            self._tally.leave()
        reply.latency_s = time.monotonic() - started
        self._tally.add(
            replies=1,
            tokens=reply.output_len,
            truncated=reply.stop_reason == "length",
            interruptions=reply.interruptions,
            latency_s=reply.latency_s,
        )
        return reply

    async def _generate_part(self, req: LLMRequest, generated: list[int]) -> ReplyPart:
        """Send prompt + generated tokens until a server answers sensibly, at most REQUEST_ATTEMPTS times."""
        params = sampling_params(req.gconfig, generated=len(generated), seed=self._seed_of(req, len(generated)))
        tokens = [*req.input_ids, *generated]
        failed: ServerClient | None = None
        for attempt in itertools.count(1):
            await self._open.wait()
            server = self._choose_server(req.rid, avoid=failed)
            check_request(server, tokens, params["max_new_tokens"])
            server.in_flight += 1
            try:
                # SGLang refuses a rid that is in use, by this client or another; one episode may have many at a time.
                rid = f"{req.rid}-{self._client_id}-{next(self._rid_numbers)}"
                return await server.generate(rid, tokens, params, version=self._version)
            except ServerError as error:
                if attempt == REQUEST_ATTEMPTS:
                    raise
                failed = server
                self._tally.add(request_retries=1)
                logger.info("%s; attempt %d of %d", error, attempt, REQUEST_ATTEMPTS)
            finally:
                server.in_flight -= 1
            await asyncio.sleep(FIRST_RETRY_S * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _choose_server(self, rid: str, avoid: ServerClient | None) -> ServerClient:
        """Return the server that this rid used last, else the one with the fewest requests."""
        home = self._homes.pop(rid, None)
        if home is None or home is avoid:
            others = [server for server in self._servers if server is not avoid]
            home = min(others or self._servers, key=lambda server: server.in_flight)
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

    def restore(self, data: dict[str, Any], workflow: RolloutWorkflow, group: TrajectoryBatch) -> None:
        """Take a group that an earlier process finished and nobody consumed. Before the first batch."""
        self._running_thread().run(self._executor.restore(data, workflow, group))

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
        """Make waiting and later calls raise RuntimeError(message). For a supervisor whose server died; any thread."""
        if self._thread is not None:
            self._thread.loop.call_soon_threadsafe(self._executor.fail, message)

    def metrics(self) -> dict[str, float]:
        """Return what happened since the last call, under `rollout/`."""
        return self._tally.take()

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version
        if self._thread is not None:
            self._thread.loop.call_soon_threadsafe(self._executor.notice_version)

    # -- weights

    @property
    def server_count(self) -> int:
        """Ranks of all servers in a weight-update group: one per server, or its tensor-parallel size."""
        return sum(server.info.ranks for server in self._servers if server.info is not None)

    def trainer_address(self) -> str:
        """Return this host's address as the servers reach it: that of the interface towards the first server."""
        parts = urlsplit(self._servers[0].url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 80))  # a datagram socket sends nothing by connecting
            return probe.getsockname()[0]

    def pause(self) -> None:
        """Stop generation on all servers and drop their prefix caches; requests in flight continue after `resume`."""
        self._running_thread().run(self._pause())

    def resume(self) -> None:
        self._running_thread().run(self._resume())

    def update_weights(self, path: str | Path, version: int) -> None:
        """Load a HF folder, which the servers must be able to read, into all servers; pauses them for it."""
        thread = self._running_thread()
        thread.run(self._update_from_disk(str(path), version))
        self.set_version(version)

    def join_weight_group(self, *, address: str, port: int, name: str, backend: str) -> Future[None]:
        """Ask the servers to join `name`; rank 0 must join meanwhile, at `address:port`."""
        first_ranks = itertools.accumulate((server.info.ranks for server in self._servers if server.info), initial=1)
        offsets = dict(zip(self._servers, first_ranks, strict=False))
        world_size = 1 + self.server_count

        async def join(server: ServerClient) -> None:
            if server.info is not None and server.info.replicas > 1:
                raise RuntimeError(
                    f"{server.url}: dp_size = {server.info.replicas}: must be 1 for weight updates; start more servers."
                )
            body = {
                "master_address": address,
                "master_port": port,
                "rank_offset": offsets[server],
                "world_size": world_size,
                "group_name": name,
                "backend": backend,
            }
            await server.command("/init_weights_update_group", body, timeout_s=self.config.start_timeout_s)

        return self._running_thread().submit(self._on_all(join))

    def leave_weight_group(self, *, name: str) -> None:
        self._command_all("/destroy_weights_update_group", {"group_name": name})

    def begin_weight_update(self, version: int) -> None:
        """Open a weight session on servers that have them (SGLang 0.5.21)."""
        self._command_all("/begin_weight_update", {}, sessions_only=True)

    def load_bucket(
        self, *, names: list[str], dtypes: list[str], shapes: list[list[int]], group: str, version: int
    ) -> Future[None]:
        """Ask the servers to receive one flat bucket. The future fails as soon as one server refuses."""
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "weight_version": str(version),
            # The cache was flushed by pause(); a flush that fails here kills servers up to 0.5.21.
            "flush_cache": False,
        }

        async def load(server: ServerClient) -> None:
            await server.command("/update_weights_from_distributed", body, timeout_s=self.config.request_timeout_s)

        return self._running_thread().submit(self._on_all(load))

    def end_weight_update(self, version: int) -> None:
        """Close the session. From here on `version` is the policy version of new tokens."""
        self._command_all("/end_weight_update", {}, sessions_only=True)
        self.set_version(version)

    # -- the event loop's thread

    async def _connect(self, urls: list[str]) -> None:
        headers = {"Authorization": f"Bearer {self.config.api_key}"} if self.config.api_key else {}
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        self._servers = [ServerClient(url, self._session) for url in urls]
        await self._on_all(lambda server: server.probe(timeout_s=PROBE_TIMEOUT_S))

    async def _on_all(self, act: Callable[[ServerClient], Awaitable[Any]]) -> None:
        await asyncio.gather(*(act(server) for server in self._servers))

    async def _pause(self) -> None:
        self._open.clear()
        await self._on_all(lambda server: server.pause(timeout_s=self.config.request_timeout_s))

    async def _resume(self) -> None:
        await self._on_all(lambda server: server.resume(timeout_s=self.config.request_timeout_s))
        self._open.set()

    async def _update_from_disk(self, path: str, version: int) -> None:
        body = {"model_path": path, "weight_version": str(version), "flush_cache": False}
        timeout_s = max(self.config.request_timeout_s, self.config.start_timeout_s)
        was_open = self._open.is_set()
        if was_open:
            await self._pause()
        try:
            await self._on_all(lambda server: server.command("/update_weights_from_disk", body, timeout_s=timeout_s))
        finally:
            if was_open:
                await self._resume()

    def _command_all(self, endpoint: str, body: dict[str, Any], *, sessions_only: bool = False) -> None:
        async def command(server: ServerClient) -> None:
            if not sessions_only or (server.info is not None and server.info.has_sessions):
                await server.command(endpoint, body, timeout_s=self.config.request_timeout_s)

        self._running_thread().run(self._on_all(command))

    def _running_thread(self) -> EventLoopThread:
        if self._thread is None:
            raise RuntimeError("RemoteSGLangEngine: not initialized, or destroyed; call initialize() first.")
        return self._thread


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
        raise RequestRefused(
            f"{len(tokens)} tokens of prompt + {max_new_tokens} of generation.max_new_tokens exceed the context of "
            f"{info.context_length} of {server.url}. Lower max_new_tokens, drop long prompts, or start the server with "
            "a larger --context-length."
        )
