"""Notices that a run is about to be ended: SIGTERM, and SIGUSR1 (what schedulers send ahead of a pre-emption)."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_rl.launch import watch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_STOPPED = 75
"""Exit code of a run that stopped on a notice and can be resumed: EX_TEMPFAIL, "try again later"."""
FINISH_ON_TERM_S = 5.0
"""Schedulers send SIGKILL half a minute after SIGTERM, which must be enough to save in."""


class StopNotice:
    """Hears the signals in a thread of its own, so also while the main thread waits for other ranks.

    From a notice on the run has `grace_s` seconds. At half of them `on_half_time` is called, from the thread, and after
    SIGTERM within FINISH_ON_TERM_S; when they are over the process is ended.
    """

    def __init__(self, grace_s: float, *, on_half_time: Callable[[], None], says_so: bool = True) -> None:
        self.grace_s, self.on_half_time, self.says_so = grace_s, on_half_time, says_so
        self.signal_name = ""
        """The first signal that came, empty before."""
        self._came, self._closed = threading.Event(), threading.Event()
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        """Begin to hear, instead of dying of the signals. The process's main thread calls it, and `close`."""
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        # Python's own handlers run between the main thread's instructions, and so not while it is inside a collective.
        self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        watch.start_thread(self._hear, name="stop-notice")

    def close(self) -> None:
        """Give the signals back to whoever had them. Harmless without `listen`, or twice.

        After a notice they are ignored: schedulers send another, and the process only has to end.
        """
        self._closed.set()
        if self._handlers:
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_IGN if self._came.is_set() else handler)
            self._handlers = {}
            signal.set_wakeup_fd(self._wakeup)
            self._mouth.close()

    def came(self, *, within_s: float = 0.0) -> bool:
        """True if there was a notice, or is one within some seconds."""
        return self._came.wait(within_s)

    def _hear(self) -> None:
        while (number := self._ear.recv(1)) and number[0] not in SIGNALS:
            pass
        if not number:
            return
        self.signal_name = signal.Signals(number[0]).name
        deadline = time.monotonic() + self.grace_s
        self._came.set()
        half_time_s = self.grace_s / 2
        if self.signal_name == "SIGTERM":
            half_time_s = min(half_time_s, FINISH_ON_TERM_S)
        if self._closed.wait(half_time_s):
            return
        self.on_half_time()
        if self._closed.wait(deadline - time.monotonic()):
            return
        watch.stop(
            f"{self.signal_name}: no checkpoint within run.grace_s = {self.grace_s:g} s; the run resumes from the one "
            f"before. Raise it if the scheduler gives more time."
            if self.says_so
            else ""
        )
