"""In how many steps does a model learn from a teacher, and in how many from rewards? Held-out accuracy by step.

    python benchmarks/bench_distillation.py     # three seeds, about 3 minutes on two cores that do nothing else

configs/demo.yaml (GRPO, at its own learning rate and at distillation's) and configs/demo_distillation.yaml in turn: one
model, one task, 64 replies a step. The teacher is the policy before each step, which reads the solved sum three times
in front of the prompt. The loss is the reverse KL divergence from it over the whole vocabulary. Accuracy is that of
greedy replies to the 32 held-out sums, before the first step and after each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import frame

LR = "optimizer.lr=3e-5"
"""Distillation's own."""
SIDES = {
    "GRPO": ["configs/demo.yaml"],
    "GRPO, 3e-5": ["configs/demo.yaml", LR],
    "distillation": ["configs/demo_distillation.yaml", LR],
}
QUICK = ["generation.n_samples=2", "batch.prompts_per_step=2", "run.threads_per_rank=1", "rollout.backend=embedded"]
QUICK += ["data.evaluation_args={split: held_out, count: 2}"]


def run(side: list[str], seed: int, folder: Path, overrides: list[str]) -> tuple[list[float], float]:
    """Train in a process of its own; return the accuracy after each step from 0 on, and a step's seconds."""
    command = [sys.executable, "-m", "megatron_rl.train", *side, "run.evaluate_every_steps=1", *overrides]
    command += [f"run.seed={seed}", f"run.folder={folder}", "run.save_at_end=false"]
    environment = os.environ | {"PYTHONPATH": str(frame.ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=frame.ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{side}, seed {seed}, ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["accuracy"] for line in lines if line["kind"] == "evaluation"}
    seconds = statistics.median(line["time/step"] for line in lines if line["kind"] == "step")
    return [found[step] for step in sorted(found)], seconds


def steps_to(score: float, curve: list[float]) -> int | None:
    """Return the first step whose accuracy is at least that, None where there is none."""
    return next((step for step, accuracy in enumerate(curve) if accuracy >= score), None)


def main(argv: list[str] | None = None) -> int:
    parser = frame.parser(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of both configs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--score", type=float, default=0.78, help="held-out accuracy whose first step is compared")
    args = frame.arguments(parser, argv, seeds=[1], steps=1)
    with frame.tiny_model() if args.quick else contextlib.nullcontext() as model:
        args.overrides = [f"run.steps={args.steps}", *args.overrides]
        args.overrides = [*QUICK, f"model.path={model}", *args.overrides] if args.quick else args.overrides
        return compare(args)


def compare(args: argparse.Namespace) -> int:
    """Train, print the curves, and return 0 if distillation has the score in fewer steps than GRPO with every seed."""
    machine = frame.Machine()
    curves: dict[str, list[list[float]]] = {name: [] for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for name, side in SIDES.items():
                curve, step_s = run(side, seed, Path(folder) / f"{name}-seed-{seed}", args.overrides)
                curves[name].append(curve)
                seconds[name].append(step_s)
                print(f"{name}, seed {seed}: {curve}", file=sys.stderr, flush=True)

    print(f"held-out accuracy by step; {machine}")
    reaches = f"{args.score:.2f} at"
    print(f"{'':<24}" + "".join(f"{step:>7}" for step in range(args.steps + 1)) + f"{reaches:>10}{'s/step':>8}")
    first: dict[str, list[int]] = {}
    for name, own in curves.items():
        steps = [steps_to(args.score, curve) for curve in own]
        first[name] = [args.steps + 1 if step is None else step for step in steps]
        for seed, curve, step, step_s in zip(args.seeds, own, steps, seconds[name], strict=True):
            row = f"{f'{name}, seed {seed}':<24}" + "".join(f"{accuracy:>7.3f}" for accuracy in curve)
            print(row + f"{'never' if step is None else step:>10}{step_s:>8.1f}")
        means = [statistics.mean(column) for column in zip(*own, strict=True)]
        print(f"{f'{name}, mean':<24}" + "".join(f"{mean:>7.3f}" for mean in means))
    is_faster = all(mine < min(others) for *others, mine in zip(*first.values(), strict=True))
    print(f"distillation is at {args.score:.2f} in fewer steps with {'every seed' if is_faster else 'NOT every seed'}")
    return int(not is_faster)


if __name__ == "__main__":
    frame.run(main)
