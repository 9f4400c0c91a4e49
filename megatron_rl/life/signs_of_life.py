"""Names within a minute whoever of a run gives no sign of life: a process that was stopped, a thread that stands still.

It ends nothing: what is stopped may go on, what is slow may be right, and what hangs has a limit of its own
(run.phase_timeout_s, rollout.health_timeout_s and others), which is longer.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from megatron_rl.life import process_exit

logger = logging.getLogger(__name__)

SILENT_S = 30.0
"""Seconds without a sign of life after which a process or thread is named."""
LOOK_S = 5.0
Silence = dict[str, tuple[float, str]]
"""By name, in words that stay the same: the seconds of silence, and what else there is to say of it."""
Look = Callable[[], Silence]


class SignsOfLife:
    """Looks at all of a process's others. `look` is one round; between `start` and `close` a thread makes them.

    signs = SignsOfLife([StoppedProcesses(), lambda: {"the loader": (loader.silent_s, "")}])
    signs.start()
    train()
    signs.close()
    """

    def __init__(
        self, looks: Sequence[Look], *, say: Callable[[str], None] = logger.warning, silent_s: float = SILENT_S
    ) -> None:
        self.looks, self._say, self._silent_s = looks, say, silent_s
        self._looked_at = time.monotonic()
        self._named: set[str] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._looked_at = time.monotonic()
        self._thread = process_exit.start_thread(self._keep_looking, name="signs-of-life")

    def close(self) -> None:
        """Harmless without `start`, or twice."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(LOOK_S)

    def look(self) -> None:
        """Say who has been silent for too long now, and who was named before and is not silent any more."""
        found = {who: silence for look in self.looks for who, silence in look().items()}
        silent = {who: silence for who, silence in found.items() if silence[0] >= self._silent_s}
        for who in silent.keys() - self._named:
            seconds, more = silent[who]
            self._say(f"{who} has given no sign of life for {seconds:.0f} s; the run goes on as far as it can.{more}")
        for who in self._named - silent.keys():
            self._say(f"{who} is back, or gone.")
        self._named = set(silent)

    def _keep_looking(self) -> None:
        every_s = min(LOOK_S, self._silent_s / 4)
        while not self._closed.wait(every_s):
            now, before, self._looked_at = time.monotonic(), self._looked_at, time.monotonic()
            if now - before < every_s + self._silent_s / 2:  # else this process stood still, as after Ctrl-Z
                try:
                    self.look()
                except (OSError, psutil.Error) as error:  # such as no file to be had: nobody is to blame for that
                    logger.warning("signs of life cannot be looked for: %s", error)


class StoppedProcesses:
    """Finds, of this process's family, those that a signal has stopped, or a debugger."""

    def __init__(self, *, descends: bool = True, names_parent: bool = False) -> None:
        """descends: looks at the children's children too."""
        self._descends, self._names_parent = descends, names_parent
        self._since: dict[int, float] = {}

    def __call__(self) -> Silence:
        now, own, silent, since = time.monotonic(), psutil.Process(), {}, {}
        parent = own.parent() if self._names_parent else None
        for process in [*own.children(recursive=self._descends), *([parent] if parent is not None else [])]:
            try:
                if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    continue
                who = f"{role_of(process, own)} (pid {process.pid}), which a signal has stopped,"
            except psutil.Error:  # it has ended meanwhile
                continue
            since[process.pid] = self._since.get(process.pid, now)
            silent[who] = now - since[process.pid], f" kill -CONT {process.pid} lets it go on."
        self._since = since
        return silent


def role_of(process: psutil.Process, own: psutil.Process) -> str:
    """Return what a process of this one's family is for."""
    line = " ".join(process.cmdline())
    roles = {
        "megatron_rl.rewards": "a process of the rewards",
        "megatron_rl.rollout": "the rollout process",
        "megatron_rl.tools.embedded_server": "a rollout server",
        "sglang": "a rollout server",
    }
    if process.pid == own.ppid():
        return "the process that started this one"
    with suppress(psutil.AccessDenied):  # rewards' processes let nobody but root read theirs
        # Before the roles by command: a rank's may name a reward of this package among its overrides.
        if "RANK" in (theirs := process.environ()) and "RANK" not in os.environ:
            return f"rank {theirs['RANK']}"
    if process.cmdline() == own.cmdline():
        return "a checkpoint's writer"
    return next((role for part, role in roles.items() if part in line), f"process {line[:60]!r}")


def where(thread: threading.Thread) -> str:
    """Return the place in its code where a thread of this process is."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "nowhere any more"
    return f"in {frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
