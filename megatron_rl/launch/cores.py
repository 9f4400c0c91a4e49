"""Counts the cores that are free for a process that starts now.

If a program's parallel loops use more threads than there are free cores, it is ten times slower than with one thread.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

QUOTA = Path("/sys/fs/cgroup/cpu.max")
LOOK_S = 0.2


def free_cores() -> int:
    """Return how many cores this process may use, by affinity and container quota, that are not busy. At least 1."""
    usable = min(float(len(os.sched_getaffinity(0))), quota())
    # Both may be too high: the load of the last minute includes processes that have just ended, and the current use
    # includes ranks that start at the same time.
    busy = min(os.getloadavg()[0], busy_cores())
    return max(1, round(usable - busy))


def quota() -> float:
    """Return the container's CPU quota in cores; infinity if it has none."""
    try:
        allowed, period = QUOTA.read_text().split()
    except OSError:
        return float("inf")
    return float("inf") if allowed == "max" else int(allowed) / int(period)


def busy_cores() -> float:
    """Return how many of the host's cores are busy, measured over LOOK_S; 0 if the host has no CPU statistics."""
    try:
        return psutil.cpu_percent(LOOK_S) / 100 * (psutil.cpu_count() or 1)
    except FileNotFoundError:  # /proc/stat
        return 0.0
