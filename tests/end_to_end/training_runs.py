"""Starts training runs as a user does, in processes of their own, and reads what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT = "configs/count_grpo.yaml"


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def command(*arguments: str, ranks: int = 0) -> list[str]:
    """Return the command line of a training run: plain python, or torchrun where `ranks` is given."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "megatron_rl.train", *arguments]


def train(*arguments: str, ranks: int = 0, timeout_s: float = 240.0) -> str:
    """Run to the end and return what it printed; AssertionError shows the output of a run that failed."""
    done = subprocess.run(
        command(*arguments, ranks=ranks), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of(folder: Path) -> list[dict]:
    return [line for line in lines_of(folder) if line["kind"] == "step"]


def evaluations_of(folder: Path) -> list[dict]:
    return [line for line in lines_of(folder) if line["kind"] == "evaluation"]


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)
