"""Command-line arguments that tie a server to a run: its address, its token and its registration."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.launch.run_token import registered_token_file
from megatron_rl.tools.embedded_server.listening import is_loopback


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token that clients must send, created if missing; use the same file as the trainer's "
        "rollout.token_file. Without a token, nobody can update the weights. Default with --register: FOLDER/RUN.token",
    )
    parser.add_argument("--register", type=Path, metavar="FOLDER", help="register here: the trainer's rollout.registry")
    parser.add_argument("--run", default="", help="run that may use the server: the last part of its run.folder")


def check_run_arguments(args: argparse.Namespace) -> None:
    """Check the arguments of `add_run_arguments`.

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
