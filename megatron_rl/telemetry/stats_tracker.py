"""Statistics of the user's own, which can be collected anywhere and are exported once per step.

    from megatron_rl import log_metric

    log_metric("tool_calls", 3)  # in a workflow, an environment or a reward
    log_metric("far_tokens", rows.ratio > 2)  # in a loss: the mean over the entries of a tensor

In a run started from a config, the statistics appear in metrics.jsonl as `user/NAME`: means over the step and over all
ranks. A custom training loop exports them itself:

    from megatron_rl import stats_tracker

    with stats_tracker.record_timing("train_step"), stats_tracker.scope("actor"):
        stats_tracker.denominator(tokens=mask)
        stats_tracker.stat(denominator="tokens", entropy=entropy)
    metrics = stats_tracker.export()  # {"actor/tokens": 96.0, "actor/entropy": 0.7, "time/train_step": 1.2, ...}

The module's functions share one StatsTracker per process. They may be called from any thread and task, except that all
timings must be recorded by one thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from megatron_rl.telemetry.rollout_metrics import Fractions, is_counted, means_of
from megatron_rl.telemetry.timers import PhaseTimers

Tensor = Any
"""Stands for torch.Tensor, because this package does not import torch."""
USER = "user/"
"""Prefix of user metrics in metrics.jsonl."""


class StatsTracker:
    """Sums by name since the last export. No value is read from the GPU before the export."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._timers = PhaseTimers(clock)
        self._scopes: ContextVar[tuple[str, ...]] = ContextVar("scopes", default=())  # per task
        self._masks: dict[str, Tensor] = {}
        self._sums: dict[str, tuple[float | Tensor, float | Tensor]] = {}
        """{metric: (numerator, denominator)}."""
        self._lock = threading.Lock()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix metrics that are added inside the `with` block with `name/`. Nested scopes add one prefix each."""
        token = self._scopes.set((*self._scopes.get(), name))
        try:
            yield
        finally:
            self._scopes.reset(token)

    def record_timing(self, name: str) -> AbstractContextManager[None]:
        """Add the duration of the `with` block, in seconds, to `time/name`. A nested timing pauses the outer one."""
        return self._timers(self._within(name))

    def log_metric(self, name: str, value: float | Tensor) -> None:
        """Add a number, or all entries of a tensor, to a metric. The mean of everything added is exported.

        Tensors are read at the end of the step, so that no call waits for the GPU. In an evaluation, the call does
        nothing.
        """
        if not is_counted.get():
            return
        if hasattr(value, "detach"):
            self._add(name, value.detach().double().sum(), float(value.numel()))
            return
        try:
            number = float("text" if isinstance(value, str | bytes) else value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"log_metric({name!r}, {value!r}): must be a number or a tensor.") from error
        self._add(name, number, 1.0)

    def scalar(self, **values: float | Tensor) -> None:
        for name, value in values.items():
            self.log_metric(name, value)

    def denominator(self, **masks: Tensor) -> None:
        """Set masks, which select the entries that later calls of `stat` count.

        The number of selected entries is exported under the mask's name.
        """
        for name, mask in masks.items():
            name = self._within(name)
            mask = mask.bool()
            with self._lock:
                self._masks[name] = mask
                # The denominator is 1 because the number of entries is exported, not a mean.
                total, _ = self._sums.get(name, (0.0, 1.0))
                self._sums[name] = total + mask.sum(), 1.0

    def stat(self, *, denominator: str, **values: Tensor) -> None:
        """Add tensors to metrics. Each metric is exported as the mean over the entries that a mask selects.

        denominator: name of the mask, which must have been set by `denominator` in the same scope.
        """
        mask = self._masks.get(self._within(denominator))
        if mask is None:
            raise ValueError(
                f"stat(denominator={denominator!r}): is not known in the scope {'/'.join(self._scopes.get())!r}; call "
                f"denominator({denominator}=...) there first."
            )
        for name, value in values.items():
            if value.shape != mask.shape:
                raise ValueError(
                    f"stat({name}=...) has shape {tuple(value.shape)}, and its denominator {denominator!r} "
                    f"{tuple(mask.shape)}: must be the same."
                )
            # Sums stay tensors until the export: converting to float would wait for the GPU in every call.
            self._add(name, value.detach()[mask].double().sum(), mask.sum())

    def take(self) -> Fractions:
        """Return {metric: (numerator, denominator)} of this process since the last `export` or `take`. Reset them."""
        with self._lock:
            sums, self._sums, self._masks = self._sums, {}, {}
        return {name: (float(total), float(count)) for name, (total, count) in sums.items()}

    def add(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Add what `take` has returned in another process. In an evaluation the call does nothing."""
        for name, (total, count) in sums.items() if is_counted.get() else ():
            self._add(name, float(total), float(count))

    def export(self) -> dict[str, float]:
        """Return {metric: value} of this process since the last export, including `time/step`. Reset them.

        Means with denominator 0 are left out.
        """
        return means_of([self.take()]) | self._timers.snapshot()

    def _within(self, name: str) -> str:
        return "/".join([*self._scopes.get(), name])

    def _add(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        name = self._within(name)
        with self._lock:
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + total, before[1] + count


_OF_THE_PROCESS = StatsTracker()
scope, record_timing = _OF_THE_PROCESS.scope, _OF_THE_PROCESS.record_timing
log_metric, scalar = _OF_THE_PROCESS.log_metric, _OF_THE_PROCESS.scalar
denominator, stat = _OF_THE_PROCESS.denominator, _OF_THE_PROCESS.stat
take, add, export = _OF_THE_PROCESS.take, _OF_THE_PROCESS.add, _OF_THE_PROCESS.export
