"""Free ports for processes that will listen on them, and the address at which other hosts reach this host."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 24_000
"""Lowest port to choose. Lower ports are for the rendezvous of ranks and of a server's nodes (launch/slurm.py)."""
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
CHOICES = 200


def free_port(host: str) -> int:
    """Return a port of `host` on which nothing listens. It is below the kernel's range for outgoing connections.

    SGLang listens only ten seconds or more after it is given the port, and until then an outgoing connection could take
    a port of that range. Raises RuntimeError if no port is free.
    """
    # Not the global generator: ranks and tests that seeded it alike would all try the same ports.
    for port in random.SystemRandom().sample(range(LOWEST, first_of_connections()), CHOICES):
        try:
            socket.create_server((host, port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError(f"none of {CHOICES} ports of {host} from {LOWEST} on is free; end what listens there.")


def first_of_connections() -> int:
    """Return the exclusive upper bound of the ports to choose from: the first port that outgoing connections use.

    If the kernel's range for outgoing connections begins below LOWEST + CHOICES, return 65,536 and risk that a
    connection takes the chosen port.
    """
    first = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768
    return first if first >= LOWEST + CHOICES else 65_536


def address_towards(host: str) -> str:
    """Return this host's address on the network interface that leads to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 80))  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])
