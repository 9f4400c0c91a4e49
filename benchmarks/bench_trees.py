"""An agent's dialogues as trees: rows computed and seconds of a training step, beside sharing of prompts, and flat.

    python benchmarks/bench_trees.py

Each sample of a prompt is a dialogue of ten turns whose thoughts are dropped before the next one, so that every turn is
a fork, with four sub-agents that begin with its first half. Three ways to compute the same update with one engine, in
turns:
  flat    every trajectory by itself
  prompt  what all of a group begin with is computed once, as most trainers can
  tree    what any of them begin with is
and the same for trajectories that have nothing in common. The step is forward, backward and AdamW, of random weights of
SmolLM2's sizes with fewer layers. Ratios are medians over repeats of times that stand side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path

import bench_train_step
import frame
import torch

from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.batch import packing
from megatron_rl.config import AlgorithmConfig, EngineConfig, ModelConfig, OptimizerConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.types import FinetuneSpec, TrajectoryBatch

WAYS = ("flat", "prompt", "tree")


def agents(args: argparse.Namespace, vocab: int) -> TrajectoryBatch:
    """The trajectories of one prompt's samples. Each generated token is trained once, as the agents' proxy has it."""
    generator = torch.Generator().manual_seed(0)
    made = lambda count: torch.randint(0, vocab, (count,), generator=generator)  # noqa: E731
    parts, trained, prompt = [], [], made(args.prompt)
    for _ in range(args.samples):
        context = prompt
        half = context
        for turn in range(args.turns):
            context = torch.cat([context, made(args.message)])
            thought, answer = made(args.thought), made(args.answer)
            parts.append(torch.cat([context, thought, answer]))
            trained.append(args.thought + args.answer)
            context = torch.cat([context, answer])
            half = context if turn == args.turns // 2 - 1 else half
        for _ in range(args.agents):
            parts.append(torch.cat([half, made(args.message + args.thought + args.answer)]))
            trained.append(args.thought + args.answer)
    return batch_of(parts, trained, torch.zeros(len(parts), dtype=torch.int64))


def strangers(args: argparse.Namespace, vocab: int) -> TrajectoryBatch:
    """As many tokens in trajectories of one group that have nothing in common."""
    like = agents(args, vocab)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, vocab, (length,), generator=generator) for length in like.lengths.tolist()]
    trained = [min(args.thought + args.answer, len(part) - 1) for part in parts]
    return batch_of(parts, trained, like["group"])


def batch_of(parts: list[torch.Tensor], trained: list[int], group: torch.Tensor) -> TrajectoryBatch:
    mask = torch.cat([torch.arange(len(p)) >= len(p) - count for p, count in zip(parts, trained, strict=True)])
    tokens = {
        "input_ids": torch.cat(parts).int(),
        "loss_mask": mask,
        "logprobs": torch.full(mask.shape, -11.0) * mask,
        "versions": torch.where(mask, 0, -1),
        "advantages": torch.randn(len(mask), generator=torch.Generator().manual_seed(2)),
    }
    cu_seqlens = torch.tensor([0, *map(len, parts)]).cumsum(0)
    return TrajectoryBatch(tokens, {"rewards": torch.zeros(len(parts)), "group": group}, cu_seqlens)


def of_prompts(batch: TrajectoryBatch, indices: torch.Tensor | None = None) -> torch.Tensor:
    """packing.beginnings where nothing but what all of a group begin with is seen. The batch is of one group."""
    found = BEGINNINGS(batch, indices)
    behind = found[:, 0] > 0
    found[behind, 1] = found[behind, 1].min() if behind.any() else 0
    return found


BEGINNINGS = packing.beginnings


def make_engine(folder: str, budget: int) -> MegatronEngine:
    config = EngineConfig(
        model=ModelConfig(path=folder, init="random"), optimizer=OptimizerConfig(lr=1e-6), tokens_per_microbatch=budget
    )
    engine = MegatronEngine(config)
    engine.initialize(None, FinetuneSpec(total_updates=1000))
    return engine.train()


def measure(engine: MegatronEngine, batch: TrajectoryBatch, repeats: int) -> dict[str, tuple[int, list[float]]]:
    """Return by way the rows that are computed, and the seconds of each repeat."""
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig()), by_row=True)
    config, found = engine.config, {}
    for repeat in range(repeats + 1):
        for way in WAYS:
            engine.config = dataclasses.replace(config, share_prompts=way != "flat")
            packing.beginnings = of_prompts if way == "prompt" else BEGINNINGS
            seconds = frame.seconds(lambda: engine.train_batch(batch, loss))
            if repeat == 0:  # warms up
                options = {"share_prompts": way != "flat", "final_rows": False}
                rows = sum(unit.rows for unit in packing.units(batch, config.tokens_per_microbatch, **options))
                found[way] = rows, []
            else:
                found[way][1].append(seconds)
    engine.config, packing.beginnings = config, BEGINNINGS
    return found


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--shape", choices=bench_train_step.SHAPES, default="135m")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--agents", type=int, default=4, help="sub-agents of each sample")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--message", type=int, default=40, help="tokens of what is said to the policy in a turn")
    parser.add_argument("--thought", type=int, default=60)
    parser.add_argument("--answer", type=int, default=20)
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=5)
    sizes = {
        "shape": "tiny",
        "layers": 2,
        "turns": 3,
        "agents": 1,
        "prompt": 8,
        "message": 3,
        "thought": 4,
        "answer": 2,
    }
    args = frame.arguments(parser, argv, **sizes, repeats=1)
    machine = frame.Machine()
    shape = bench_train_step.SHAPES[args.shape] | {"num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as folder:
        bench_train_step.write_model_folder(shape, Path(folder))
        engine = make_engine(folder, args.budget)
        print(f"{'trajectories':<14}{'way':<8}{'rows':>8}{'of flat':>9}{'seconds':>9}{'flat / way':>12}")
        for name, make in (("agents", agents), ("strangers", strangers)):
            batch = make(args, shape["vocab_size"])
            found = measure(engine, batch, args.repeats)
            rows_flat, times_flat = found["flat"]
            for way, (rows, times) in found.items():
                ratio = statistics.median(flat / own for flat, own in zip(times_flat, times, strict=True))
                of_flat, seconds = rows / rows_flat, statistics.median(times)
                print(f"{name:<14}{way:<8}{rows:>8}{of_flat:>9.3f}{seconds:>9.2f}{ratio:>11.2f}x")
        engine.destroy()
    print(f"{machine}, torch {torch.__version__}")


if __name__ == "__main__":
    frame.run(main)
