"""Records the steps in telemetry.trace_steps on all ranks and writes their traces."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.config import TrainConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.process import RolloutProcess
from megatron_rl.telemetry.spans import Span
from megatron_rl.telemetry.timers import PhaseTimers
from megatron_rl.telemetry.trace import RankTrace, write_trace

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StepTraces:
    """Records the steps in telemetry.trace_steps. Collective: every rank calls every method.

    A step lasts from one snapshot of its timers to the next; call `begin` and `end` right after these. A step's trace
    has all that happened in that time, including work for other steps, such as rollouts of an asynchronous run.
    """

    def __init__(
        self,
        config: TrainConfig,
        groups: ParallelGroups,
        timers: PhaseTimers,
        engine: MegatronEngine,
        process: RolloutProcess | None,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.steps, self.folder = config.telemetry.trace_steps, Path(config.run.folder)
        self.groups, self.timers, self.engine, self.process, self._say = groups, timers, engine, process, say
        self._publications: list[Span] = []

    def begin(self, step: int) -> None:
        """Begin to record the step, if it is to be traced."""
        if step in self.steps:
            self._publications = self._last_publication()  # the step's first replies use its weights
            if self.process is not None:
                self.process.record()

    def end(self, step: int) -> None:
        """Write the trace of the step, if it is to be traced."""
        if step not in self.steps:
            return
        groups = self.groups
        with self.timers("trace"):
            dist.barrier(group=groups.control)  # synchronizes the ranks' clocks
            trace = RankTrace(
                rank=groups.rank,
                host=socket.gethostname(),
                boot=BOOT_ID.read_text().strip() if BOOT_ID.exists() else "",
                pid=os.getpid(),
                clock_s=time.monotonic(),
                phases=self.timers.last_spans,
                publications=self._publications + self._last_publication(),
                rollout=self.process.take_recording() if self.process is not None else None,
            )
            traces: list[Any] | None = [None] * groups.world_size if groups.is_main else None
            dist.gather_object(trace, traces, dst=0, group=groups.control)
            if traces is not None:
                try:
                    self._say(f"trace: {write_trace(self.folder, step, traces)}")
                except OSError as error:
                    self._say(f"WARNING: the trace of step {step} cannot be written: {error}. Training goes on.")

    def _last_publication(self) -> list[Span]:
        publisher = self.engine.publisher
        if publisher is None or publisher.last is None:
            return []
        version = publisher.last.version
        return [
            Span(row=row, name=name, begin_s=begin, end_s=end, args={"version": version})
            for row, name, begin, end in publisher.last.parts
        ]
