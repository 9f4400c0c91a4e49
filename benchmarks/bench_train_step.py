"""One training step (forward, backward, AdamW) of MegatronEngine beside the same model in transformers with padding.

    python benchmarks/bench_train_step.py     # one GPU: bf16, Llama-3.2-1B's sizes; no GPU: float32, SmolLM2-135M's

Each side is a process of its own, in turns, with random weights, the same trajectories, the clipped loss and the same
limit of tokens per forward pass, padding included. The other side is what Hugging Face trainers do: sequences in their
order, padded on the right to the longest of the pass, logits of the reply positions, log_softmax, torch's fused AdamW;
on a GPU float32 weights under bf16 autocast. tokens/s and FLOPs count real tokens only: prompts and replies of every
trajectory, no padding. The last column compares with the fastest matrix product that either process measured. Memory is
the process's resident high-water mark, on a GPU the allocator's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import frame
import torch

import megatron_rl
from megatron_rl import platform
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig, EngineConfig, ModelConfig, OptimizerConfig
from megatron_rl.types import FinetuneSpec, TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.decoder import Architecture

SHAPES = {
    # Llama-3.2-1B's sizes
    "1b": dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    | dict(intermediate_size=8192, vocab_size=128256),
    # SmolLM2-135M's sizes
    "135m": dict(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    | dict(intermediate_size=1536, vocab_size=49152),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    | dict(intermediate_size=128, vocab_size=512),
}
CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`groups` prompts with `samples` replies each. Reply lengths are log-normal; sigma None draws them uniformly."""

    groups: int
    samples: int
    prompt: int
    longest: int
    median: float = 0.0
    sigma: float | None = None


WORKLOADS = {
    "quick": Workload(groups=2, samples=2, prompt=4, longest=4),
    "demo": Workload(groups=8, samples=8, prompt=16, longest=4),
    "log-normal": Workload(groups=8, samples=8, prompt=16, longest=128, median=24, sigma=1.0),
    "long": Workload(groups=16, samples=8, prompt=128, longest=CONTEXT - 128, median=600, sigma=0.9),
}


def write_model_folder(shape: dict, folder: Path) -> None:
    config = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_batch(workload: Workload, vocab: int) -> TrajectoryBatch:
    """The same trajectories on both sides; those of one group share their prompt."""
    generator = torch.Generator().manual_seed(0)
    replies = workload.groups * workload.samples
    if workload.sigma is None:
        lengths = torch.randint(1, workload.longest + 1, (replies,), generator=generator)
    else:
        scale = torch.randn(replies, generator=generator) * workload.sigma
        lengths = (workload.median * scale.exp()).long().clamp(1, workload.longest)
    ids, mask, group = [], [], torch.arange(workload.groups).repeat_interleave(workload.samples)
    prompts = torch.randint(0, vocab, (workload.groups, workload.prompt), generator=generator)
    for number, length in zip(group.tolist(), lengths.tolist(), strict=True):
        ids += [prompts[number], torch.randint(0, vocab, (length,), generator=generator)]
        mask += [torch.zeros(workload.prompt, dtype=torch.bool), torch.ones(length, dtype=torch.bool)]
    loss_mask = torch.cat(mask)
    tokens = {
        "input_ids": torch.cat(ids),
        "loss_mask": loss_mask,
        "logprobs": torch.full(loss_mask.shape, -11.0) * loss_mask,
        "versions": torch.where(loss_mask, 0, -1),
        "advantages": torch.randn(len(loss_mask), generator=generator),
    }
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + workload.prompt).cumsum(0)])
    return TrajectoryBatch(tokens, {"rewards": torch.zeros(replies), "group": group}, cu_seqlens)


def megatron_step(folder: str, batch: TrajectoryBatch, budget: int):
    """A function that takes one step."""
    from megatron_rl.engine.megatron_engine import MegatronEngine

    dtype = "bfloat16" if platform.has_cuda() else "float32"
    config = EngineConfig(
        model=ModelConfig(path=folder, init="random", dtype=dtype),
        optimizer=OptimizerConfig(lr=1e-6),
        tokens_per_microbatch=budget,
    )
    engine = MegatronEngine(config)
    engine.initialize(None, FinetuneSpec(total_updates=1000))
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig()), by_row=True)
    engine.train()
    return lambda: engine.train_batch(batch, loss)


