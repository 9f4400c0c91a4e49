"""The address on which a server of a command listens: its arguments, and its socket."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import socket


def port_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number in [0, 65535]; 0 picks a free port")
    return int(text)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address; ValueError with the reason if that is impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"--port {port}: port {port} is in use on {host}; end what listens there, choose another port, or let "
                f"--port 0 pick a free one"
            ) from None
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; name an address of this host") from None


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name may resolve to any address
        return False
