"""Command-line arguments that tie a server to a run: its address, its token and its registration."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import socket
from pathlib import Path

from megatron_rl.launch.run_token import registered_token_file


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="clients must send the token in it, without which nobody may change the server; made where there is none. "
        "The trainer's rollout.token_file. Default with --register: RUN.token there",
    )
    parser.add_argument("--register", type=Path, metavar="FOLDER", help="the trainer's rollout.registry")
    parser.add_argument("--run", default="", help="the run that may use the server: the last part of its run.folder")


def check_run_arguments(args: argparse.Namespace) -> None:
    """Check these arguments.

    ValueError if no trainer could use the registration, or if other hosts could reach a server without a token.
    """
    if (args.register is not None) != bool(args.run):
        raise ValueError("--register and --run: must be given together; the run is the last part of its run.folder")
    if args.register is not None and args.host in ("0.0.0.0", "::"):
        raise ValueError(f"--host {args.host}: must be an address that the trainer reaches, as it is registered")
    if token_file_of(args) is None and not is_loopback(args.host):
        raise ValueError(
            f"--host {args.host}: other hosts reach this server, which then needs a token; add --token-file FILE, and "
            f"name that file in the trainer's rollout.token_file. Without a token a server listens on 127.0.0.1."
        )


def token_file_of(args: argparse.Namespace) -> Path | None:
    own = registered_token_file(args.register, args.run) if args.register is not None else None
    return args.token_file or own


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
