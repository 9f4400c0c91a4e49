"""A forked process as a program that was started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import BinaryIO

POLL_S = 0.01


class Forked:
    """A forked process, with the part of subprocess.Popen that those who start programs use."""

    def __init__(self, pid: int, command: list[str]) -> None:
        self.pid, self.args = pid, command
        self.returncode: int | None = None
        self.stdin: BinaryIO | None = None
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        with self._waiting:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
