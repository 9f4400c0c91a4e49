"""Starts the ranks of one host without torchrun: `python -m megatron_rl.launch --ranks 2 CONFIG key=value ...`.

When a rank dies the others are stopped, and one line says which and how. SIGTERM and SIGUSR1 are passed on to all
ranks, which save and stop (launch/notice.py); the exit code is theirs then.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

from megatron_rl.launch.notice import EXIT_STOPPED, SIGNALS
from megatron_rl.launch.watch import exit_with

STOP_S = 5.0
"""Seconds that ranks have to end by themselves after Ctrl-C, which reaches them too."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("megatron_rl.launch", description="Start a training run's ranks on this host.")
    parser.add_argument("--ranks", type=int, default=1, help="processes to start")
    parser.add_argument("--exit-with", type=int, metavar="PID", help="stop when this process ends")
    parser.add_argument("--resume", default="", metavar="auto|CHECKPOINT", help="continue a run, see megatron_rl.train")
    parser.add_argument("config", help="experiment file")
    args, rest = parser.parse_known_args(argv)
    if args.resume:
        rest += ["--resume", args.resume]
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: must be at least 1")
    if args.exit_with:
        exit_with(args.exit_with)
    sys.exit(run(args.ranks, [args.config, *rest]))


def run(ranks: int, train_args: list[str]) -> int:
    """Start the ranks, wait for them and return the exit code of the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "megatron_rl.train", *train_args, "--exit-with", str(os.getpid())]
    processes = [subprocess.Popen(command, env=os.environ | _place(rank, ranks, port)) for rank in range(ranks)]
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _pass_on(number, processes))
    try:
        failed = _first_failure(processes)
    except KeyboardInterrupt:
        _stop(processes, patience_s=STOP_S)
        return 130
    if failed is None:
        return max(process.returncode for process in processes)
    code = processes[failed].returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    _stop(processes, patience_s=0.0)
    if ranks > 1 or code < 0:
        print(f"megatron_rl: rank {failed} (pid {processes[failed].pid}) {how}; stopped the run.", file=sys.stderr)
    return 1


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _first_failure(processes: list[subprocess.Popen]) -> int | None:
    """Wait until all ranks ended well or stopped on a notice (None), or one did not (its number)."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0, EXIT_STOPPED):
                return rank
        if all(code is not None for code in codes):
            return None
        time.sleep(0.05)


def _pass_on(number: int, processes: list[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _stop(processes: list[subprocess.Popen], *, patience_s: float) -> None:
    """Wait a while for the ranks that remain, then kill them: SIGTERM would be a notice, and ask them to save."""
    deadline = time.monotonic() + patience_s
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
