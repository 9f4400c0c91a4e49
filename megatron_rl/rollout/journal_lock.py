"""Who writes a run's journal: one process per data head, and none once another process has resumed the run.

The lock belongs to an open file that a trainer hands to its rollout process, which has it from birth to death, whatever
happens to either.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

SUFFIX = ".lock"
PATIENCE_S = 10.0
"""An owner that was killed with its trainer is gone in less."""
POLL_S = 0.05


def wait_for_owners(folder: str | Path, patience_s: float = PATIENCE_S) -> None:
    """Return once nobody writes the journal in `folder`; BlockingIOError names whoever still does after a while."""
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        os.close(_lock(path, patience_s))


def take(folder: str | Path, head: int, patience_s: float = PATIENCE_S) -> int:
    """Return an open file that holds the lock of a data head's journal until its last copy is closed.

    BlockingIOError where another process keeps it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    return _lock(Path(folder) / f"{head:04}{SUFFIX}", patience_s)


def sign(lock: int, pid: int) -> None:
    """Write down whose it is, for the message to others."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {pid} on {socket.gethostname()}".encode(), 0)


def _lock(path: Path, patience_s: float) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                owner = os.pread(lock, 1000, 0).decode() or "another process"
                os.close(lock)
                raise BlockingIOError(
                    f"rollout journal {path.parent}: {owner} belongs to a run in this run.folder and still writes it; "
                    f"wait until that run has ended, or kill it, and resume."
                ) from None
        time.sleep(POLL_S)
