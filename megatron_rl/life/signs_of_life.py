"""Warns, within a minute, of any silent part of a run: a stopped process, or a thread that makes no progress.

It ends nothing, because a stopped process may be continued, and a slow one may be healthy. Real hangs have limits of
their own, which are longer (run.phase_timeout_s, rollout.health_timeout_s and others).
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
"""Seconds of silence after which a warning names a process or thread."""
LOOK_S = 5.0
Silence = dict[str, tuple[float, str]]
"""{name of a process or thread: (seconds of its silence, further text for the warning)}. The name must be the same at
each call."""
Look = Callable[[], Silence]


class SignsOfLife:
    """A monitor that warns about silent processes and threads.

    signs = SignsOfLife([StoppedProcesses(), lambda: {"the loader": (loader.silent_s, "")}])
    signs.start()
    train()
    signs.close()
    """

    def __init__(self, looks: Sequence[Look], *, say: Callable[[str], None] = logger.warning) -> None:
        self.looks, self._say = looks, say
        self._looked_at = time.monotonic()
        self._named: set[str] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._looked_at = time.monotonic()
        self._thread = process_exit.start_thread(self._keep_looking, name="signs-of-life")

    def close(self) -> None:
        """Stop the monitor's thread. May be called twice, or without `start`."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(LOOK_S)

    def look(self) -> None:
        """Warn of each process or thread that has become silent, and report each that is silent no more."""
        found = {who: silence for look in self.looks for who, silence in look().items()}
        silent = {who: silence for who, silence in found.items() if silence[0] >= SILENT_S}
        for who in silent.keys() - self._named:
            seconds, more = silent[who]
            self._say(f"{who} has given no sign of life for {seconds:.0f} s; the run goes on as far as it can.{more}")
        for who in self._named - silent.keys():
            self._say(f"{who} is back, or gone.")
        self._named = set(silent)

    def _keep_looking(self) -> None:
        while not self._closed.wait(LOOK_S):
            now, before, self._looked_at = time.monotonic(), self._looked_at, time.monotonic()
            if now - before < LOOK_S + SILENT_S / 2:  # otherwise this process itself was stopped, as by Ctrl-Z
                try:
                    self.look()
                except (OSError, psutil.Error) as error:  # such as too many open files: says nothing of the others
                    logger.warning("signs of life cannot be looked for: %s", error)


class StoppedProcesses:
    """Finds child processes (and, on request, the parent) that a signal or a debugger has stopped."""

    def __init__(self, *, descends: bool = True, names_parent: bool = False) -> None:
        """Select the processes to check, which always include this process's children.

        descends: also check the children's descendants. names_parent: also check the parent.
        """
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
            except psutil.Error:  # the process has just ended
                continue
            since[process.pid] = self._since.get(process.pid, now)
            silent[who] = now - since[process.pid], f" kill -CONT {process.pid} lets it go on."
        self._since = since
        return silent


def role_of(process: psutil.Process, own: psutil.Process) -> str:
    """Return a description of what a parent or descendant process is for. own: this process."""
    line = " ".join(process.cmdline())
    roles = {
        "megatron_rl.rewards": "a process of the rewards",
        "megatron_rl.rollout": "the rollout process",
        "megatron_rl.tools.embedded_server": "a rollout server",
        "sglang": "a rollout server",
    }
    if process.pid == own.ppid():
        return "the process that started this one"
    with suppress(psutil.AccessDenied):  # only root may read the environment of reward processes
        # Checked before the command line, because a rank's overrides may name a reward module of this package.
        if "RANK" in (theirs := process.environ()) and "RANK" not in os.environ:
            return f"rank {theirs['RANK']}"
    if process.cmdline() == own.cmdline():
        return "a checkpoint's writer"
    return next((role for part, role in roles.items() if part in line), f"process {line[:60]!r}")


def where(thread: threading.Thread) -> str:
    """Return where a thread of this process currently executes: function, file and line."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "nowhere any more"
    return f"in {frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
