"""Starts training runs, as a user does or forked from this process, and reads what they wrote.

A forked run's processes have imported everything, and with a server that outlives it a run begins in a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from megatron_rl.config import RolloutConfig, load_config
from megatron_rl.life.stop_signal import EXIT_STOPPED
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.train import main
from megatron_rl.train import train as train_config
from tests.kit import programs
from tests.kit.forks import check_end, killed, start_ranks
from tests.kit.programs import Forked
from tests.kit.ranks import run_ranks
from tests.kit.waiting import LATE_S, wait_until

ROOT = Path(__file__).parents[2]
COUNT = "configs/count_grpo.yaml"
COUNT_MODEL = ROOT / "configs" / "models" / "count_tiny"
UNTAUGHT = ("warm_start.updates=0", "rollout.reward=tests.end_to_end.parity_reward:even", "run.import_from=[tests]")
"""Settings of a run without a warm start, whose random replies are rewarded half of the time: it has what to learn."""


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def rollout_servers(folder: Path, count: int = 1, *, model: Path = COUNT_MODEL) -> Supervisor:
    """Servers for one run after the other, in a `with` block."""
    return Supervisor(RolloutConfig(backend="embedded", server_count=count), model, folder, dummy_weights=True)


def served_by(servers: Supervisor) -> tuple[str, str]:
    """Return the settings of a run whose servers these are."""
    return f"rollout.servers=[{','.join(servers.urls)}]", f"rollout.token_file={servers.token_file}"


# -- by a command line -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def launched(output: Path, *arguments: str, is_forked: bool = True) -> Iterator[subprocess.Popen[bytes] | Forked]:
    """A run by its launcher, in a session of its own. It writes to `output`; what is left in the end is killed."""
    command = [sys.executable, "-m", "megatron_rl.launch", *arguments]
    start = programs.start if is_forked else subprocess.Popen
    with output.open("ab") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        run = start(command, cwd=ROOT, env=environment(), start_new_session=True, **streams)
    try:
        yield run
    finally:
        for process in family(run.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.wait()


def family(pid: int) -> list[psutil.Process]:
    """A process, if it is still there, and all that descend from it."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def train_under_torchrun(*arguments: str, ranks: int) -> None:
    """Run to the end. AssertionError shows the output of a run that failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "megatron_rl.train", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LATE_S)
    assert done.returncode == 0, done.stdout + done.stderr


# -- forked from this process ------------------------------------------------------------------------------------------


def experiment(overrides: tuple[str, ...]) -> None:
    """Train to count as a rank does, from the newest checkpoint; end the process where a signal stops the run."""
    os.chdir(ROOT)
    if not train_config(load_config(COUNT, list(overrides)), resume="auto"):
        sys.exit(EXIT_STOPPED)


def run_to_the_end(folder: Path, overrides: tuple[str, ...], ranks: int = 1) -> None:
    output = folder / "output.txt"
    check_end(start_ranks(ranks, experiment, overrides, output), output)


@contextlib.contextmanager
def run_until_killed(overrides: tuple[str, ...], output: Path) -> Iterator[int]:
    """A run on one rank, by its pid, that is killed with SIGKILL in the end."""
    (pid,) = start_ranks(1, experiment, overrides, output)
    try:
        yield pid
    finally:
        killed(pid)


def train_forked(*arguments: str, ranks: int = 1) -> None:
    """Run to the end in processes that need not import anything: seconds less for each than those of a command line."""
    run_ranks(ranks, main, list(arguments), timeout_s=LATE_S)


def train_until(shows: Callable[[list[dict]], bool], *arguments: str, ranks: int = 1) -> None:
    """The same, but the run ends behind the first step whose lines of metrics so far show what is wanted."""
    run_ranks(ranks, _train_until, shows, arguments, timeout_s=LATE_S)


def _train_until(shows: Callable[[list[dict]], bool], arguments: tuple[str, ...]) -> None:
    from megatron_rl.run.rl_run import RLRun

    checkpoint = RLRun.checkpoint

    def ends(self: RLRun, *, step: int) -> bool:
        is_over = checkpoint(self, step=step)
        return self.groups.any(self.groups.is_main and shows(steps_of(self.folder))) or is_over

    RLRun.checkpoint = ends
    config, *overrides = arguments
    train_config(load_config(config, overrides))


# -- what a run has written --------------------------------------------------------------------------------------------


def wait_for_steps(folder: Path, count: int, is_over: Callable[[], bool], what: Callable[[], str] = str) -> None:
    """Return once a run has logged so many steps. AssertionError with `what` says where it is over before."""

    def are_there() -> bool:
        assert not is_over() or len(logged(folder)) >= count, what()
        return len(logged(folder)) >= count

    wait_until(are_there, what)


def logged(folder: Path) -> list[str]:
    """The lines of a run's steps, none where it has not begun."""
    try:
        return [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"kind": "step"' in line]
    except FileNotFoundError:
        return []


def newest_checkpoint(folder: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")), default=0)


def losses(folder: Path) -> list[tuple]:
    keys = ("step", "reward/mean", "policy/loss", "policy/grad_norm", "policy/first_loss")
    return [tuple(step[key] for key in keys) for step in steps_of(folder)]


def steps_of(folder: Path) -> list[dict]:
    return [line for line in lines_of(folder) if line["kind"] == "step"]


def evaluations_of(folder: Path) -> list[dict]:
    return [line for line in lines_of(folder) if line["kind"] == "evaluation"]


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)
