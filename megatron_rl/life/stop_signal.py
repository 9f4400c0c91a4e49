"""Handles the signals that ask a run to stop: SIGTERM, SIGUSR1 (schedulers send it before pre-emption) and Ctrl-C."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.life import process_exit

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_STOPPED = 75
"""Exit code of a run that stopped on a signal and can be resumed: EX_TEMPFAIL, "try again later"."""
EXIT_INTERRUPTED = 130
"""Exit code of a run that its user ended by Ctrl-C, saved or not. Such a run must not be restarted automatically."""
FINISH_ON_TERM_S = 5.0
"""Seconds that the current step gets to end by itself after SIGTERM or Ctrl-C. Schedulers send SIGKILL half a minute
after SIGTERM, and the rest of that time is needed to save."""
SAME_CTRL_C_S = 0.5
"""Seconds within which a second SIGINT counts as the same Ctrl-C, because terminal and launcher both send it."""


class StopSignal:
    """A listener for stop signals. Its thread receives them even while the main thread waits in a collective.

        stop_signal = StopSignal(grace_s=120, on_half_time=leave_rollouts)
        stop_signal.listen()
        while not stop_signal.came():
            train_one_step()
        stop_signal.close()

    After a signal, the run has `grace_s` seconds to end. When half of this time is over, the thread calls
    `on_half_time`; for SIGTERM and Ctrl-C it does so after FINISH_ON_TERM_S seconds if that is earlier. When the whole
    time is over, the thread ends the process. It does not do so after Ctrl-C, because the user can then end the process
    at once by a second Ctrl-C.
    """

    def __init__(
        self, grace_s: float, *, on_half_time: Callable[[], None], says_so: bool = True, saves: bool = True
    ) -> None:
        """Prepare a listener, which receives no signals before `listen` is called.

        says_so: whether to print messages. saves: whether the run writes a checkpoint when it stops, which only the
        messages depend on.
        """
        self.grace_s, self.on_half_time, self.says_so, self.saves = grace_s, on_half_time, says_so, saves
        self.signal_name = ""
        """Name of the first signal that was received; '' if none was."""
        self._came, self._closed = threading.Event(), threading.Event()
        self._handlers: dict[int, Any] = {}
        self._heard_at = 0.0

    def listen(self, numbers: Sequence[signal.Signals] = SIGNALS) -> None:
        """Receive these signals, in addition to those of earlier calls.

        This and `close` must be called in the process's main thread.
        """
        if not self._handlers:
            self._ear, self._mouth = socket.socketpair()
            # set_wakeup_fd requires a non-blocking descriptor, because a signal handler must not wait.
            self._mouth.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
            process_exit.start_thread(self._hear_until_closed, name="stop-signal")
        self._handlers |= {number: signal.signal(number, lambda *_: None) for number in numbers}

    def close(self) -> None:
        """Restore the previous signal handlers. May be called twice, or without `listen`.

        If a stop signal was received, later ones are ignored, because schedulers send more of them and the process is
        about to exit. Ctrl-C then ends the process.
        """
        self._closed.set()
        if self._handlers:
            for number, handler in self._handlers.items():
                if self._came.is_set():
                    handler = signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN
                signal.signal(number, handler)
            self._handlers = {}
            signal.set_wakeup_fd(self._wakeup)
            self._mouth.close()

    def came(self, *, within_s: float = 0.0) -> bool:
        """Return True if a signal was received, or one arrives within `within_s` seconds."""
        return self._came.wait(within_s)

    def _hear_until_closed(self) -> None:
        with self._ear:
            number = self._next(None)
            while number is not None and number not in (signal.SIGINT, *SIGNALS):
                number = self._next(None)
            if number is not None:
                self._hear(number)

    def _hear(self, number: int) -> None:
        self._heard_at = time.monotonic()
        self.signal_name = signal.Signals(number).name
        self._came.set()
        half_time_s = self.grace_s / 2
        if number != signal.SIGUSR1:
            half_time_s = min(half_time_s, FINISH_ON_TERM_S)
        if number == signal.SIGINT and self.says_so:
            what = "saves a checkpoint" if self.saves else "writes its report; it has no checkpoint to resume from"
            words = f"the run stops behind its step, or leaves its rollouts in {half_time_s:g} s, and {what}"
            print(f"megatron_rl: Ctrl-C: {words}. Ctrl-C again ends it at once.", file=sys.stderr, flush=True)
        # First let the step end by itself; then abandon its rollouts, which take most of a step's time.
        if self._ends_within(half_time_s):
            return
        self.on_half_time()
        if self._ends_within(None if number == signal.SIGINT else self.grace_s):
            return
        process_exit.stop(
            f"{self.signal_name}: no checkpoint within run.grace_s = {self.grace_s:g} s; the run resumes from the one "
            f"before. Raise it if the scheduler gives more time."
            if self.says_so
            else ""
        )

    def _ends_within(self, seconds: float | None) -> bool:
        """Wait until `seconds` have passed since the signal, or until `close` is called. Return True for the latter.

        If `seconds` is None, wait for `close` only. Another Ctrl-C during the wait ends the process.
        """
        while True:
            left_s = None if seconds is None else self._heard_at + seconds - time.monotonic()
            if left_s is not None and left_s <= 0:
                return self._closed.is_set()
            try:
                number = self._next(left_s)
            except TimeoutError:
                return self._closed.is_set()
            if number is None:
                return True
            if number == signal.SIGINT and time.monotonic() - self._heard_at > SAME_CTRL_C_S:
                words = (
                    "Ctrl-C once more: ended at once, with nothing saved since the last checkpoint, if there is one."
                )
                process_exit.stop(words if self.says_so else "", code=EXIT_INTERRUPTED)

    def _next(self, timeout_s: float | None) -> int | None:
        """Wait for a signal and return its number; None once `close` was called.

        Raises TimeoutError if no signal arrives within `timeout_s`.
        """
        self._ear.settimeout(timeout_s)
        number = self._ear.recv(1)
        return number[0] if number else None
