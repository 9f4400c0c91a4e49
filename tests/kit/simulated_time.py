"""An event loop whose clock jumps to the next thing that will happen, so that hours of waiting take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Deadlock(AssertionError):
    """Somebody waits, and nothing will ever happen."""


class JumpingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise Deadlock("no task is ready and no timer is set")
        self.now += timeout
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Deterministic where nothing asks the world: the same coroutines meet in the same order every time."""

    def __init__(self):
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now


def simulate(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` to its end; what it leaves behind is cancelled."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
