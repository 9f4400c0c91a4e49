"""Seconds of a whole GRPO step, megatron_rl beside TRL's GRPOTrainer: the same model, prompts and reply lengths.

    make bench-trl        # TRL goes into an environment of its own; or, with one that exists:
    python benchmarks/bench_vs_trl.py --trl-python TRL_ENVIRONMENT/bin/python

A step is 8 prompts x 8 samples in float32 on all cores: generation, rewards, one AdamW update, no KL term. Each side
is a process of its own, run in turns; ours is `megatron_rl.launch configs/demo.yaml` with the embedded server, and its
weight publication counts. Both sides sample at temperature 1. The length of every reply is drawn beforehand, so both
generate the same number of tokens in every step: our requests ignore the end of sequence, TRL's sampler forbids it
until the reply's last token and then demands it. Shapes: `demo`, 4 tokens each; `log-normal`, 1 to 64 tokens (median
16, sigma 0.8).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import frame

from megatron_rl.data.tasks import addition

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, SAMPLES, LONGEST = 8, 8, 64
LR = 1e-5
WARM_UP = 1
"""Steps of each process that are left out."""


def reply_lengths(shape: str, rng: random.Random) -> list[int]:
    if shape == "demo":
        return [4] * SAMPLES
    return [min(LONGEST, max(1, round(16 * rng.lognormvariate(0, 0.8)))) for _ in range(SAMPLES)]


def write_prompts(path: Path, shape: str) -> None:
    rng = random.Random(f"lengths {shape}")
    rows = addition()[: 8 * PROMPTS]
    path.write_text("".join(json.dumps(row | {"reply_tokens": reply_lengths(shape, rng)}) + "\n" for row in rows))


def fixed_lengths_of(data: Path, folder: Path, args: argparse.Namespace) -> dict[str, object]:
    """Return the overrides with which a run makes replies of the lengths in `data`."""
    return {
        "model.path": args.model.resolve(),
        "rollout.backend": "embedded",
        "run.import_from": "[fixed_lengths]",
        "rollout.workflow": "fixed_lengths:FixedLengths",
        "data.train": data,
        "data.train_args": "{}",
        "data.evaluation": "",
        "data.evaluation_args": "{}",
        "generation.stop": "[]",
        "run.folder": folder,
        "run.threads_per_rank": args.threads,
    }


def run_ours(data: Path, folder: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    overrides = fixed_lengths_of(data, folder, args) | {
        "data.shuffle": "false",
        "generation.n_samples": SAMPLES,
        "batch.prompts_per_step": PROMPTS,
        "optimizer.lr": LR,
        "run.steps": WARM_UP + args.steps,
        "run.save_at_end": "false",
        "run.seed": 1,
    }
    command = [sys.executable, "-m", "megatron_rl.launch", ROOT / "configs/demo.yaml"]
    run_process([*command, *(f"{key}={value}" for key, value in overrides.items())], args.threads)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {"tokens": line["batch/trained_tokens"]}
        | {key.removeprefix("time/"): value for key, value in line.items() if key.startswith("time/")}
        for line in lines
        if line["kind"] == "step"
    ]


def run_trl(data: Path, folder: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    folder.mkdir()
    settings = {
        "model": str(args.model.resolve()),
        "data": str(data),
        "folder": str(folder),
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "longest": LONGEST,
        "lr": LR,
        "steps": WARM_UP + args.steps,
        "threads": args.threads,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    output = run_process([args.trl_python, ROOT / "benchmarks/trl_grpo.py", folder / "settings.json"], args.threads)
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]


def run_process(command: list, threads: int) -> str:
    """Run it to the end and return what it printed; its error stream goes to ours where it fails."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run([str(part) for part in command], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command[:3]))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians over steps, of the phases too."""
    return {key: statistics.median(step[key] for step in steps) for key in steps[0]}


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2-135m-instruct")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl/bin/python", help="TRL's interpreter")
    parser.add_argument("--shapes", nargs="+", choices=["demo", "log-normal"], default=["demo", "log-normal"])
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side, in turns")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = frame.arguments(parser, argv, shapes=["demo"], steps=1, rounds=1)
    if not args.trl_python.exists():
        parser.error(f"--trl-python {args.trl_python}: is not there; `make bench-trl` installs it")

    machine, rows = frame.Machine(), []
    for shape in args.shapes:
        steps: dict[str, list[dict[str, float]]] = {"TRL": [], "megatron_rl": []}
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "prompts.jsonl"
            write_prompts(data, shape)
            for turn in range(args.rounds):
                for side, run in (("TRL", run_trl), ("megatron_rl", run_ours)):
                    measured = run(data, Path(folder) / f"{side}-{turn}", args)[WARM_UP:]
                    steps[side] += measured
                    shown = ", ".join(f"{step['step']:.2f}" for step in measured)
                    print(f"{shape}, {side}: {shown} s", flush=True)
        assert [s["tokens"] for s in steps["TRL"]] == [s["tokens"] for s in steps["megatron_rl"]]
        rows.append((shape, summary(steps["TRL"]), summary(steps["megatron_rl"])))

    print(
        f"SmolLM2-135M, {PROMPTS} prompts x {SAMPLES} samples, float32, {args.threads} threads of {machine.cores}, "
        f"median of {args.steps * args.rounds} steps, {machine.state}"
    )
    print(f"{'':<12}{'tokens':>7}{'TRL s/step':>12}{'generation':>12}{'ours s/step':>13}{'generation':>12}", end="")
    print(f"{'update':>9}{'publish':>9}{'TRL / ours':>12}")
    for shape, trl, ours in rows:
        print(
            f"{shape:<12}{ours['tokens']:>7.0f}{trl['step']:>12.2f}{trl['rollout']:>12.2f}{ours['step']:>13.2f}", end=""
        )
        print(f"{ours['rollout']:>12.2f}{ours['update']:>9.2f}{ours['publish']:>9.2f}", end="")
        print(f"{trl['step'] / ours['step']:>12.2f}")


if __name__ == "__main__":
    frame.run(main)
