"""Statistics of your own, collected anywhere and exported once a step.

    from megatron_rl import log_metric

    log_metric("tool_calls", 3)  # in a workflow, an environment or a reward
    log_metric("far_tokens", rows.ratio > 2)  # in a loss: the mean over the entries of a tensor

In a configured run they are in metrics.jsonl as `user/NAME`: means over the step and over all ranks. A loop of your own
exports them itself:

    from megatron_rl import stats_tracker

    with stats_tracker.record_timing("train_step"), stats_tracker.scope("actor"):
        stats_tracker.denominator(tokens=mask)
        stats_tracker.stat(denominator="tokens", entropy=entropy)
    metrics = stats_tracker.export()  # {"actor/tokens": 96.0, "actor/entropy": 0.7, "time/train_step": 1.2, ...}

A mean is a numerator and a denominator until it is exported. The functions are those of one StatsTracker of the
process. Calls may come from any thread and task, those that record timings from one thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from megatron_rl.telemetry.rollout_metrics import is_counted
from megatron_rl.telemetry.timers import PhaseTimers

Tensor = Any
"""torch's, which this room does not import."""
USER = "user/"
"""Begins the names of a user's own metrics in metrics.jsonl."""
Sums = dict[str, tuple[float, float]]
"""Numerators and denominators by name."""


class StatsTracker:
    """Sums by name since the last export. Nothing is read from a GPU before that."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._timers = PhaseTimers(clock)
        self._scopes: ContextVar[tuple[str, ...]] = ContextVar("scopes", default=())  # of this task alone
        self._masks: dict[str, Tensor] = {}
        self._sums: dict[str, tuple[float | Tensor, float | Tensor]] = {}
        """Numerator and denominator; a count's is 1."""
        self._lock = threading.Lock()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Let the names of the `with` block begin with `name/`; scopes within one another add up."""
        token = self._scopes.set((*self._scopes.get(), name))
        try:
            yield
        finally:
            self._scopes.reset(token)

    def record_timing(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds of the `with` block to `time/name`; a timing within it pauses this one."""
        return self._timers(self._within(name))

    def log_metric(self, name: str, value: float | Tensor) -> None:
        """Add a number, or all entries of a tensor, to a metric: its mean over all of them is exported.

        For losses, workflows, environments and rewards. A tensor is read at the step's end, so that no call waits for
        the GPU. In an evaluation the call does nothing.
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
        """`log_metric` of each name."""
        for name, value in values.items():
            self.log_metric(name, value)

    def denominator(self, **masks: Tensor) -> None:
        """Bool tensors that say which entries of later `stat`s count; how many do is exported."""
        for name, mask in masks.items():
            name = self._within(name)
            self._masks[name] = mask.bool()
            # Over 1, as what is exported of a mask is the number of its entries and no mean.
            total, _ = self._sums.get(name, (0.0, 1.0))
            self._sums[name] = total + self._masks[name].sum(), 1.0

    def stat(self, *, denominator: str, **values: Tensor) -> None:
        """Tensors of which the mean over the entries of `denominator`, in this scope, is exported."""
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
            # Sums stay tensors until they are exported: a float here would wait for the GPU in every call.
            self._add(name, value.detach()[mask].double().sum(), mask.sum())

    def take(self) -> Sums:
        """Return this process's numerators and denominators since the last export or take, and start anew."""
        with self._lock:
            sums, self._sums, self._masks = self._sums, {}, {}
        return {name: (float(total), float(count)) for name, (total, count) in sums.items()}

    def add(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Add what another process has taken. In an evaluation the call does nothing."""
        for name, (total, count) in sums.items() if is_counted.get() else ():
            self._add(name, float(total), float(count))

    def export(self) -> dict[str, float]:
        """Return this process's numbers since the last export, `time/step` among them, and start anew.

        A mean over nothing is left out.
        """
        return means_of([self.take()]) | self._timers.snapshot()

    def _within(self, name: str) -> str:
        return "/".join([*self._scopes.get(), name])

    def _add(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        name = self._within(name)
        with self._lock:
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + total, before[1] + count


def means_of(parts: Sequence[Sums]) -> dict[str, float]:
    """Return the means of several processes together, each sum of numerators divided once; no mean over nothing."""
    sums: Sums = {}
    for part in parts:
        for name, (total, count) in part.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
    return {name: total / count for name, (total, count) in sums.items() if count}


_OF_THE_PROCESS = StatsTracker()
scope, record_timing = _OF_THE_PROCESS.scope, _OF_THE_PROCESS.record_timing
log_metric, scalar = _OF_THE_PROCESS.log_metric, _OF_THE_PROCESS.scalar
denominator, stat = _OF_THE_PROCESS.denominator, _OF_THE_PROCESS.stat
take, add, export = _OF_THE_PROCESS.take, _OF_THE_PROCESS.add, _OF_THE_PROCESS.export
