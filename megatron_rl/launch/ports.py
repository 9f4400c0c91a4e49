"""Free ports for processes that listen later, and this host's address as other hosts see it."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 24_000
"""Lowest port to choose. Lower ports are for the rendezvous of ranks and of a server's nodes (launch/slurm.py)."""
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
CHOICES = 200


def free_port(host: str) -> int:
    """Return a port of `host` that nothing listens on, below the kernel's range for outgoing connections.

    A port of that range could be taken before SGLang listens, which is ten seconds or more after it is given the port.
    Raises RuntimeError if no port is free.
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
    """Return the exclusive upper bound of the ports to choose from: the first port of the kernel's ephemeral range.

    If that range begins below LOWEST + CHOICES, return 65,536 and risk that a connection takes the chosen port.
    """
    first = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768
    return first if first >= LOWEST + CHOICES else 65_536


def address_towards(host: str) -> str:
    """Return this host's address on the network interface that leads to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 80))  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])
