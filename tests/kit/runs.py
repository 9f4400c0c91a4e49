"""Starts training runs, as a user does or forked from this process, and reads what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config import load_config
from megatron_rl.train import main
from megatron_rl.train import train as train_config
from tests.kit.ranks import run_ranks

ROOT = Path(__file__).parents[2]
COUNT = "configs/count_grpo.yaml"


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def train_under_torchrun(*arguments: str, ranks: int, timeout_s: float = 240.0) -> None:
    """Run to the end. AssertionError shows the output of a run that failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "megatron_rl.train", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr


def train_forked(*arguments: str, ranks: int = 1, timeout_s: float = 240.0) -> None:
    """Run to the end in processes that need not import anything: seconds less for each than those of a command line."""
    run_ranks(ranks, main, list(arguments), timeout_s=timeout_s)


def train_until(shows: Callable[[list[dict]], bool], *arguments: str, ranks: int = 1, timeout_s: float = 240.0) -> None:
    """The same, but the run ends behind the first step whose lines of metrics so far show what is wanted."""
    run_ranks(ranks, _train_until, shows, arguments, timeout_s=timeout_s)


def _train_until(shows: Callable[[list[dict]], bool], arguments: tuple[str, ...]) -> None:
    from megatron_rl.run.rl_run import RLRun

    checkpoint = RLRun.checkpoint

    def ends(self: RLRun, *, step: int) -> bool:
        is_over = checkpoint(self, step=step)
        return self.groups.any(self.groups.is_main and shows(steps_of(self.folder))) or is_over

    RLRun.checkpoint = ends
    config, *overrides = arguments
    train_config(load_config(config, overrides))


def steps_of(folder: Path) -> list[dict]:
    return [line for line in lines_of(folder) if line["kind"] == "step"]


def evaluations_of(folder: Path) -> list[dict]:
    return [line for line in lines_of(folder) if line["kind"] == "evaluation"]


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)
