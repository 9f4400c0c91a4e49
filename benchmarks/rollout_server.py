"""Generated tokens per second: the embedded rollout server, transformers' generate, and a real SGLang where one runs.

    python benchmarks/rollout_server.py MODEL

Real SGLang is measured where scripts/install_sglang_cpu.sh installed it, or at --sglang-url.

Every engine gets the same prompts (random token ids), samples at temperature 1 and returns log-probabilities; the two
servers are reached over HTTP. The prompts of one wave start together; a row is the median over the waves.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import frame

from megatron_rl.config import RolloutConfig
from megatron_rl.launch.run_token import token_in
from megatron_rl.servers.server_process import SGLANG_CPU_PACKAGES
from megatron_rl.servers.supervisor import Supervisor


def make_prompts(args: argparse.Namespace, count: int, wave: int) -> list[list[int]]:
    rng = random.Random(f"{count} {wave}")  # fresh prompts in every wave, so nothing is found in a prefix cache
    return [
        [rng.randrange(args.vocab_size // 32, args.vocab_size) for _ in range(args.prompt_tokens)] for _ in range(count)
    ]


async def run_wave(url: str, token: str | None, prompts: list[list[int]], new_tokens: int) -> int:
    """Send all prompts at once; returns the number of tokens that came back."""

    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> int:
        sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        async with session.post(f"{url}/generate", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{url} answered {response.status}: {answer}")
            return len(answer["meta_info"]["output_token_logprobs"])

    options = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=1800)}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers, **options) as session:
        return sum(await asyncio.gather(*(one(session, prompt) for prompt in prompts)))


def measure(args: argparse.Namespace, generate: Callable[[list[list[int]]], int]) -> dict[int, float]:
    """Concurrency -> tokens per second."""
    generate(make_prompts(args, 1, -1))  # the first call builds what is built once
    rates = {}
    for count in args.concurrency:
        waves = []
        for wave in range(args.waves):
            prompts, begin = make_prompts(args, count, wave), time.perf_counter()
            waves.append(generate(prompts) / (time.perf_counter() - begin))
        rates[count] = statistics.median(waves)
    return rates


def measure_server(args: argparse.Namespace, url: str, token: str | None) -> dict[int, float]:
    return measure(args, lambda prompts: asyncio.run(run_wave(url, token, prompts, args.new_tokens)))


def measure_started(args: argparse.Namespace, backend: str) -> dict[int, float]:
    """Start a server of its own, as a training run does, and measure it. It has all cores, which are its alone."""
    server_args = ["--max-total-tokens", "40000"]
    if backend == "sglang":
        server_args += ["--mem-fraction-static", "0.2"]
    config = RolloutConfig(backend=backend, server_args=server_args)
    with tempfile.TemporaryDirectory() as folder:
        with Supervisor(config, args.model, folder, threads_per_server=os.cpu_count() or 1) as supervisor:
            return measure_server(args, supervisor.urls[0], token_in(supervisor.token_file))


def measure_transformers(args: argparse.Namespace) -> dict[int, float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> int:
        ids = torch.tensor(prompts)
        length = {"min_new_tokens": args.new_tokens, "max_new_tokens": args.new_tokens}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0, **length
        )
        return out[:, ids.shape[1] :].numel()

    return measure(args, generate)


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("model", type=Path, help="folder in Hugging Face format; with --quick a tiny one replaces it")
    parser.add_argument("--sglang-url", help="a running SGLang server with the same model")
    parser.add_argument("--sglang-token-file", type=Path, help="the file with that server's token")
    parser.add_argument("--skip-sglang", action="store_true")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--skip-transformers", action="store_true")
    settings = {"concurrency": [1, 4], "prompt_tokens": 4, "new_tokens": 4, "waves": 1, "skip_sglang": True}
    args = frame.arguments(parser, argv, **settings)
    with frame.model_of(args, args.model) as args.model:
        # Below every vocabulary in question.
        args.vocab_size = min(32_000, json.loads((args.model / "config.json").read_text())["vocab_size"])
        compare(args)


def compare(args: argparse.Namespace) -> None:
    machine = frame.Machine()
    rows = {"embedded server": measure_started(args, "embedded")}
    if not args.skip_transformers:
        rows["transformers generate"] = measure_transformers(args)
    if args.sglang_url is not None:
        token = token_in(args.sglang_token_file) if args.sglang_token_file else None
        rows["SGLang"] = measure_server(args, args.sglang_url, token)
    elif not args.skip_sglang and (SGLANG_CPU_PACKAGES / "sglang").is_dir():
        rows["SGLang on CPU"] = measure_started(args, "sglang")
    print(
        f"{args.model.name}, float32, {machine.cores}, {args.prompt_tokens} prompt + "
        f"{args.new_tokens} new tokens, median of {args.waves} waves, {machine.state}"
    )
    print(f"{'tokens/s at concurrency':<24}" + "".join(f"{count:>8}" for count in args.concurrency))
    for name, rates in rows.items():
        print(f"{name:<24}" + "".join(f"{rates[count]:>8.0f}" for count in args.concurrency))


if __name__ == "__main__":
    frame.run(main)
