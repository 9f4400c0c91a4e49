"""The client of one or more rollout servers, SGLang or embedded: replies for workflows, control for the publisher.

A reply is complete whatever happens on the way: a failed call is sent again (to another server where there is one), an
interrupted one continues from its partial output, with the log-probability and policy version of every token kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from megatron_rl.api import InferenceEngine, RolloutWorkflow
from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.event_loop import EventLoopThread
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.rollout.server_client import ReplyPart, RequestRefused, ServerClient, ServerError, sampling_params
from megatron_rl.rollout.tally import Tally
from megatron_rl.rollout.weight_updates import ServerWeights
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


class RemoteSGLangEngine(ServerWeights, InferenceEngine):
    """Implements InferenceEngine and WeightReceiver. One trainer rank makes it; HTTP runs on a thread of its own."""

    def __init__(self, config: RolloutConfig, *, seed: int | None = None) -> None:
        self.config, self.seed = config, seed
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
        self._executor = RolloutExecutor(self, self._thread, self.config, self._tally)
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
        self._executor.fail("the rollout engine was destroyed.")
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
        if home is None or home is avoid or home not in self._servers:
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
        self._running_thread()
        self._executor.submit(data, workflow)

    def wait(self, count: int, timeout_s: float | None = None) -> TrajectoryBatch:
        self._running_thread()
        return self._executor.wait(count, timeout_s)

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TrajectoryBatch:
        self._running_thread()
        return self._executor.rollout_batch(data, workflow)

    def prepare_batch(
        self, prompts: Iterator[dict[str, Any]], workflow: RolloutWorkflow, count: int
    ) -> TrajectoryBatch:
        self._running_thread()
        return self._executor.prepare_batch(prompts, workflow, count)

    def fail(self, message: str) -> None:
        """Make waiting and later calls raise RuntimeError(message). For a supervisor whose server died; any thread."""
        if self._thread is not None:
            self._executor.fail(message)

    def metrics(self) -> dict[str, float]:
        """Return what happened since the last call, under `rollout/`."""
        return self._tally.take()

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version
        if self._thread is not None:
            self._executor.notice_version()

    # -- weights

    def pause(self) -> None:
        """Stop generation on all servers and drop their prefix caches; requests in flight continue after `resume`."""
        self._running_thread().run(self._pause())

    def resume(self) -> None:
        self._running_thread().run(self._resume())

    def update_weights(self, path: str | Path, version: int) -> None:
        """Load a HF folder, which the servers must be able to read, into all servers; pauses them for it."""
        was_open = self._open.is_set()
        if was_open:
            self.pause()
        try:
            for loaded in self.load_folder(path, version).values():
                loaded.result()
        finally:
            if was_open:
                self.resume()
        self.set_version(version)

    def drop(self, server: str, reason: str) -> None:
        logger.error("%s is taken out of service: %s", server, reason)
        self._servers = [other for other in self._servers if other.url != server]

    # -- the event loop's thread

    async def _connect(self, urls: list[str]) -> None:
        headers = {"Authorization": f"Bearer {self.config.api_key}"} if self.config.api_key else {}
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        self._servers = [ServerClient(url, self._session) for url in urls]
        await asyncio.gather(*(server.probe(timeout_s=PROBE_TIMEOUT_S) for server in self._servers))

    async def _pause(self) -> None:
        self._open.clear()
        await self._on_all(lambda server: server.pause(timeout_s=self.config.request_timeout_s))

    async def _resume(self) -> None:
        try:
            await self._on_all(lambda server: server.resume(timeout_s=self.config.request_timeout_s))
        finally:
            self._open.set()

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
