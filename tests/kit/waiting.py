"""Waiting for a condition. A limit only ends a test that hangs: it is far above what a slow machine needs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator


def measured_slowness() -> float:
    """Time a fixed loop on two processors at once, which may share one core, beside whatever else runs."""
    other = os.fork()
    begun = time.perf_counter()
    for _ in range(20):
        sum(i * i for i in range(100_000))
    if other == 0:
        os._exit(0)
    taken_s = time.perf_counter() - begun
    os.waitpid(other, 0)
    return max(1.0, taken_s / 0.15)


if "TESTS_SLOWNESS" not in os.environ:
    os.environ["TESTS_SLOWNESS"] = f"{measured_slowness():.2f}"
SLOWNESS = float(os.environ["TESTS_SLOWNESS"])
"""How much longer this machine takes than a quiet one of 2026. Workers and programs that tests start inherit it."""
LIMIT_S = 120.0 * SLOWNESS
"""How long a test waits for what takes seconds at most."""
LATE_S = 1000.0 * SLOWNESS
"""For deadlines that a test must never reach: of requests, servers, workers."""
POLL_S = 0.01


def wait_until(
    holds: Callable[[], object], what: object = "", *, limit_s: float = LIMIT_S, poll_s: float = POLL_S
) -> None:
    """Return as soon as `holds()` is true. Raises AssertionError with `what`, which may be a function, at the limit."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"after {limit_s:.0f} s: {what() if callable(what) else what}"
        time.sleep(poll_s)


async def until(holds: Callable[[], object], what: object = "", *, limit_s: float = LIMIT_S) -> None:
    """Do the same without blocking the event loop."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"after {limit_s:.0f} s: {what() if callable(what) else what}"
        await asyncio.sleep(POLL_S)


def growing_deadlines(first_s: float) -> Iterator[float]:
    """Give deadlines, each twice the one before, to a test of one that passes after something has begun.

    On a slow machine the first ones may pass too early: the test then tries again.
    """
    deadline_s = first_s
    while deadline_s < LIMIT_S:
        yield deadline_s
        deadline_s *= 2
    raise AssertionError(f"nothing had begun before a deadline of {deadline_s / 2:g} s")
