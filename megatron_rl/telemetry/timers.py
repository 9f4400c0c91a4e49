"""Named phases of a step and the seconds each took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimers:
    """Adds up wall-clock seconds by phase; for one thread.

    A phase inside another one pauses the outer one, so that the phases of a step never add up to more than the step.
    With a GPU the seconds are the host's: a phase ends when its work is queued unless it waits for a result.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_change: Callable[[str], None] = lambda phase: None
    ) -> None:
        """on_change is told the innermost phase whenever that changes; '' is none."""
        self._clock, self.on_change = clock, on_change
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._mark = clock()
        self._start = self._mark

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the seconds of the `with` block as phase `name`; a block that raises counts too."""
        self._charge()
        self._open.append(name)
        self.on_change(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()
            self.on_change(self._open[-1] if self._open else "")

    def snapshot(self) -> dict[str, float]:
        """Return `time/<phase>` of every phase and `time/step`, in seconds since the last snapshot, and start anew."""
        self._charge()
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/step"] = self._mark - self._start
        self._seconds, self._start = {}, self._mark
        return result

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now
