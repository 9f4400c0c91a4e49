"""Raises this process's limit on open files and sockets, often 1,024 by default, to the hard limit."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

MOST = 2**20
"""Limit that is set if the hard limit is infinite. A higher one would slow down tools that iterate over all possible
file descriptors."""
LEAST = 512
"""Minimum limit to start a run: twice the number of files that an idle process of a run has open."""


def limit() -> int:
    """Return the number of files that this process may have open; MOST if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> int:
    """Raise the soft limit of this process and its children to the hard limit. Return the resulting limit."""
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
    """Raise RuntimeError if the limit is below LEAST. Requests would then wait for each other's file descriptors."""
    if limit() < LEAST:
        raise RuntimeError(
            f"this process may have {limit()} files and sockets open, and a process of a run takes at least {LEAST}; "
            f"raise the limit (ulimit -Hn {LEAST} as root, LimitNOFILE= of the service, or --ulimit nofile of the "
            f"container)."
        )
