"""Statistics of a training loop of your own, collected anywhere in it and exported once a step.

    from megatron_rl import stats_tracker

    with stats_tracker.record_timing("train_step"), stats_tracker.scope("actor"):
        stats_tracker.denominator(tokens=mask)
        stats_tracker.stat(denominator="tokens", entropy=entropy)
    metrics = stats_tracker.export()  # {"actor/tokens": 96.0, "actor/entropy": 0.7, "time/train_step": 1.2, ...}

A mean is a numerator and a denominator until it is exported. The functions are those of one StatsTracker of the
process, for one thread; the trainer of a run has its own metrics and does not touch it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron_rl.telemetry.timers import PhaseTimers

Tensor = Any
"""torch's, which this room does not import."""


class StatsTracker:
    """Sums by name since the last export. Nothing is read from a GPU before that."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._timers = PhaseTimers(clock)
        self._scopes: list[str] = []
        self._masks: dict[str, Tensor] = {}
        self._sums: dict[str, tuple[float | Tensor, float | Tensor]] = {}
        """Numerator and denominator; a count's is 1."""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Let the names of the `with` block begin with `name/`; scopes within one another add up."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def record_timing(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds of the `with` block to `time/name`; a timing within it pauses this one."""
        return self._timers(self._within(name))

    def scalar(self, **values: float) -> None:
        """Numbers of which the mean over calls is exported."""
        for name, value in values.items():
            self._add(name, float(value), 1.0)

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
                f"stat(denominator={denominator!r}): is not known in the scope {'/'.join(self._scopes)!r}; call "
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

    def export(self) -> dict[str, float]:
        """Return this process's numbers since the last export, `time/step` among them, and start anew.

        A mean over nothing is left out.
        """
        found = {name: (float(total), float(count)) for name, (total, count) in self._sums.items()}
        self._sums, self._masks = {}, {}
        return {name: total / count for name, (total, count) in found.items() if count} | self._timers.snapshot()

    def _within(self, name: str) -> str:
        return "/".join([*self._scopes, name])

    def _add(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        name = self._within(name)
        before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = before[0] + total, before[1] + count


_OF_THE_PROCESS = StatsTracker()
scope, record_timing = _OF_THE_PROCESS.scope, _OF_THE_PROCESS.record_timing
scalar, denominator, stat = _OF_THE_PROCESS.scalar, _OF_THE_PROCESS.denominator, _OF_THE_PROCESS.stat
export = _OF_THE_PROCESS.export
