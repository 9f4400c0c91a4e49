"""`megatron-rl launch CONFIG`: starts the ranks of a run on one host.

On GPUs, the run's servers get some GPUs and the ranks get the others, or both take turns on the same GPUs
(rollout.colocated). Supervised and preference training has no servers and one rank per GPU. If a rank dies, the others
are killed, and one line says which rank died and how. SIGTERM, SIGUSR1 and Ctrl-C are forwarded to all ranks, which
save and stop (life/stop_signal.py); the exit code is then that of the ranks. A second Ctrl-C stops everything at once.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config import ParallelConfig, TrainConfig, load_config
from megatron_rl.launch.ports import free_port
from megatron_rl.launch.rank import PROGRAM, resume_command
from megatron_rl.life.last_words import one_line
from megatron_rl.life.process_exit import exit_with
from megatron_rl.life.signs_of_life import SignsOfLife, StoppedProcesses
from megatron_rl.life.stop_signal import EXIT_INTERRUPTED, EXIT_STOPPED, SAME_CTRL_C_S, SIGNALS


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "megatron-rl launch",
        description="Start a training run on this host: its ranks, which start its servers.",
        epilog="Further arguments are those of a rank, megatron_rl.train: key=value settings, --dry-run.",
    )
    parser.add_argument("--ranks", type=int, help="processes that train; default: one for each GPU that servers leave")
    parser.add_argument("--exit-with", type=int, metavar="PID", help="stop when this process ends")
    parser.add_argument("--resume", default="", metavar="auto|CHECKPOINT", help="continue a run, see megatron_rl.train")
    parser.add_argument("config", type=Path, help="config file, e.g. configs/demo.yaml")
    args, rest = parser.parse_known_args(argv)
    with one_line("megatron-rl launch"):
        # Checked before ranks start: each of them would report the same mistake.
        config = load_config(args.config, [word for word in rest if not word.startswith("-")])
        places = arrange(config, gpus_of_host(), args.ranks)
    if args.resume:
        rest += ["--resume", args.resume]
    if places.server_gpus:
        # Only the launcher can decide it: a rank sees its own GPUs and not which ones are reserved for servers.
        rest += [f"rollout.devices=[{','.join(places.server_gpus)}]"]
    if args.exit_with:
        exit_with(args.exit_with)
    code = run(places, [PROGRAM, str(args.config), *rest])
    if code == EXIT_INTERRUPTED and config.run.checkpoint_every_steps > 0:
        command = resume_command(["megatron-rl", "launch"], sys.argv[1:] if argv is None else argv)
        print(f"To continue: {command}", file=sys.stderr)
    sys.exit(code)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Placement of a run's ranks and servers on the GPUs of this host."""

    ranks: int
    rank_gpus: list[str] = field(default_factory=list)
    """One GPU per rank; empty on a host without GPUs."""
    server_gpus: list[str] = field(default_factory=list)
    """GPUs of all servers that the run starts."""


def arrange(config: TrainConfig, gpus: list[str], ranks: int | None) -> Places:
    """Place a run's ranks and servers on this host's GPUs. Raises ValueError if the run does not fit.

    ranks: number of ranks. None chooses as many as fit, or on a host without GPUs the fewest that hold whole replicas
    of every model.
    """
    rollout = config.rollout
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks {ranks}: must be at least 1; leave it out for as many as fit.")
    if not gpus:
        places = Places(ranks=ranks or ranks_of_replicas(config))
        config.check_world_size(places.ranks)
        return places
    rollout.check_for_gpus()
    wanted = rollout.server_gpus if config.starts_servers else 0
    servers = rollout.devices if wanted else []
    if missing := [gpu for gpu in servers if gpu not in gpus]:
        raise ValueError(
            f"rollout.devices = {servers}: {', '.join(missing)} not among this host's {len(gpus)} GPUs, "
            f"{', '.join(gpus)}; correct it, or leave it out."
        )
    # Servers get the last GPUs, so that rank n has GPU n.
    if not servers and wanted <= len(gpus):
        servers = gpus[:wanted] if rollout.colocated else gpus[len(gpus) - wanted :]
    left = gpus if rollout.colocated else [gpu for gpu in gpus if gpu not in servers]
    count = len(left) if ranks is None else ranks
    if wanted > len(gpus) or not 1 <= count <= len(left):
        if not wanted:
            raise ValueError(f"--ranks {count}: this host has {len(gpus)} GPUs, and each rank needs one; lower it.")
        share = "lower one of them" if rollout.colocated else "lower one of them, or set rollout.colocated=true"
        raise ValueError(
            f"this host has {len(gpus)} GPUs. Servers take rollout.server_count({rollout.server_count}) x "
            f"--tp({rollout.gpus_per_server}) = {wanted}, and {'also ' if rollout.colocated else ''}"
            f"{max(1, count)} are for the ranks; {share}."
        )
    config.check_world_size(count)
    return Places(ranks=count, rank_gpus=left[:count], server_gpus=servers)


