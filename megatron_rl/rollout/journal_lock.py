"""Who writes a run's journal: one process per rollout rank, and none once another process has resumed the run.

The lock belongs to an open file that a trainer hands to its rollout process, which has it from birth to death, whatever
happens to either.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_rl.launch import file_lock
from megatron_rl.launch.file_lock import PATIENCE_S

SUFFIX = ".lock"


def wait_for_owners(folder: str | Path, patience_s: float = PATIENCE_S) -> None:
    """Return once nobody writes the journal in `folder`; BlockingIOError names whoever still does after a while."""
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        os.close(_lock(path, patience_s))


def take(folder: str | Path, rank: int, patience_s: float = PATIENCE_S) -> int:
    """Return an open file that holds the lock of a rollout rank's journal until its last copy is closed.

    BlockingIOError where another process keeps it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    return _lock(Path(folder) / f"{rank:04}{SUFFIX}", patience_s)


def _lock(path: Path, patience_s: float) -> int:
    try:
        return file_lock.take(path, patience_s)
    except file_lock.LockHeld as held:
        raise BlockingIOError(
            f"rollout journal {path.parent}: {held.owner} belongs to a run in this run.folder and still writes it; "
            f"wait until that run has ended, or kill it, and resume."
        ) from None
