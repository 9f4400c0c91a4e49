"""What a checkpoint costs a run: seconds that training stands still, how slow it is meanwhile, and the way back.

    python benchmarks/bench_recovery.py     # one GPU: bf16, Llama-3.2-1B's sizes; no GPU: float32, SmolLM2-135M's

A step is forward, backward and AdamW of 64 short trajectories; medians. `standstill` is what training waits for because
of a checkpoint; the first one in the background also gets its memory, so a later one is shown too. `step` is a training
step while it is written, beside one with nothing else going on; `there after` counts from the beginning to its
appearance. The plain writer puts as many bytes into one file and fsyncs it: what the disk allows. Resuming compares
every file with its checksum first; a run does that once and then loads without.

The way back is that of a whole run, configs/demo.yaml with its embedded server, from the start of the process to the
first step that it trained: fresh, and with `--resume auto` in the same folder, in turn; medians.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import frame
import torch
from bench_train_step import SHAPES, WORKLOADS, make_batch, write_model_folder

from megatron_rl import platform
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig, EngineConfig, ModelConfig, OptimizerConfig
from megatron_rl.types import FinetuneSpec

ROOT = Path(__file__).resolve().parents[1]
BLOCK_BYTES = 16 * 1024 * 1024


def in_background(engine, step: Callable[[], object], path: Path) -> tuple[float, list[float], float]:
    """Return the standstill, the steps meanwhile, and the seconds until the checkpoint was there."""
    began = time.perf_counter()
    standstill, steps, is_there = frame.seconds(lambda: engine.save_async(path)), [], False
    while not is_there:
        steps.append(frame.seconds(step))
        looked = time.perf_counter()
        is_there = engine.finish_saves(wait=False)
        standstill += time.perf_counter() - looked
    return standstill, steps, time.perf_counter() - began


def write_plainly(path: Path, size: int) -> None:
    block = os.urandom(BLOCK_BYTES)
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, BLOCK_BYTES):
            file.write(block[: size - start])
        os.fsync(file.fileno())


def first_step(folder: Path, steps: int, *, resume: bool) -> tuple[float, float]:
    """Run the demo to the end of `steps` steps, the last two of them new.

    Return the seconds until the first of these was logged, and those that the checkpoint took of them.
    """
    settings = [f"run.folder={folder}", f"run.steps={steps}", "run.checkpoint_every_steps=2", "run.save_at_end=false"]
    settings += ["data.evaluation=", "rollout.backend=embedded", *(["--resume", "auto"] if resume else [])]
    launcher = [sys.executable, "-m", "megatron_rl.launch", "--exit-with", str(os.getpid())]
    log, first = folder / "metrics.jsonl", f'"step": {steps - 2},'
    began, took = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(
            [*launcher, "configs/demo.yaml", *settings], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        while run.poll() is None:
            if not took and log.exists() and first in log.read_text():
                took = time.perf_counter() - began
            time.sleep(0.02)
        output.seek(0)
        said = output.read()
    if run.returncode or not took:
        sys.exit(said)
    of_checkpoint = re.search(r"the checkpoint took ([\d.]+) s", said)
    return took, float(of_checkpoint[1]) if of_checkpoint else 0.0


def measure_starts(folder: Path, starts: int) -> str:
    fresh, resumed = [], []
    for number in range(starts):
        run = folder / f"run-{number}"
        fresh.append(first_step(run, 2, resume=False)[0])
        resumed.append(first_step(run, 4, resume=True))
    alone, (back, checkpoint) = (
        statistics.median(fresh),
        (statistics.median(column) for column in zip(*resumed, strict=True)),
    )
    return (
        f"{'from process to first step':<28}{'s':>8}{'beside fresh':>14}{'the checkpoint s':>18}\n"
        f"{'fresh':<28}{alone:>8.1f}{1.0:>14.2f}\n"
        f"{'resumed after step 2':<28}{back:>8.1f}{back / alone:>14.2f}{checkpoint:>18.1f} = {checkpoint / back:.0%}"
    )


def main(argv: list[str] | None = None) -> None:
    on_gpu = platform.has_cuda()
    parser = frame.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1b" if on_gpu else "135m")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the training process")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="of the demo, fresh and resumed; 0 leaves them out")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the file system to measure is")
    args = frame.arguments(parser, argv, shape="tiny", threads=1, steps=1, starts=0)
    from megatron_rl.engine.megatron_engine import MegatronEngine

    torch.set_num_threads(args.threads)
    machine = frame.Machine()
    with tempfile.TemporaryDirectory(prefix=".bench-recovery-", dir=args.folder) as name:
        folder, path = Path(name), Path(name) / "checkpoint"
        starts = measure_starts(folder.resolve(), args.starts) if args.starts else ""
        write_model_folder(SHAPES[args.shape], folder)
        model = ModelConfig(path=name, init="random", dtype="bfloat16" if on_gpu else "float32")
        engine = MegatronEngine(EngineConfig(model=model, optimizer=OptimizerConfig(lr=1e-6)))
        engine.initialize(None, FinetuneSpec(total_updates=1000))
        batch = make_batch(WORKLOADS["quick" if args.quick else "demo"], SHAPES[args.shape]["vocab_size"])
        loss = LogprobLoss(PolicyLoss(AlgorithmConfig()))

        def step() -> None:
            engine.train().train_batch(batch, loss)

        step()
        alone = statistics.median(frame.seconds(step) for _ in range(args.steps))
        background = [in_background(engine, step, path) for _ in range(2)]
        waiting = frame.seconds(lambda: engine.save(path, with_optimizer=True))
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        plain = frame.seconds(lambda: write_plainly(folder / "plain", size))
        checked, unchecked = (
            frame.seconds(lambda is_checked=is_checked: engine.load(path, with_optimizer=True, is_checked=is_checked))
            for is_checked in (False, True)
        )
    device = torch.cuda.get_device_name() if on_gpu else f"{args.threads} of {machine.cores}"
    print(
        f"{args.shape}, {size / 1e6:,.0f} MB, {device}, torch {torch.__version__}, {machine.state}\n\n"
        f"{'checkpoint':<28}{'standstill s':>14}{'step s':>9}{'beside alone':>14}{'there after s':>15}"
    )
    print(f"{'none':<28}{'':>14}{alone:>9.2f}{1.0:>14.2f}")
    print(f"{'training waits':<28}{waiting:>14.2f}{'':>23}{waiting:>15.1f}")
    for which, (standstill, steps, there) in zip(("first", "later"), background, strict=True):
        beside = statistics.median(steps)
        row = f"{standstill:>14.2f}{beside:>9.2f}{beside / alone:>14.2f}{there:>15.1f}"
        print(f"{f'in the background, {which}':<28}{row}")
    print(f"{'plain writer':<28}{'':>37}{plain:>15.1f}\n")
    print(f"loading: {checked:.1f} s with all checksums, {unchecked:.1f} s without\n\n{starts}")


if __name__ == "__main__":
    frame.run(main)
