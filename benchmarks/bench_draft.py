"""Tokens per second of the embedded server with and without a draft head, by the number of requests.

    python benchmarks/bench_draft.py MODEL

The server first samples replies without a head. A new head learns from them, a few hundred tokens an update, as it
would in a run of RL whose policy stands still. Then both sides answer prompts that the head has not seen, in turns. The
last line has replies whose lengths are log-normal, so that few requests run most of the time.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import frame
import torch

from megatron_rl import platform

TOPICS = (
    "a river",
    "the moon",
    "bread",
    "chess",
    "a lost key",
    "rain",
    "trains",
    "honey",
    "glass",
    "winter",
    "salt",
    "maps",
)
ASKED = (
    "Write a short story about {}.", "Explain {} to a child.", "Give three facts about {}.", "Write a poem about {}.",
    "Why do people care about {}?", "Describe {} in one paragraph.", "Write a letter about {}.", "How is {} made?",
)  # fmt: skip
HELD_OUT = 16
"""Prompts that the head does not learn from."""


def prompts_of(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [asked.format(topic) for topic in TOPICS for asked in ASKED]
    if tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in texts]
    turns = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]


class Side:
    """A server in this process; draft_tokens = 0 has no head."""

    def __init__(self, folder: Path, draft_tokens: int, tokens_per_pass: int) -> None:
        from megatron_rl.tools.embedded_server.batcher import Batcher
        from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig
        from megatron_rl.tools.embedded_server.drafting_decoder import DraftingDecoder
        from megatron_rl.tools.embedded_server.transformer import Decoder

        made_by = DraftingDecoder if draft_tokens else Decoder
        config, cpu = DecoderConfig.read(folder), torch.device("cpu")
        model = made_by(config, dtype=torch.float32, device=cpu, context_length=512 + draft_tokens)
        model.load(folder)
        self.batcher = Batcher(
            model,
            max_running_requests=64,
            context_length=512,
            max_total_tokens=64 * 512,
            draft_tokens=draft_tokens,
            tokens_per_pass=tokens_per_pass,
        )
        threading.Thread(target=self.batcher.run, daemon=True).start()

    def answer(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        from megatron_rl.tools.embedded_server.request import Request
        from megatron_rl.tools.embedded_server.sampling import SamplingParams

        requests = [
            Request(
                rid=str(n),
                prompt=prompt,
                params=SamplingParams(max_new_tokens=length, ignore_eos=True, sampling_seed=n),
            )
            for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        self.batcher.flush().result()
        return [future.result().output for future in [self.batcher.submit(request) for request in requests]]


@contextlib.contextmanager
def with_head(folder: Path, prompts: list[list[int]], replies: list[list[int]], updates: int) -> Iterator[Path]:
    """Train a head on the replies, and yield a folder with the model and the head."""
    from megatron_rl.config import DraftConfig, EngineConfig, ModelConfig
    from megatron_rl.engine.megatron_engine import MegatronEngine
    from megatron_rl.types import FinetuneSpec, Trajectory, TrajectoryBatch

    model = ModelConfig(path=str(folder), transformer_impl="local")
    engine = MegatronEngine(EngineConfig(model=model, draft=DraftConfig(kind="eagle"), tokens_per_microbatch=1024))
    engine.initialize(None, FinetuneSpec(total_updates=1))
    rows = [
        Trajectory(
            input_ids=torch.tensor(prompt + reply),
            loss_mask=torch.arange(len(prompt + reply)) >= len(prompt),
            logprobs=torch.zeros(len(prompt + reply)),
            versions=torch.where(torch.arange(len(prompt + reply)) >= len(prompt), 0, -1),
            reward=0.0,
        )
        for prompt, reply in zip(prompts, replies, strict=True)
    ]

    def last_stage(hidden, microbatch, packed):
        engine.draft.learn(hidden, microbatch, packed, engine._head, engine._embedding())
        return hidden.sum() * 0.0, torch.ones((), dtype=torch.int), None

    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    for update in range(updates):
        chosen = [order[(8 * update + n) % len(order)] for n in range(min(8, len(order)))]
        batch = TrajectoryBatch.from_trajectories([[rows[n] for n in chosen]])
        with torch.no_grad():
            engine._run(engine._pack(batch, final_rows=False), last_stage, forward_only=True)
        engine.draft.step()
        if update % max(1, updates // 6) == 0 or update == updates - 1:
            found = engine.draft.metrics()
            print(f"  update {update:3}: loss {found['draft/loss']:.2f}, acceptance {found['draft/acceptance']:.2f}")
    with tempfile.TemporaryDirectory() as name:
        engine.save(name)
        yield Path(name)
    engine.destroy()


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a reply (default 64)")
    parser.add_argument("--updates", type=int, default=48, help="updates of the head (default 48)")
    parser.add_argument("--guesses", type=int, default=3, help="draft.tokens (default 3)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="running at once")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default 3)")
    args = frame.arguments(parser, argv, tokens=8, updates=2, requests=[1, 2], repeats=1)
    platform.prepare()
    machine = frame.Machine()
    with frame.model_of(args, args.model) as folder:
        prompts = prompts_of(folder)
        taught, asked = prompts[HELD_OUT:], prompts[:HELD_OUT]
        plain = Side(folder, 0, 0)
        replies = plain.answer(taught, [args.tokens] * len(taught))
        print(f"{folder.name}, {args.tokens} tokens, {args.guesses} guesses, {machine}")
        with with_head(folder, taught, replies, args.updates) as trained:
            compare(args, plain, Side(trained, args.guesses, 1 << 20), asked)


def compare(args, plain: Side, drafting: Side, asked: list[list[int]]) -> None:
    print(f"{'requests':>10} {'plain':>10} {'drafting':>10} {'tokens/s':>9} {'right guesses per pass':>23}")
    shape = torch.distributions.LogNormal(torch.tensor(args.tokens / 2).log(), torch.tensor(0.8))
    torch.manual_seed(0)
    drawn = shape.sample((HELD_OUT,)).long().clamp(1, 4 * args.tokens).tolist()
    cases = {str(n): (asked[:n], [args.tokens] * n) for n in args.requests} | {"log-normal": (asked, drawn)}
    for name, (prompts, lengths) in cases.items():
        times: dict[str, list[float]] = {"plain": [], "drafting": []}
        stats = drafting.batcher.stats
        before = (stats.right_guesses, stats.guessed_passes)
        for _ in range(args.repeats):
            found = []
            for key, side in (("plain", plain), ("drafting", drafting)):
                answered, taken = timed(side, prompts, lengths)
                times[key].append(taken)
                found.append(answered)
            assert found[0] == found[1], "a head changes no reply"
        rates = [sum(lengths) / statistics.median(seconds) for seconds in times.values()]
        right = (stats.right_guesses - before[0]) / max(1, stats.guessed_passes - before[1])
        print(f"{name:>10} {rates[0]:10.1f} {rates[1]:10.1f} {rates[1] / rates[0]:8.2f}x {right:23.2f}")


def timed(side: Side, prompts: list[list[int]], lengths: list[int]) -> tuple[list[list[int]], float]:
    found: list[list[list[int]]] = []
    taken = frame.seconds(lambda: found.append(side.answer(prompts, lengths)))
    return found[0], taken


if __name__ == "__main__":
    frame.run(main)