def transformers_step(folder: str, batch: TrajectoryBatch, budget: int):
    """The same with padding. Prompts have one length, so replies begin in the same column."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device, has_cuda = platform.device(), platform.has_cuda()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    options, trained = AlgorithmConfig(), int(batch["loss_mask"].sum())
    passes = [pad(batch.select(part)).to(device) for part in padded_passes(batch.lengths.tolist(), budget)]

    def step() -> None:
        for rows in passes:
            ids, mask = rows.ids, rows.mask[:, 1:]
            keep = int(mask.any(0).sum())
            with torch.autocast("cuda", torch.bfloat16, enabled=has_cuda):
                logits = model(ids, attention_mask=rows.attends, logits_to_keep=keep + 1).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, -keep:, None])[..., 0]
            ratio = (logprobs - rows.logprobs[:, -keep:]).exp()
            advantages = rows.advantages[:, -keep:]
            clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
            loss = torch.maximum(-advantages * ratio, -advantages * clipped)
            (loss.masked_fill(~mask[:, -keep:], 0.0).sum() / trained).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass
class Padded:
    """`[B, L]` each."""

    ids: torch.Tensor
    attends: torch.Tensor
    mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor

    def to(self, device: torch.device) -> Padded:
        return Padded(*(value.to(device) for value in vars(self).values()))


def pad(batch: TrajectoryBatch) -> Padded:
    keys = ("input_ids", "loss_mask", "logprobs", "advantages")
    sizes = batch.lengths.tolist()
    ids, mask, logprobs, advantages = (
        torch.nn.utils.rnn.pad_sequence(batch[key].split(sizes), batch_first=True) for key in keys
    )
    attends = (torch.arange(ids.shape[1]) < batch.lengths[:, None]).long()
    return Padded(ids, attends, mask, logprobs, advantages)


def padded_passes(lengths: list[int], budget: int) -> list[list[int]]:
    """Consecutive sequences, as many as fit into `budget` tokens when padded to the longest of them."""
    passes: list[list[int]] = [[]]
    longest = 0
    for index, length in enumerate(lengths):
        if passes[-1] and max(longest, length) * (len(passes[-1]) + 1) > budget:
            passes.append([])
            longest = 0
        passes[-1].append(index)
        longest = max(longest, length)
    return passes


SIDES = {"transformers": transformers_step, "megatron_rl": megatron_step}


def model_flops(arch: Architecture, batch: TrajectoryBatch) -> float:
    """Multiply-adds counted twice, forward once and backward twice; the head on trained rows only, attention causal."""
    h, q, kv = arch.hidden, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    per_layer = h * (q + 2 * kv) + q * h + 3 * h * arch.ffn
    linear = 6 * per_layer * arch.layers * int(batch.cu_seqlens[-1])
    attention = 6 * arch.layers * q * float((batch.lengths.double() ** 2).sum())
    return linear + attention + 6 * arch.vocab * h * int(batch["loss_mask"].sum())


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """FLOP/s of a square matrix product, the median of ten."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = [frame.seconds(lambda: a @ b) for _ in range(13)][3:]
    return 2 * size**3 / statistics.median(times)


