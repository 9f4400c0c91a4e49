"""Counts the CPU cores that are free for a process that starts now.

A program whose parallel loops use more threads than there are free cores is ten times slower than with one thread.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

QUOTA = Path("/sys/fs/cgroup/cpu.max")
LOOK_S = 0.2


def free_cores() -> int:
    """Return the number of cores that this process may use and that are not busy; at least 1.

    CPU affinity and the container's quota limit the cores that it may use.
    """
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
    """Measure for LOOK_S seconds how many of the host's cores are busy. Return 0 if the host has no CPU statistics."""
    try:
        return psutil.cpu_percent(LOOK_S) / 100 * (psutil.cpu_count() or 1)
    except FileNotFoundError:  # /proc/stat
        return 0.0
