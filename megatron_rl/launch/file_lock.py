"""File locks, each held by one process at a time.

The content of the file names the process that holds the lock, so that error messages of other processes can name it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

POLL_S = 0.05
PATIENCE_S = 5.0
"""Default number of seconds to wait for a lock. The system releases the lock of a killed process sooner than that."""


class LockHeld(BlockingIOError):
    """Another process holds the lock."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"{owner} keeps the lock")
        self.owner = owner


def take(path: Path, patience_s: float = PATIENCE_S, *, by_process: bool = False) -> int:
    """Lock the file `path` and return its file descriptor. Raises LockHeld if the lock is not free within `patience_s`.

    by_process: if False, the lock lasts until the file is closed in this process and in all processes forked from it.
    If True, it lasts only until this process closes the file or ends, because forked processes do not share the lock.
    """
    # flock's lock belongs to the open file, which a fork shares; lockf's belongs to this process alone.
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
    """Write the lock's owner and the time into the lock file. The owner is process `pid` on this host."""
    # Written in place: a file renamed over this one would be a different lock.
    os.ftruncate(lock, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(lock, f"process {pid} on {socket.gethostname()} (since {since})".encode(), 0)


def keep_folder(folder: Path, name: str, what: str) -> int:
    """Lock a folder for exclusive use, and return the lock's file descriptor.

    The lock lasts until this descriptor is closed or this process ends. Raises OSError, which says who holds the lock
    or why the folder cannot be written.

    name: name of the lock file in the folder. what: words for the kind of user, such as `a run`, for the error message.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = take(folder / name, by_process=True)  # forked checkpoint writers may outlive this process
    except LockHeld as other:
        raise OSError(
            f"{other.owner} belongs to {what} in this folder, and only one may use it; wait until it has ended, kill "
            f"it, or name another folder."
        ) from None
    except OSError as error:
        raise OSError(f"cannot be written ({error}); name another one.") from error
    sign(lock, os.getpid())
    return lock