def peak_memory_bytes() -> int:
    if platform.has_cuda():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_side(args: argparse.Namespace) -> dict:
    """One process: warm up, take the steps, and say how long each took."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(SHAPES[args.shape], Path(folder))
        arch = read_architecture(folder)
        batch = make_batch(WORKLOADS[args.workload], arch.vocab)
        step = SIDES[args.side](folder, batch, args.tokens_per_microbatch)
        for _ in range(2):
            step()
        times = [frame.seconds(step) for _ in range(args.steps)]
        peak = peak_memory_bytes()
        microbatches = -(-int(batch.cu_seqlens[-1]) // args.tokens_per_microbatch)  # it takes no fewer
        beside = device_costs(step, microbatches) if args.side == "megatron_rl" and platform.has_cuda() else {}
    dtype, size = (torch.bfloat16, 8192) if platform.has_cuda() else (torch.float32, 1024)
    return {
        "times": times,
        "memory": peak,
        "flops": model_flops(arch, batch),
        "tokens": int(batch.cu_seqlens[-1]),
        "matmul": matmul_rate(dtype, platform.device(), size),
        "beside": beside,
    }


COSTS = ("waits", "own waits", "copies a microbatch")


def device_costs(step: Callable[[], object], microbatches: int) -> dict[str, Any]:
    """Count a step's host waits (all, by line, and those in our own lines) and its copies to the device."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    waits = [told_of for told_of in told if "synchronizing CUDA operation" in str(told_of.message)]
    places = Counter(f"{told_of.filename}:{told_of.lineno}" for told_of in waits)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    copies = sum(event.name.startswith("Memcpy HtoD") for event in trace.events())
    folder = str(Path(megatron_rl.__file__).parent)
    own = sum(count for place, count in places.items() if place.startswith(folder))
    found = {"waits": len(waits), "own waits": own, "copies a microbatch": copies / microbatches}
    return found | {"waits by line": dict(places.most_common())}


def run_side(side: str, workload: str, args: argparse.Namespace) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "--side", side, "--workload", workload, "--shape", args.shape]
    command += ["--steps", str(args.steps), "--tokens-per-microbatch", str(args.tokens_per_microbatch)]
    command += ["--threads", str(args.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> None:
    has_cuda = platform.has_cuda()
    parser = frame.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1b" if has_cuda else "135m")
    default = ["long"] if has_cuda else ["demo", "log-normal"]
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=default)
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384 if has_cuda else 2048)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side, in turns")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="file for what a step has beside its computing, on a GPU")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # what a child process is to measure
    parser.add_argument("--workload", choices=WORKLOADS, help=argparse.SUPPRESS)
    args = frame.arguments(parser, argv, shape="tiny", tokens_per_microbatch=64, steps=1, rounds=1, threads=1)
    if args.side is not None:
        print(json.dumps(measure_side(args)))
        return
    args.workloads = ["quick"] if args.quick else args.workloads

    machine = frame.Machine()
    where = torch.cuda.get_device_name() if has_cuda else f"{args.threads} threads of {machine.cores}"
    rows = []
    for workload in args.workloads:
        results: dict[str, list[dict]] = {side: [] for side in SIDES}
        for _ in range(args.rounds):
            for side in SIDES:
                results[side].append(run_side(side, workload, args))
        base, matmul = None, max(run["matmul"] for runs in results.values() for run in runs)
        for side, runs in results.items():
            times = [t for run in runs for t in run["times"]]
            median, tokens = statistics.median(times), runs[0]["tokens"]
            memory, rate = max(run["memory"] for run in runs), runs[0]["flops"] / median
            base = base or (median, memory)
            rows.append(
                f"| {workload} | {tokens:,} | {side} | {median:.2f} ({min(times):.2f}-{max(times):.2f}) | "
                f"{tokens / median:,.0f} | {base[0] / median:.2f} | {memory / 2**30:.2f} | {memory / base[1]:.2f} | "
                f"{rate / 1e12:.3f} | {rate / matmul:.0%} |"
            )
    dtype = "bfloat16" if has_cuda else "float32"
    print(
        f"{args.shape}, {dtype}, {where}, torch {torch.__version__}, {args.tokens_per_microbatch} tokens a pass, "
        f"median of {args.steps * args.rounds} steps, {machine.state}\n"
    )
    print("| workload | tokens | side | s/step (range) | tokens/s | ratio | peak GiB | ratio | TFLOP/s | of matmul |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    if beside := results["megatron_rl"][-1]["beside"]:
        by_line = beside["waits by line"]
        print(f"\nA step of megatron_rl: {', '.join(f'{beside[name]:g} {name}' for name in beside if name in COSTS)}.")
        print("".join(f"- {count} waits at {place}\n" for place, count in by_line.items()), end="")
    if args.json is not None:
        args.json.write_text(json.dumps(beside) + "\n")


if __name__ == "__main__":
    frame.run(main)
