"""Locks on files: one process at a time has one. The file says whose it is, for the message to others."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

POLL_S = 0.05
PATIENCE_S = 5.0
"""An owner that was killed is gone in less."""


class LockHeld(BlockingIOError):
    """Another process keeps the lock."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"{owner} keeps the lock")
        self.owner = owner


def take(path: Path, patience_s: float = PATIENCE_S, *, by_process: bool = False) -> int:
    """Return an open file that has the lock of `path` until the last copy of it is closed. LockHeld after a while.

    by_process: until this process closes it or ends; what it forks has no part in the lock.
    """
    lock, acquire = os.open(path, os.O_RDWR | os.O_CREAT, 0o644), fcntl.lockf if by_process else fcntl.flock
    deadline = time.monotonic() + patience_s
    while True:
        try:
            acquire(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                owner = os.pread(lock, 1000, 0).decode() or "another process"
                os.close(lock)
                raise LockHeld(owner) from None
        time.sleep(POLL_S)


def sign(lock: int, pid: int) -> None:
    """Write down whose it is."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {pid} on {socket.gethostname()}".encode(), 0)
