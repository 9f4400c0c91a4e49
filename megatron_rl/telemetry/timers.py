"""Wall-clock timers for the named phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.telemetry.spans import Span


class PhaseTimers:
    """Timers that measure the wall-clock time of each phase of one thread.

        timers = PhaseTimers()
        with timers("rollout"):
            ...
        timers.snapshot()  # {"time/rollout": 1.2, "time/step": 1.3}

    A nested phase pauses the outer one, so that a step's phases never add up to more than the step. A phase that does
    not wait for a GPU result ends when its work is queued.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_change: Callable[[str], None] = lambda phase: None
    ) -> None:
        """Start without a phase.

        clock: function that returns the time in seconds. on_change: called with the name of the innermost phase
        whenever it changes; '' stands for no phase.
        """
        self._clock, self.on_change = clock, on_change
        self._seconds: dict[str, float] = {}
        self._open: list[Span] = []
        self._ended: list[Span] = []
        self._mark = clock()
        self._start = self._mark
        self.last_spans: list[Span] = []
        """Spans of the phases that ended between the last two snapshots. A nested phase is a child of the outer one."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the `with` block as phase `name`."""
        self._charge()
        # The time up to here belongs to the outer phase, which now pauses.
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
        """Return the seconds of each phase, as `time/<phase>`, and the seconds since the last snapshot, as `time/step`.

        Reset all of them.
        """
        self._charge()
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/step"] = self._mark - self._start
        # Phases in progress stay open: their remaining time belongs to the next step.
        self._seconds, self._start = {}, self._mark
        self.last_spans, self._ended = self._ended, []
        return result

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            name = self._open[-1].name
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now
