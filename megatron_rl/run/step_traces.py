"""Records the steps of telemetry.trace_steps on all ranks and writes their traces."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_rl.telemetry.spans import Span
from megatron_rl.telemetry.trace import RankTrace, write_trace

if TYPE_CHECKING:
    from megatron_rl.run.rl_run import RLRun

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StepTraces:
    """Those of one experiment. All ranks call every method.

    The time of a step is that of its timers: from one snapshot to the next. A trace has all that happened in it, also
    where that belongs to other steps: rollouts of an asynchronous run, the evaluation after the step before.
    """

    def __init__(self, experiment: RLRun) -> None:
        self.x = experiment
        self._publications: list[Span] = []

    def begin(self, step: int) -> None:
        """The timers have just been read, and the step's time begins."""
        if step in self.x.config.telemetry.trace_steps:
            self._publications = self._last_publication()  # which the step's first replies are made with
            if self.x.rollouts.process is not None:
                self.x.rollouts.process.record()

    def end(self, step: int) -> None:
        """The timers have just been read, and the step's time is over: write its trace."""
        if step not in self.x.config.telemetry.trace_steps:
            return
        groups, process = self.x.groups, self.x.rollouts.process
        with self.x.timers("trace"):
            dist.barrier(group=groups.control)
            trace = RankTrace(
                rank=groups.rank,
                host=socket.gethostname(),
                boot=BOOT_ID.read_text().strip() if BOOT_ID.exists() else "",
                pid=os.getpid(),
                clock_s=time.monotonic(),
                phases=self.x.timers.last_spans,
                publications=self._publications + self._last_publication(),
                rollout=process.take_recording() if process is not None else None,
            )
            traces: list[Any] | None = [None] * groups.world_size if groups.is_main else None
            dist.gather_object(trace, traces, dst=0, group=groups.control)
            if traces is not None:
                try:
                    self.x.say(f"trace: {write_trace(self.x.folder, step, traces)}")
                except OSError as error:
                    self.x.say(f"WARNING: the trace of step {step} cannot be written: {error}. Training goes on.")

    def _last_publication(self) -> list[Span]:
        publisher = self.x.engine.publisher
        if publisher is None or publisher.last is None:
            return []
        version = publisher.last.version
        return [
            Span(row=row, name=name, begin_s=begin, end_s=end, args={"version": version})
            for row, name, begin, end in publisher.last.parts
        ]