def ranks_of_replicas(config: TrainConfig) -> int:
    """Return the fewest ranks that hold whole replicas of every model of a run."""
    layouts = [config.parallel, *([config.critic.parallel] if config.has_critic else [])]
    layouts += [config.reward_model.parallel] if config.reward_model.path else []
    return math.lcm(*map(ranks_of_replica, layouts))


def ranks_of_replica(layout: ParallelConfig) -> int:
    """Return the fewest ranks that hold a whole replica of a model in this layout."""
    dense = layout.tensor * layout.pipeline * layout.context
    return math.lcm(dense, layout.expert * layout.expert_tensor * layout.pipeline)


def gpus_of_host() -> list[str]:
    """Return the GPUs that this process may use, named as in CUDA_VISIBLE_DEVICES; [] if there is no GPU driver."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def run(places: Places, module_and_args: list[str]) -> int:
    """Start the ranks, wait for them and return the exit code of the run."""
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", *module_and_args, "--exit-with", str(os.getpid())]
    processes = [subprocess.Popen(command, env=os.environ | _place(rank, places, port)) for rank in range(places.ranks)]
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _pass_on(number, processes))
    interrupted_at: list[float] = []

    def interrupt(number: int, _: object) -> None:
        """Handle Ctrl-C: let the ranks save at the first one, and end all at the second.

        The ranks may also get the signal from the terminal.
        """
        if not interrupted_at:
            interrupted_at.append(time.monotonic())
            _pass_on(number, processes)
        elif time.monotonic() - interrupted_at[0] > SAME_CTRL_C_S:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    SignsOfLife([StoppedProcesses(descends=False)], say=say).start()
    try:
        failed = _first_failure(processes)
    except KeyboardInterrupt:
        _kill(processes)
        return EXIT_INTERRUPTED
    if failed is None:
        # 0, or the exit code of ranks that a signal stopped
        return max(process.returncode for process in processes)
    code = processes[failed].returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    _kill(processes)
    # A single rank that exited by itself has printed the reason.
    if places.ranks > 1 or code < 0:
        print(f"megatron_rl: rank {failed} (pid {processes[failed].pid}) {how}; stopped the run.", file=sys.stderr)
    return 1


def say(text: str) -> None:
    print(f"megatron_rl: {text}", file=sys.stderr, flush=True)


def _place(rank: int, places: Places, port: int) -> dict[str, str]:
    ranks = str(places.ranks)
    # A rank sees all ranks' GPUs, because NCCL needs them to reach its peers, and uses that of its local rank.
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(places.rank_gpus)} if places.rank_gpus else {}
    return gpus | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _first_failure(processes: list[subprocess.Popen]) -> int | None:
    """Wait until a rank fails, and return its number. Return None if all ranks succeed or stop on a signal."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0, EXIT_STOPPED, EXIT_INTERRUPTED):
                return rank
        if all(code is not None for code in codes):
            return None
        time.sleep(0.05)


def _pass_on(number: int, processes: list[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _kill(processes: list[subprocess.Popen]) -> None:
    """Send SIGKILL to the remaining ranks. At SIGTERM they would try to save, and wait for the rank that is gone."""
    for process in processes:
        process.kill()
        process.wait()
