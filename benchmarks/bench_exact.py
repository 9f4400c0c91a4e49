"""Cost of rollout.exact: steps of the same run with and without it, on a CPU.

    python benchmarks/bench_exact.py     # six layers of SmolLM2-135M's sizes

Each row is the median over the steps of whole runs (megatron_rl.train with an embedded server), which take turns,
without the first step of each. A step samples replies, trains on them and publishes. The weights are random, and the
replies have a fixed length. The last column is the share of the tokens whose log-probabilities have the same bits in
trainer and server.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import frame
import torch
from bench_train_step import SHAPES

from megatron_rl import ops

PARTS = ("time/step", "time/rollout", "time/update", "time/publish")


def write_model(shape: dict, folder: Path) -> None:
    """Write a model folder without weights, with the tokenizer of the task that counts ones."""
    shutil.copytree(frame.TINY, folder)
    sizes = {key: value for key, value in shape.items() if key != "vocab_size"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes | {"vocab_size": max(shape["vocab_size"], 64)}))


def run(model: Path, folder: Path, *, exact: bool, steps: int, tokens: int) -> list[dict]:
    """Return the metrics of each step of a run."""
    command = [sys.executable, "-m", "megatron_rl.train", str(frame.ROOT / "configs/count_grpo.yaml")]
    command += [f"model.path={model}", f"run.folder={folder}", f"run.steps={steps}", "run.save_at_end=false"]
    command += ["warm_start.updates=0", "data.evaluation=", "run.evaluate_every_steps=0", "rollout.server_count=1"]
    command += ["batch.prompts_per_step=8", "generation.n_samples=8", "batch.updates_per_step=1"]
    command += [f"generation.max_new_tokens={tokens}", "generation.ignore_eos=true"]
    command += [f"run.threads_per_rank={os.cpu_count()}"]
    command += ["run.checkpoint_every_steps=0", f"rollout.exact={str(exact).lower()}", "rollout.backend=embedded"]
    done = subprocess.run(command, cwd=frame.ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"a run with rollout.exact={exact} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"][1:]


def main(argv=None):
    parser = frame.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each reply")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    args = frame.arguments(parser, argv, repeats=1, steps=2, tokens=4, shape="tiny", layers=2)
    machine, found = frame.Machine(), defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        write_model(SHAPES[args.shape] | {"num_hidden_layers": args.layers}, model)
        for number in range(args.repeats):
            for exact in (False, True):
                steps = run(model, Path(name) / f"{number}-{exact}", exact=exact, steps=args.steps, tokens=args.tokens)
                found[exact] += steps
    print_table(args, found, machine)


def print_table(args, found: dict[bool, list[dict]], machine: frame.Machine) -> None:
    """Print a row for the steps without rollout.exact, and one for those with it."""
    kind = torch.ops.megatron_rl.instruction_set()
    print(f"{args.layers} layers of {args.shape}, 64 replies of {args.tokens} tokens a step, {kind}, {machine}\n")
    print("| rollout.exact | step s | sampling s | update s | publication s | times a step without | equal bits |")
    print("|---|---|---|---|---|---|---|")
    medians = {
        exact: [statistics.median(step[part] for step in steps) for part in PARTS] for exact, steps in found.items()
    }
    for exact, times in medians.items():
        equal = statistics.mean(step["mismatch/equal"] for step in found[exact])
        cells = [*(f"{time:.2f}" for time in times), f"{times[0] / medians[False][0]:.2f}", f"{equal:.3f}"]
        print(f"| {str(exact).lower()} | {' | '.join(cells)} |")


if __name__ == "__main__":
    assert ops is not None  # loads the operators, one of which names the instruction set
    frame.run(main)
