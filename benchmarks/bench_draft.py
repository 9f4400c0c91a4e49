"""Decoding ahead with a draft head: tokens per second with and without, and the parts that bound the gain.

    python benchmarks/bench_draft.py                        # a run of --steps trains the head first; half an hour
    python benchmarks/bench_draft.py --trained RUN/final    # or the folder of a run that has trained one

The run is `configs/demo.yaml` with `draft.kind=eagle` and replies of 1 to 64 tokens (the log-normal shape of
bench_vs_trl.py). Its table shows how many guesses were right while the head learned.

Then the embedded server's batcher generates the same 64 replies in turns: without a head, with the trained head, and
with the head as it was before the run. Replies are compared: they are the same, unless rounding decides between two
tokens. Times are wall time, and CPU time of this process, which is steadier on a machine that others use too.

The last table has the parts: a pass of the model over 1 to 4 tokens of each of 1, 4 and 16 sequences, the output layer
for them, and one guess. From these follows the share of right guesses that 1.3 times the tokens per second needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bench_vs_trl
import frame
import torch
from transformers import AutoTokenizer

from megatron_rl.tools.embedded_server import sampling
from megatron_rl.tools.embedded_server.batcher import Batcher
from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig
from megatron_rl.tools.embedded_server.drafting_decoder import DraftingDecoder
from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.sampling import SamplingParams
from megatron_rl.tools.embedded_server.transformer import Decoder, KVCache
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.draft_files import LAYER, PREFIX, shapes_for
from megatron_rl.weights.hf_files import RandomWeights
from megatron_rl.workflows.rendering import prompt_ids

MODEL = frame.ROOT / "models" / "smollm2-135m-instruct"
CONTEXT, LONG = 512, 256
CPU = torch.device("cpu")
GAIN = 1.3


class Generation(NamedTuple):
    wall_s: float
    cpu_s: float
    tokens: int
    passes: int
    """Passes over guesses."""
    right: int
    replies: list[list[int]]


def train_along(data: Path, folder: Path, args: argparse.Namespace) -> Path:
    """Run training with a head, and print how it learns. Return the trained folder."""
    overrides = bench_vs_trl.fixed_lengths_of(data, folder, args) | {
        "draft.kind": "eagle",
        "draft.tokens": args.guesses,
        "run.steps": args.steps,
    }
    command = [sys.executable, "-m", "megatron_rl.launch", frame.ROOT / "configs/demo.yaml"]
    bench_vs_trl.run_process([*command, *(f"{key}={value}" for key, value in overrides.items())], args.threads)
    print(f"{'step':>6}{'loss':>8}{'acceptance':>12}{'right per pass':>16}{'rollout s':>11}")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["kind"] == "step"]
    for number, step in enumerate(steps, 1):
        if number % max(1, len(steps) // 8) == 0 or number == 1:
            right = step.get("rollout/right_guesses", 0.0)
            print(
                f"{number:>6}{step['draft/loss']:>8.2f}{step['draft/acceptance']:>12.2f}{right:>16.2f}"
                f"{step['time/rollout']:>11.1f}"
            )
    return folder / "final"


def requests(tokenizer: Any, data: Path, seed: int, vocab: int) -> list[Request]:
    """Make a step's requests: 8 replies to each of 8 prompts, each as long as the prompt says."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    made = []
    for row in random.Random(seed).sample(rows, bench_vs_trl.PROMPTS):
        ids = [token % vocab for token in prompt_ids(tokenizer, row)]
        for tokens in row["reply_tokens"]:
            number = seed * 1000 + len(made)
            params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, sampling_seed=number)
            made.append(Request(rid=str(number), prompt=ids, params=params))
    return made


def generate(model: Decoder, asked: list[Request], guesses: int) -> Generation:
    batcher = Batcher(
        model,
        max_running_requests=len(asked),
        context_length=CONTEXT,
        max_total_tokens=len(asked) * CONTEXT,
        draft_tokens=guesses,
    )
    futures, thread = [batcher.submit(request) for request in asked], threading.Thread(target=batcher.run)
    wall, cpu = time.perf_counter(), time.process_time()
    thread.start()
    for future in futures:
        future.result()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    batcher.stop()
    thread.join()
    tokens, stats = sum(len(request.output) for request in asked), batcher.stats
    return Generation(wall, cpu, tokens, stats.guessed_passes, stats.right_guesses, [r.output for r in asked])


def give_first_head(model: DraftingDecoder, folder: Path) -> None:
    """Give a model the random head of a run that has made no step."""
    shapes = shapes_for(read_architecture(folder))
    source = RandomWeights(shapes, seed=1)
    for name, shape in shapes.items():
        model.write(f"{PREFIX}{name}", source.read(name, 0, 0, shape[0]).float())
    assert all(name.startswith(LAYER) for name in shapes)


