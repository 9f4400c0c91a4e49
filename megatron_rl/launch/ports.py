"""Ports for processes that listen on them only later, and the address that other hosts know this one by."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 24_000
"""Below are the ports on which ranks, and the nodes of a server, meet (launch/slurm.py)."""
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
CHOICES = 200


def free_port(host: str) -> int:
    """Return a port of `host` that nothing listens on, and that no connection is given before somebody does.

    The kernel gives connections ports of a range of its own. SGLang listens ten seconds and more after it was told
    where, in which a port of that range would sometimes be taken. RuntimeError where none is free.
    """
    # Not random's own generator: ranks and tests that have seeded it would all try the same ports.
    for port in random.SystemRandom().sample(range(LOWEST, first_of_connections()), CHOICES):
        try:
            socket.create_server((host, port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError(f"none of {CHOICES} ports of {host} from {LOWEST} on is free; end what listens there.")


def first_of_connections() -> int:
    """The first port that connections are given; some above LOWEST where that is below, and the risk is taken."""
    first = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768
    return first if first >= LOWEST + CHOICES else 65_536


def address_towards(host: str) -> str:
    """Return this host's address as `host` reaches it: that of the interface towards it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 80))  # a datagram socket sends nothing by connecting
        return str(probe.getsockname()[0])
