"""The public engine for a user's own loop: a RolloutService on a thread of this process, called as plain functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate

from megatron_rl.api import InferenceEngine, RequestRefused, RolloutWorkflow
from megatron_rl.config import RolloutConfig, TrainConfig
from megatron_rl.rollout.events import RolloutEvents
from megatron_rl.rollout.rollout_service import RolloutService
from megatron_rl.rollout.rollout_stub import P, RolloutStub, T
from megatron_rl.routes import RouteForm
from megatron_rl.servers.event_loop import EventLoopThread
from megatron_rl.servers.pool import ClientOptions
from megatron_rl.servers.server_http import ServerError
from megatron_rl.telemetry.rollout_metrics import metrics_of
from megatron_rl.types import FinetuneSpec, LLMRequest, LLMResponse, TrajectoryBatch


class RemoteSGLangEngine(RolloutStub, InferenceEngine):
    """An InferenceEngine and WeightReceiver for SGLang or embedded servers, used by the training thread.

    For example:

        rollout = RemoteSGLangEngine(RolloutConfig(), seed=1)
        rollout.initialize(["http://127.0.0.1:30000"])
        batch = rollout.rollout_batch([{"prompt": "2 + 2 = "}], workflow)
        rollout.update_weights("runs/mine/step-10", version=1)
        rollout.destroy()
    """

    def __init__(
        self,
        config: RolloutConfig | TrainConfig,
        *,
        seed: int | None = None,
        events: Sequence[RolloutEvents] = (),
        on_drop: Callable[[str, str], None] | None = None,
        run_name: str = "",
        vocab_size: int | None = None,
        routes: RouteForm | None = None,
    ) -> None:
        """config: of a TrainConfig, only the section `rollout` and the option batch.prompts_per_step are used.

        seed, on_drop, run_name, vocab_size, routes: see ClientOptions. Callbacks run on the event loop's thread.
        """
        self._prompts_per_step: int | None = None
        if isinstance(config, TrainConfig):
            self._prompts_per_step, config = config.batch.prompts_per_step, config.rollout
        self._source: Any = None
        self._rows: Iterator[dict[str, Any]] = iter(())
        self.service = RolloutService(
            config,
            ClientOptions(seed=seed, on_drop=on_drop, run_name=run_name, vocab_size=vocab_size, routes=routes),
            events=events,
        )
        self.config = config
        self._thread: EventLoopThread | None = None

    def initialize(self, addr: str | list[str] | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Connect to the servers at `addr`, by default config.servers. Raises RuntimeError for an unreachable one."""
        urls = [addr] if isinstance(addr, str) else list(addr or self.config.servers)
        if not urls:
            raise ValueError(
                "rollout.servers = []: no server to connect to; set it, or start servers and give their URLs."
            )
        if self._thread is not None:
            raise RuntimeError("RemoteSGLangEngine.initialize: is initialized already; call destroy() first.")
        self._thread = EventLoopThread("rollout", blocking_steps=self.config.max_concurrent_episodes)
        try:
            self._thread.run(self.service.connect(urls))
        except (ServerError, RequestRefused):
            self.destroy()
            raise

    def destroy(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel what is in flight, disconnect, and run the coroutine `last`. The servers keep running.

        May be called twice.
        """
        if self._thread is None:
            if last is not None:
                asyncio.run(last)
            return
        thread, self._thread = self._thread, None
        thread.run(self.service.close())
        thread.stop(last)

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        self._running_thread()
        return await self.service.client.agenerate(req)

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        self._run(self.service.executor.submit(data, workflow))

    def wait(self, count: int, timeout_s: float | None = None) -> TrajectoryBatch:
        return self._run(self.service.executor.wait(count, timeout_s))

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TrajectoryBatch:
        return self._run(self.service.executor.rollout_batch(data, workflow))

    def evaluate(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> Future[TrajectoryBatch]:
        return self._running_thread().submit(self.service.executor.evaluate(data, workflow))

    def prepare_batch(
        self, prompts: Iterable[Any], workflow: RolloutWorkflow, count: int | None = None
    ) -> TrajectoryBatch:
        if count is None:
            count = self._prompts_per_step or getattr(prompts, "batch_size", None)
        if count is None or count < 1:
            raise ValueError(
                f"prepare_batch: count = {count}: must be at least 1, because neither the config nor the prompts say "
                f"how many groups a step has; pass count=8, create the engine with a TrainConfig "
                f"(batch.prompts_per_step then counts), or pass a DataLoader with a batch_size."
            )
        if self._source is not prompts:  # the same source continues where the last call stopped
            self._source, self._rows = prompts, rows_of(prompts)
        return self._run(self.service.executor.prepare_batch(self._rows, workflow, count))

    def get_version(self) -> int:
        return self.service.client.version

    def update_weights(self, path: str | Path, version: int) -> None:
        """Load a HF folder into all servers, which must be able to read it. Generation is paused meanwhile."""
        self._run(self.service.update_from_disk(path, version))

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call of `metrics` or `counts`. Their names begin with `rollout/`."""
        return metrics_of([self.service.counts()])

    def _call(self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.service, *args, **kwargs)

    def _await(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return self._run(method(self.service, *args, **kwargs))

    def _value(self, name: str) -> Any:
        return getattr(self.service, name)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            thread = self._running_thread()
        except RuntimeError:
            coroutine.close()
            raise
        return thread.run(coroutine)

    def _running_thread(self) -> EventLoopThread:
        if self._thread is None:
            raise RuntimeError("RemoteSGLangEngine: not initialized, or destroyed; call initialize() first.")
        return self._thread


def rows_of(source: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `source`. A list in it is yielded row by row.

    A source that is no iterator is repeated without end.
    """
    while True:
        is_empty = True
        for entry in source:
            for row in entry if isinstance(entry, list | tuple) else [entry]:
                if not isinstance(row, dict):
                    raise ValueError(
                        f"prepare_batch: prompts gave {type(row).__name__}; must give rows, each a dict, or lists of "
                        f"them: DataLoader(rows, batch_size=8, collate_fn=list)."
                    )
                is_empty = False
                yield row
        if isinstance(source, Iterator):
            return
        if is_empty:
            raise ValueError("prepare_batch: prompts has no rows; give at least one.")
