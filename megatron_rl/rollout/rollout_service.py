"""A rollout on one event loop: its servers, the client that samples from them, and the executor.

`RolloutRank` is this service in a rollout process. `RemoteSGLangEngine` runs it on a thread of the caller's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from megatron_rl.api import RequestRefused
from megatron_rl.config import RolloutConfig
from megatron_rl.launch import open_files
from megatron_rl.rollout.events import RolloutEvents
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.rollout.journal import NO_RECORDS, Records
from megatron_rl.servers.generate import SamplingClient
from megatron_rl.servers.pool import ALONE, ClientOptions, Fleet
from megatron_rl.servers.server_http import ServerError
from megatron_rl.servers.weight_receiver import ServerWeights
from megatron_rl.telemetry.rollout_metrics import Counts


class RolloutService(ServerWeights):
    """The methods by which a trainer controls its rollout. It is also a WeightReceiver, through ServerWeights.

    Coroutines must run on the event loop that `connect` ran on. Everything else may be called from any thread.

        service = RolloutService(RolloutConfig(max_staleness=2), ClientOptions(seed=1))
        await service.connect(["http://127.0.0.1:30000"])
        batch = await service.executor.prepare_batch(prompts, workflow, count=8)
        await service.close()
    """

    def __init__(
        self,
        config: RolloutConfig,
        options: ClientOptions = ALONE,
        *,
        events: Sequence[RolloutEvents] = (),
        records: Records = NO_RECORDS,
    ) -> None:
        """events: recorders that are told what happens to each training prompt.

        records: groups and replies of earlier processes, which are not generated again.
        """
        self.config, self._events, self._records, self._options = config, events, records, options
        self.client = SamplingClient(
            config,
            options,
            on_failure=lambda message: self.executor.fail(message),
            has_failed=lambda: self.executor.has_failed,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self.executor = self._new_executor()

    @property
    def _fleet(self) -> Fleet:
        return self.client.fleet

    async def connect(self, urls: list[str]) -> None:
        """Connect to the servers. Raises RuntimeError or ValueError, naming a server that cannot be reached."""
        open_files.raise_limit()
        self._loop = asyncio.get_running_loop()
        self.executor = self._new_executor()
        try:
            await self.client.connect(urls)
        except (ServerError, RequestRefused) as error:
            error.args = (f"rollout.servers: {error}",)
            raise

    async def close(self) -> None:
        """Cancel what is in flight and disconnect. The servers keep running. May be called twice."""
        self._loop = None
        self.executor.fail("the rollout engine was destroyed.")
        await self.client.close()

    def fail(self, message: str) -> None:
        """Make calls that wait for replies or servers raise RuntimeError(message).

        This affects current and later calls.
        """
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.executor.fail, message)

    def counts(self) -> Counts:
        """Return what was counted since the last call. The sum over all rollout ranks gives the step's metrics."""
        counts = self.client.metrics.take()
        if self.client.is_connected:  # all clients have the same servers
            counts.most["servers"] = len(self._fleet.members.serving)
            counts.most["cache_age"] = max(server.cache.age for server in self._fleet.servers)
        return counts

    def set_version(self, version: int) -> None:
        self.client.version = version
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.executor.notice_version)

    # -- servers

    @property
    def needs_weights(self) -> bool:
        """True if requests wait for a publication, because no remaining server has the current weights."""
        return self._fleet.members.needs_weights

    @property
    def serving(self) -> list[str]:
        """URLs of the servers that receive requests."""
        return [server.url for server in self._fleet.members.serving]

    async def select_servers(self) -> None:
        """Select the servers that take part in the next publication: all that answer, including restarted ones.

        If none answers, wait for one. Raises RuntimeError if none comes back, or if `fail` was called.
        """
        patience_s = self.config.start_timeout_s * (1 + self.config.server_restarts)
        await self._fleet.members.select_servers(patience_s, check=self.executor.raise_if_fatal)

    async def mark_published(self, serving: list[str], version: int) -> None:
        """Note that another client has published `version` to the servers `serving`.

        From now on, only these get requests.
        """
        await self._fleet.follow(serving, version)
        self.set_version(version)

    async def set_memory(self, parts: frozenset[str], starts: dict[str, int]) -> list[str]:
        """Make the servers hold exactly these parts of `ALL_MEMORY`. Return the URLs of servers that failed.

        A server that does not hold all parts generates nothing. starts: URL -> number that changes whenever the server
        is restarted.
        """
        return await self._fleet.set_memory(parts, starts)

    # -- internal

    def _new_executor(self) -> RolloutExecutor:
        client = self.client
        rest = self._events, client.spans, self._records, self._options.trained_as
        return RolloutExecutor(client, self.config, client.metrics, *rest)

    def _check_connected(self) -> None:
        if self._loop is None:
            raise RuntimeError("the rollout: not connected to its servers, or closed; connect first.")

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._loop is None:
            coroutine.close()
            self._check_connected()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
