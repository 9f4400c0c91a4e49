"""The number of cores that are free for a process that starts now.

Threads that wait for each other and are more than the free cores are slower by an order of magnitude than one thread:
each step of a parallel loop takes as long as the thread that the system lets wait longest.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

CPU_STATISTICS = Path("/proc/stat")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
LOOK_S = 0.2


def free_cores() -> int:
    """Return the number of cores that others leave, at least 1: of those that this process may use, by affinity and by
    its container's quota, without those that are busy now and have been for a minute.

    Both, because a minute's load outlives what has just ended, and ranks that start together make each other busy.
    """
    usable = min(float(len(os.sched_getaffinity(0))), quota())
    busy = min(os.getloadavg()[0], busy_cores())
    return max(1, round(usable - busy))


def quota() -> float:
    """Return the cores that the container may use at a time; infinity where there is no bound."""
    try:
        allowed, period = QUOTA.read_text().split()
    except OSError:
        return float("inf")
    return float("inf") if allowed == "max" else int(allowed) / int(period)


def busy_cores() -> float:
    """Return how many cores of the host worked in the last moments; 0 where it does not say."""
    if not CPU_STATISTICS.exists():
        return 0.0
    first, began = _worked(), time.perf_counter()
    time.sleep(LOOK_S)
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    # Over the time that really passed: on a busy host the sleep takes longer than it was told.
    return (_worked() - first) / ticks_per_s / (time.perf_counter() - began)


def _worked() -> int:
    user, nice, system, *_ = map(int, CPU_STATISTICS.read_text().split("\n", 1)[0].split()[1:])
    return user + nice + system
