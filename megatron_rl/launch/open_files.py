"""The number of files and sockets that a process may have open: raised to the system's limit from a shell's 1,024."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

MOST = 2**20
"""The limit where the system has none; tools that go through all numbers would take long with more."""


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
