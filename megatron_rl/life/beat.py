"""Detects by a late heartbeat that an event loop is blocked, and names the user's function that blocks it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import defaultdict

from megatron_rl.config.users_code import place_on
from megatron_rl.life import process_exit

logger = logging.getLogger(__name__)

BEAT_S = LOOK_S = 0.25
"""BEAT_S: seconds between two beats. LOOK_S: seconds between two samples of a HoldWatch."""
LATE_S = 0.1
"""Seconds by which a beat must be late for the loop to count as blocked."""
HELD_S, BUSY_S, WINDOW_S = 2.0, 10.0, 60.0
"""Limits for one user function, in seconds per window of WINDOW_S: HELD_S while beats are late, BUSY_S in total."""


class Beat:
    """A heartbeat: a timer that fires on an event loop every BEAT_S seconds.

    It is late if the loop is blocked or its process is stopped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._due_s, self._lost_s = loop, time.monotonic() + BEAT_S, 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Schedule the first beat. Must be called in the loop's thread."""
        self._due_s = time.monotonic() + BEAT_S
        self._timer = self._loop.call_later(BEAT_S, self._mark)

    def _mark(self) -> None:
        self._lost_s = self.lag_s
        self.begin()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def stands_still_s(self) -> float:
        """Seconds for which the loop has been blocked; 0 if the beat is not late. Callable from any thread."""
        return max(0.0, time.monotonic() - self._due_s)

    @property
    def lag_s(self) -> float:
        """Total seconds for which the loop has been blocked, including a block that still lasts."""
        return self._lost_s + self.stands_still_s


class HoldWatch:
    """A watcher that warns, once per function, if user code blocks an event loop. The warning names file and line.

    It must be created in the loop's thread, whose stack it then samples from a thread of its own. It ignores code of
    this package, and time during which the whole process was stopped.
    """

    def __init__(self, beat: Beat) -> None:
        self._beat, self._thread = beat, threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._held: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._late: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._told: set[tuple[str, str]] = set()
        self._window_end = self._looked = time.monotonic()
        self._used_s = 0.0
        self._is_over = threading.Event()

    def begin(self) -> None:
        process_exit.start_thread(self._keep_looking, name="hold-watch")

    def end(self) -> None:
        """Stop watching. Must be called in the loop's thread."""
        self._is_over.set()

    def look(self, now: float) -> None:
        """Sample the stack of the loop's thread once, and warn if a function exceeds its limit. now: monotonic time."""
        passed, self._looked = now - self._looked, now
        used, self._used_s = self._used_s, self._cpu_s()
        if now >= self._window_end:
            self._held.clear()
            self._late.clear()
            self._window_end = now + WINDOW_S
        place = place_on(sys._current_frames().get(self._thread))
        if place is None:
            return
        file, line, function = place
        # If more time passed, the process was stopped, or the loop's thread held the interpreter. Count its CPU time.
        counted_s = max(min(passed, 2 * LOOK_S), min(passed, self._used_s - used))
        key = file, function
        self._held[key] += counted_s
        self._late[key] += counted_s if self._beat.stands_still_s >= LATE_S else 0.0
        held_s, is_long = self._held[key], self._late[key] >= HELD_S
        if key in self._told or not (is_long or held_s >= BUSY_S):
            return
        self._told.add(key)
        logger.warning(
            "%s:%d, in %s, has held the event loop for %.1f s: no other episode, reply or time limit goes on then. "
            "Await what takes time (asyncio.sleep, a client for asyncio), or run it in a thread: await "
            "asyncio.to_thread(function, ...). Said once for each function.",
            file,
            line,
            function,
            held_s,
        )

    def _cpu_s(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has just ended
            return self._used_s

    def _keep_looking(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.look(time.monotonic())
