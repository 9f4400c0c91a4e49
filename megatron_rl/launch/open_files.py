"""The number of files and sockets that a process may have open: raised to the system's limit from a shell's 1,024."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

MOST = 2**20
"""The limit where the system has none; tools that go through all numbers would take long with more."""
LEAST = 512
"""Smallest limit with which a run starts: twice what an idle process of a run has open."""


def raise_limit() -> int:
    """Raise this process's limit, and that of those it starts, to the hard one. Return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    wanted = MOST if hard == resource.RLIM_INFINITY else hard
    if soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # the kernel's own limit may be lower
        logger.warning("RLIMIT_NOFILE stays at %d and was to be %d: %s", soft, wanted, error)
        return soft
    return wanted


def check_limit() -> None:
    """Raise RuntimeError where a run would stand still for want of files: what it sends waits until one is closed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST:
        raise RuntimeError(
            f"this process may have {soft} files and sockets open, and a process of a run takes at least {LEAST}; "
            f"raise the limit (ulimit -Hn {LEAST} as root, LimitNOFILE= of the service, or --ulimit nofile of the "
            f"container)."
        )
