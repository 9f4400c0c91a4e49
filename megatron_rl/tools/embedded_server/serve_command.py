"""`megatron-rl serve MODEL --backend sglang`: one real SGLang server under a supervisor, registered for a run.

The registration is valid only while the server answers: its lease expires during a restart. For a server that spans
several nodes (SGLang's --nnodes), run this command on each node. Only node 0 registers. If one node's process
ends, all of them end, because SGLang's processes cannot rejoin.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import threading
from pathlib import Path

from megatron_rl.config import RolloutConfig
from megatron_rl.launch.server_registry import Registration, registered
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.tools.embedded_server.run_arguments import add_run_arguments, check_run_arguments, token_file_of


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-rl serve --backend sglang",
        description="Serve rollouts with SGLang and restart it if it dies. Further arguments are passed to SGLang.",
    )
    parser.add_argument("model", type=Path, help="folder in Hugging Face format")
    parser.add_argument(
        "--backend", choices=("sglang", "embedded"), default="sglang", help="server program (default sglang)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on, reachable by the trainer")
    parser.add_argument("--dtype", default="bfloat16", help="the trainer's model.dtype")
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights",
    )
    parser.add_argument("--log-folder", type=Path, default=Path("."), help="folder for the server's log (default .)")
    parser.add_argument(
        "--restarts",
        type=int,
        default=RolloutConfig.server_restarts,
        help="maximum number of restarts (default %(default)s)",
    )
    parser.add_argument(
        "--start-timeout-s",
        type=float,
        default=RolloutConfig.start_timeout_s,
        help="maximum seconds for a start of the server (default %(default)s)",
    )
    parser.add_argument(
        "--health-timeout-s",
        type=float,
        default=RolloutConfig.health_timeout_s,
        help="restart the server if it generates nothing for this many seconds; a weight update must not take longer "
        "(default %(default)s)",
    )
    add_run_arguments(parser)
    return parser


def node_of(config: RolloutConfig) -> int:
    """Return this node's rank within its server: --node-rank, or else the Slurm task's SLURM_PROCID.

    ValueError if neither gives a rank in [0, --nnodes).
    """
    given = config.server_option("--node-rank") or os.environ.get("SLURM_PROCID", "")
    if not given.isdecimal() or int(given) >= config.nodes_per_server:
        raise ValueError(
            f"--node-rank {given or '(not given)'}: must be in [0, --nnodes = {config.nodes_per_server}), each on one "
            f"node; give it, or start all of them as tasks of one srun."
        )
    return int(given)


def main(argv: list[str]) -> None:
    args, server_args = parser().parse_known_args(argv)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # srun forwards only SIGUSR1
        signal.signal(number, lambda *_: sys.exit(0))  # the supervisor stops its server on the way out
    ended, reason = threading.Event(), []
    try:
        args.token_file = token_file_of(args) or args.log_folder / "token"
        check_run_arguments(args)
        config = RolloutConfig(
            backend=args.backend,
            token_file=str(args.token_file),
            server_args=server_args,
            server_restarts=args.restarts,
            start_timeout_s=args.start_timeout_s,
            health_timeout_s=args.health_timeout_s,
        ).with_time_for(args.model)
        node = 0
        if config.nodes_per_server > 1:
            node = node_of(config)
            options = [*server_args, "--node-rank", str(node)]
            config = dataclasses.replace(config, server_args=options, server_restarts=0)
            args.log_folder /= f"node-{node}"
    except ValueError as error:
        raise SystemExit(f"megatron-rl serve: {error}") from None

    def give_up(message: str) -> None:
        reason.append(message)
        ended.set()

    supervisor = Supervisor(
        config,
        args.model,
        args.log_folder,
        dtype=args.dtype,
        host=args.host if node == 0 else "127.0.0.1",  # other nodes answer only the supervisor's health checks
        dummy_weights=args.load_format == "dummy",
        on_death=give_up,
    )
    with supervisor:
        url = supervisor.urls[0]
        print(f"{supervisor.backend} rollout server ready at {url}; its token is in {args.token_file}", flush=True)
        if args.register is None or node > 0:
            ended.wait()
        else:
            with registered(args.register, Registration(url=url, run=args.run), is_well=lambda: supervisor.all_answer):
                ended.wait()
    if reason:
        raise SystemExit(f"megatron-rl serve: {reason[0]}")
