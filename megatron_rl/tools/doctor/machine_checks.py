"""Checks one machine: the open-file limit, shared memory, free ports and the speed of the run's disk."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.launch.ports import LOWEST, first_of_connections
from megatron_rl.tools.doctor.finding import Finding

LEAST_FILES, LEAST_SHARED_BYTES, LEAST_BYTES_PER_S = 4096, 64 << 20, 50e6
DISK_TRIES = 4
PORTS_TRIED, LEAST_FREE = 64, 16
"""Number of server ports that are tried, spread over their range, and how many of these must be free."""


def check_machine(folder: Path, probe_name: str = ".doctor") -> Iterator[Finding]:
    """Check the open-file limit, shared memory, free ports and the speed of `folder`'s disk.

    probe_name: file in `folder` that is written and removed. Hosts that share a disk need different names.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        yield Finding(
            who="machine", where="open files", cause=f"the limit is {soft}; raise it to {LEAST_FILES} (ulimit -n)"
        )
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < LEAST_SHARED_BYTES:
        yield Finding(who="machine", where=str(shared), cause=f"has {free / 1e6:.0f} MB free; give the container more")
    end = first_of_connections()
    tried = range(LOWEST, end, max(1, (end - LOWEST) // PORTS_TRIED))
    if (free := sum(map(is_free, tried))) < LEAST_FREE:
        cause = f"only {free} of {len(tried)} that were tried are free; end what listens there (ss -ltnp)"
        yield Finding(who="machine", where=f"ports {LOWEST} to {end - 1}", cause=cause)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # The fastest of several writes, because other programs may use the disk too.
        speed = 0.0
        for _ in range(DISK_TRIES):
            speed = max(speed, _written_per_s(folder / probe_name))
            if speed >= LEAST_BYTES_PER_S:
                return
    except OSError as error:
        yield Finding(who="machine", where=str(folder), cause=f"cannot be written: {error}")
        return
    yield Finding(who="machine", where=str(folder), cause=f"takes only {speed / 1e6:.0f} MB/s; name a faster disk")


def _written_per_s(probe: Path) -> float:
    """Write a file of 32 MiB, then remove it. Return the write speed in bytes per second."""
    data, begin = b"\0" * (32 << 20), time.monotonic()
    try:
        with probe.open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        return len(data) / (time.monotonic() - begin)
    finally:
        probe.unlink(missing_ok=True)


def is_free(port: int) -> bool:
    """Return True if a process of this host can listen on the port."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
