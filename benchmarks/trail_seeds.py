"""Do models learn to call a tool ten times in a row, and what do trees save there? Three seeds of both trail configs.

    python benchmarks/trail_seeds.py     # about 20 minutes on two cores that do nothing else

configs/trail_grpo.yaml (0.1 million parameters, from a short warm start) and configs/trail_smollm2.yaml. Each call
opens the box that the note in the one before names, and earns a tenth. Dialogues of a group that open the same boxes
are the same tokens. Each seed is trained twice: with batch.share_prompts, which computes once what several dialogues of
a group begin with, and without.

  first, last      mean reward of sampled dialogues in the first three steps and in the last three
  before, after    reward of greedy dialogues over held-out trails
  rows, computed   rows of all steps, and the part of them that is left where common beginnings are computed once
  step             median seconds of a step, with sharing and flat; pass those of its log-probabilities and updates
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import frame

CONFIGS = {"0.1 M": "configs/trail_grpo.yaml", "SmolLM2-135M": "configs/trail_smollm2.yaml"}
GAIN = 0.25
"""Least difference between last and first rewards that counts as learned."""
EDGE = 3
"""Steps at a run's beginning and end whose rewards are averaged."""
QUICK = ["run.steps=1", "generation.n_samples=2", "batch.prompts_per_step=2", "rollout.backend=embedded"]
QUICK += ["data.evaluation_args={split: held_out, count: 2}", "warm_start.updates=1"]


def train(rows_file: str, arguments: list[str]) -> None:
    """Train in this process, and write each step's rows, flat and with common beginnings computed once."""
    from megatron_rl import train
    from megatron_rl.batch import packing
    from megatron_rl.run.rl_run import RLRun

    rows: list[list[int]] = []
    next_batch = RLRun.next_batch

    def counted(self: RLRun, step: int):
        batch = next_batch(self, step)
        if batch is not None:
            budget = self.config.batch.tokens_per_microbatch
            ways = ({"share_prompts": shared, "final_rows": False} for shared in (False, True))
            rows.append([sum(unit.rows for unit in packing.units(batch.own(), budget, **way)) for way in ways])
        return batch

    RLRun.next_batch = counted
    train.main(arguments)
    Path(rows_file).write_text(json.dumps(rows))


def run(config: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, float]:
    """Train in a process and a folder of its own; return what it scored, its rows, and how long its steps took."""
    settings = [f"run.seed={seed}", f"run.folder={folder}", "run.save_at_end=false", "run.evaluate_every_steps=0"]
    command = [sys.executable, __file__, "--train", str(folder) + ".json", config, *settings, *overrides]
    environment = os.environ | {"PYTHONPATH": str(frame.ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=frame.ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{config}, seed {seed}, ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    first, *_, last = (line for line in lines if line["kind"] == "evaluation")
    flat, shared = (sum(column) for column in zip(*json.loads(Path(f"{folder}.json").read_text()), strict=True))
    return {
        "first": statistics.mean(step["reward/mean"] for step in steps[:EDGE]),
        "last": statistics.mean(step["reward/mean"] for step in steps[-EDGE:]),
        "before": reward_of(first),
        "after": reward_of(last),
        "rows": flat,
        "computed": shared / flat,
        "step": statistics.median(step["time/step"] for step in steps),
        "pass": statistics.median(step["time/update"] + step.get("time/logprobs", 0.0) for step in steps),
    }


def reward_of(evaluation: dict[str, float]) -> float:
    """Where every dialogue is right, or none, its name is accuracy."""
    return evaluation["reward/mean"] if "reward/mean" in evaluation else evaluation["accuracy"]


def main(argv: list[str] | None = None) -> int:
    parser = frame.parser(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of both configs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = frame.arguments(parser, argv, seeds=[1])
    if args.quick:
        with frame.tiny_model() as model:
            return compare(args, {name: [*QUICK, f"model.path={model}", "model.init=random"] for name in CONFIGS})
    return compare(args, {name: [] for name in CONFIGS})


def compare(args: argparse.Namespace, overrides: dict[str, list[str]]) -> int:
    """Train, print the table, and return 0 if every seed of both has learned."""
    machine = frame.Machine()
    found: dict[str, list[tuple[int, dict[str, float], dict[str, float]]]] = {name: [] for name in CONFIGS}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in CONFIGS.items():
            for seed in args.seeds:
                own = [*overrides[name], f"warm_start.folder={folder}/warm-{name}-{seed}", *args.overrides]
                ways = []
                for shared in ("true", "false"):
                    place = Path(folder) / f"{name}-{seed}-{shared}"
                    ways.append(run(config, seed, place, [*own, f"batch.share_prompts={shared}"]))
                    print(f"{name}, seed {seed}, shared {shared}: {ways[-1]}", file=sys.stderr, flush=True)
                found[name].append((seed, *ways))

    print(f"ten calls of a tool in a row, {len(args.seeds)} seed(s); {machine}")
    print(f"{'':<14}{'seed':>5}{'first':>7}{'last':>7}{'before':>8}{'after':>7}{'rows':>9}{'computed':>10}", end="")
    print(f"{'step':>8}{'flat':>7}{'pass':>8}{'flat':>7}")
    for name, seeds in found.items():
        for seed, shared, flat in seeds:
            print(f"{name:<14}{seed:>5}{shared['first']:>7.3f}{shared['last']:>7.3f}", end="")
            print(
                f"{shared['before']:>8.3f}{shared['after']:>7.3f}{shared['rows']:>9}{shared['computed']:>10.3f}", end=""
            )
            print(f"{shared['step']:>8.2f}{flat['step']:>7.2f}{shared['pass']:>8.2f}{flat['pass']:>7.2f}")
    runs = [way for seeds in found.values() for _, *ways in seeds for way in ways]
    learned = sum(way["last"] >= way["first"] + GAIN for way in runs)
    print(f"{learned} of {len(runs)} runs end {GAIN} above their beginning, or more")
    return int(learned < len(runs))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], sys.argv[3:])
    else:
        frame.run(main)
