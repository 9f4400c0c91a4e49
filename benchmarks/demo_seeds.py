"""Is the asynchronous demo as good as the synchronous one, and faster? Both, with several seeds, in one table.

    python benchmarks/demo_seeds.py     # three seeds, about 6 minutes on two cores that do nothing else

configs/demo.yaml and configs/demo_async.yaml in turn, so that what else the machine does meets both. Accuracy is that
of greedy replies to the 32 held-out sums after the last step; seconds and samples are of the training steps alone.

Within noise: the means of the two configs differ by no more than two standard errors. A mean's error is the larger of
two: that of drawing the held-out sums, sqrt(p (1 - p) / n) for n answers over all seeds (p with one right and one wrong
answer added, so that a perfect score has an error too), and that of drawing the seeds, their deviation / sqrt(seeds).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import frame

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["run.steps=1", "generation.n_samples=2", "batch.prompts_per_step=2", "run.threads_per_rank=1"]
QUICK += ["data.evaluation_args={split: held_out, count: 2}", "rollout.backend=embedded"]
CONFIGS = {"synchronous": "configs/demo.yaml", "asynchronous": "configs/demo_async.yaml"}


def run(config: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, float]:
    """Train in a process and a folder of its own; return what it scored and how long its steps took."""
    command = [sys.executable, "-m", "megatron_rl.train", config, *overrides]
    command += [f"run.seed={seed}", f"run.folder={folder}", "run.save_at_end=false"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{config}, seed {seed}, ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    first, *_, last = (line for line in lines if line["kind"] == "evaluation")
    return {
        "before": first["accuracy"],
        "accuracy": last["accuracy"],
        "answers": last["prompts"],
        "seconds": sum(step["time/step"] for step in steps),
        "samples": sum(step["batch/trajectories"] for step in steps),
    }


def standard_error(runs: list[dict[str, float]]) -> float:
    """Of the mean accuracy of these runs, by the rule above."""
    answers = sum(run["answers"] for run in runs)
    share = (sum(run["accuracy"] * run["answers"] for run in runs) + 1) / (answers + 2)
    of_sums = math.sqrt(share * (1 - share) / answers)
    of_seeds = statistics.stdev(run["accuracy"] for run in runs) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0
    return max(of_sums, of_seeds)


def main(argv: list[str] | None = None) -> int:
    parser = frame.parser(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of both configs, e.g. run.steps=3")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = frame.arguments(parser, argv, seeds=[1])
    with frame.tiny_model() if args.quick else contextlib.nullcontext() as model:
        args.overrides = [*QUICK, f"model.path={model}", *args.overrides] if args.quick else args.overrides
        return compare(args)


def compare(args: argparse.Namespace) -> int:
    """Train, print the table, and return 0 if the difference is noise."""
    machine = frame.Machine()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONFIGS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for name, config in CONFIGS.items():
                runs[name].append(run(config, seed, Path(folder) / f"{name}-seed-{seed}", args.overrides))
                print(f"{name}, seed {seed}: {runs[name][-1]}", file=sys.stderr, flush=True)

    settings = f" {' '.join(args.overrides)};" if args.overrides else ""
    print(f"SmolLM2-135M, single-digit addition;{settings} {machine}")
    seeds = "".join(f"{f'seed {seed}':>8}" for seed in args.seeds)
    print(
        f"{'':<14}{'before':>8}{seeds}{'mean':>8}{'spread':>8}{'error':>8}{'seconds':>9}{'samples/s':>11}{'ratio':>7}"
    )
    means, rates = {}, {}
    for name, rows in runs.items():
        scores = [row["accuracy"] for row in rows]
        means[name] = statistics.mean(scores)
        rates[name] = sum(row["samples"] for row in rows) / sum(row["seconds"] for row in rows)
        print(f"{name:<14}{rows[0]['before']:>8.3f}" + "".join(f"{score:>8.3f}" for score in scores), end="")
        print(f"{means[name]:>8.3f}{max(scores) - min(scores):>8.3f}{standard_error(rows):>8.3f}", end="")
        seconds = statistics.mean(row["seconds"] for row in rows)
        print(f"{seconds:>9.1f}{rates[name]:>11.1f}{rates[name] / rates['synchronous']:>7.2f}")
    difference = means["asynchronous"] - means["synchronous"]
    allowed = 2 * math.hypot(*map(standard_error, runs.values()))
    is_noise = abs(difference) <= allowed
    print(f"asynchronous - synchronous = {difference:+.3f}, two standard errors are {allowed:.3f}: ", end="")
    print("within noise" if is_noise else "NOT within noise")
    return int(not is_noise)


if __name__ == "__main__":
    frame.run(main)
