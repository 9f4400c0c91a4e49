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
    # flock's lock belongs to the open file, which a fork shares; lockf's to this process alone.
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
    """Write down whose it is, and since when."""
    # In place: a file that is renamed over this one would be another lock.
    os.ftruncate(lock, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(lock, f"process {pid} on {socket.gethostname()} (since {since})".encode(), 0)


def keep_folder(folder: Path, name: str, what: str) -> int:
    """Keep every other `what` out of a folder until the file that is returned is closed, or this process ends.

    OSError says who is in it, or why it cannot be written. The lock is a file `name` there, and the process's own: what
    it forks, such as a checkpoint's writer, may outlive it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = take(folder / name, by_process=True)
    except LockHeld as other:
        raise OSError(
            f"{other.owner} belongs to {what} in this folder, and each must have one of its own; wait until that one "
            f"has ended, or kill it, or name another folder."
        ) from None
    except OSError as error:
        raise OSError(f"cannot be written ({error}); name another one.") from error
    sign(lock, os.getpid())
    return lock