def compare_generations(folder: Path, trained: Path, data: Path, args: argparse.Namespace) -> None:
    config, tokenizer = DecoderConfig.read(folder), AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "context_length": CONTEXT + args.guesses}
    sides: dict[str, Decoder] = {"no head": Decoder(config, **options)}
    sides["no head"].load(folder)
    for name in ("trained head", "first head"):
        sides[name] = head = DraftingDecoder(config, **options)
        for weight, tensor in sides["no head"].parameters.items():
            head.write(weight, tensor)
        give_first_head(head, trained)
    if (trained / "draft").is_dir():  # the policy of the run, too: its head has learned from it
        sides["trained head"].load(trained)
        for weight, tensor in sides["no head"].parameters.items():
            own = sides["trained head"].parameters[weight]
            tensor.copy_(own)
            sides["first head"].parameters[weight].copy_(own)
    found: dict[str, list[Generation]] = {name: [] for name in sides}
    for seed in range(args.rounds):
        for name, model in sides.items():
            asked = requests(tokenizer, data, seed, config.vocab_size)
            found[name].append(generate(model, asked, 0 if name == "no head" else args.guesses))
    plain = found["no head"]
    pairs = [
        pair
        for own in found.values()
        for one, other in zip(plain, own, strict=True)
        for pair in zip(one.replies, other.replies, strict=True)
    ]
    print(f"{sum(a == b for a, b in pairs)} of {len(pairs)} replies are those without a head")
    print(f"{'64 replies':<16}{'tokens/s':>10}{'faster, wall':>14}{'faster, CPU':>13}", end="")
    print(f"{'passes over guesses':>21}{'right per pass':>16}")
    for name, own in found.items():
        rate = statistics.median(one.tokens / one.wall_s for one in own)
        wall = statistics.median(p.wall_s / o.wall_s for p, o in zip(plain, own, strict=True))
        cpu = statistics.median(p.cpu_s / o.cpu_s for p, o in zip(plain, own, strict=True))
        passes, right = sum(one.passes for one in own), sum(one.right for one in own)
        print(f"{name:<16}{rate:>10.0f}{wall:>13.2f}x{cpu:>12.2f}x", end="")
        print(f"{passes / args.rounds:>21.0f}{right / max(passes, 1):>16.2f}")


def cpu_ms(repeats: int, work: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """Return the least CPU time of a call, in ms."""
    times = []
    for _ in range(repeats + 1):
        began = time.process_time()
        work(*arguments, **options)
        times.append(time.process_time() - began)
    return min(times[1:]) * 1e3


def share_needed(alone: float, whole: float, guesses: int) -> str:
    """Return the share of right guesses with which tokens arrive GAIN times as fast, or "none" if no share suffices.

    alone, whole: times of a pass without and with the guesses.
    """
    for percent in range(101):
        if sum((percent / 100) ** number for number in range(guesses + 1)) >= GAIN * whole / alone:
            return f"{percent / 100:.2f}"
    return "none"


def parts_of(model: DraftingDecoder, count: int, guesses: int, repeats: int) -> list[float]:
    """Return the CPU times in ms of a pass over `count` sequences: model, output layer, sampling, and all guesses."""
    cache = KVCache(model.config, torch.float32, CPU, has_draft=True)
    cache.resize(count, LONG, [])
    width, rows, at = 1 + guesses, list(range(count)), [LONG // 2] * count
    states = torch.randn(count * width, model.config.hidden_size)
    logits, params = model.logits(states), [SamplingParams()] * (count * width)
    keys = [sampling.key_of(1, row) for row in range(count * width)]

    def guess() -> None:
        found = model.draft([5] * count, states[:count], at, rows, cache)
        sampling.choose(model.guessed_logits(found), params[:count], keys[:count])

    return [
        cpu_ms(repeats, model.decode, [5] * (count * width), at, rows, cache, width=width),
        cpu_ms(repeats, model.logits, states),
        cpu_ms(repeats, sampling.sample, logits, params, keys),
        guesses * cpu_ms(repeats, guess),
    ]


def show_parts(folder: Path, args: argparse.Namespace) -> None:
    config = DecoderConfig.read(folder)
    model = DraftingDecoder(config, dtype=torch.float32, device=CPU, context_length=CONTEXT)
    model.draw()
    print(
        f"{'CPU ms of a pass':<18}{'guesses':>8}{'model':>8}{'output layer':>14}{'sampling':>10}{'guessing':>10}",
        end="",
    )
    print(f"{'in all':>8}{f'right for {GAIN}x':>16}")
    for count in (1, 4, 16):
        alone = 0.0
        for guesses in range(args.guesses + 1):
            parts = parts_of(model, count, guesses, args.repeats)
            alone = alone or sum(parts)
            needed = share_needed(alone, sum(parts), guesses) if guesses else ""
            print(f"{f'{count} sequences':<18}{guesses:>8}{parts[0]:>8.1f}{parts[1]:>14.1f}{parts[2]:>10.1f}", end="")
            print(f"{parts[3]:>10.1f}{sum(parts):>8.1f}{needed:>16}")


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--trained", type=Path, help="folder of a model with a head; by default a run makes one")
    parser.add_argument("--steps", type=int, default=60, help="steps of that run")
    parser.add_argument("--guesses", type=int, default=3, help="draft.tokens")
    parser.add_argument("--rounds", type=int, default=3, help="times that each side generates")
    parser.add_argument("--repeats", type=int, default=7, help="times that each part is measured")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = frame.arguments(parser, argv, model=frame.TINY, steps=0, rounds=1, repeats=1, threads=1)
    torch.set_num_threads(args.threads)
    print(f"{args.model.name}, float32, {args.threads} thread(s), {frame.Machine()}")
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder, frame.model_of(args, args.model) as model:
        data = Path(folder) / "prompts.jsonl"
        bench_vs_trl.write_prompts(data, "log-normal")
        trained = args.trained or (train_along(data, Path(folder) / "run", args) if args.steps else model)
        compare_generations(model, trained, data, args)
        show_parts(model, args)


if __name__ == "__main__":
    frame.run(main)
