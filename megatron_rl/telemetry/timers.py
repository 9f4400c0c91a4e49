"""Named phases of a step and the seconds each took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.telemetry.spans import Span


class PhaseTimers:
    """The wall-clock seconds of each phase, for one thread.

        timers = PhaseTimers()
        with timers("rollout"):
            ...
        timers.snapshot()  # {"time/rollout": 1.2, "time/step": 1.3}

    A phase inside another one pauses the outer one, so that the phases of a step never add up to more than the step.
    With a GPU the seconds are the host's: a phase ends when its work is queued unless it waits for a result.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_change: Callable[[str], None] = lambda phase: None
    ) -> None:
        """on_change is told the innermost phase whenever that changes; '' is none."""
        self._clock, self.on_change = clock, on_change
        self._seconds: dict[str, float] = {}
        self._open: list[Span] = []
        self._ended: list[Span] = []
        self._mark = clock()
        self._start = self._mark
        self.last_spans: list[Span] = []
        """The phases that ended between the last two snapshots, each with those inside it as its children."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the seconds of the `with` block as phase `name`; a block that raises counts too."""
        self._charge()
        # The outer phase has its seconds up to here, and pauses.
        parent = self._open[-1] if self._open else None
        span = Span(row="phases", name=name, begin_s=self._mark, parent=parent)
        self._open.append(span)
        self.on_change(name)
        try:
            yield
        finally:
            self._charge()
            self._ended.append(self._open.pop())
            span.end_s = self._mark
            self.on_change(parent.name if parent is not None else "")

    def snapshot(self) -> dict[str, float]:
        """Return `time/<phase>` of every phase and `time/step`, in seconds since the last snapshot, and start anew."""
        self._charge()
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/step"] = self._mark - self._start
        # Phases under way stay open: the rest of their time is the next step's.
        self._seconds, self._start = {}, self._mark
        self.last_spans, self._ended = self._ended, []
        return result

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            name = self._open[-1].name
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now
