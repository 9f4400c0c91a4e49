"""One training step of a random model of a given shape: tokens/s, peak memory and model FLOPs utilisation.

    python benchmarks/train_step.py --shape 1b          # one GPU, bf16
    python benchmarks/train_step.py --shape tiny        # anywhere

The limit it is compared with is the bf16 (or float32) matrix product rate measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from megatron_rl import platform
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig, EngineConfig, ModelConfig, OptimizerConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.types import FinetuneSpec, TrajectoryBatch

SHAPES = {
    # Llama-3.2-1B's sizes
    "1b": dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    | dict(intermediate_size=8192, vocab_size=128256),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    | dict(intermediate_size=128, vocab_size=512),
}


def write_model_folder(shape: dict, longest: int, folder: Path) -> None:
    config = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))


def log_normal_batch(tokens: int, longest: int, vocab: int, seed: int = 0) -> TrajectoryBatch:
    """Replies with log-normal lengths after prompts of 128 tokens at most, about `tokens` in all."""
    generator = torch.Generator().manual_seed(seed)
    lengths, total = [], 0
    while total < tokens:
        length = int(
            torch.empty(1).log_normal_(6.5, 0.8, generator=generator).clamp(16, min(longest, tokens - total + 16))
        )
        lengths.append(min(length, longest))
        total += lengths[-1]
    count = sum(lengths)
    mask = torch.cat([torch.arange(n) >= min(128, n // 2) for n in lengths])
    columns = {
        "input_ids": torch.randint(0, vocab, (count,), generator=generator),
        "loss_mask": mask,
        "logprobs": torch.full((count,), -11.0) * mask,
        "advantages": torch.randn(count, generator=generator),
    }
    return TrajectoryBatch(columns, {"rewards": torch.zeros(len(lengths))}, torch.tensor([0, *lengths]).cumsum(0))


def model_flops(arch, batch: TrajectoryBatch) -> float:
    """Multiply-adds counted twice, forward once and backward twice; the head on trained rows only, attention causal."""
    h, q, kv = arch.hidden, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    per_layer = h * (q + 2 * kv) + q * h + 3 * h * arch.ffn
    linear = 6 * per_layer * arch.layers * int(batch.cu_seqlens[-1])
    attention = 6 * arch.layers * q * float((batch.lengths.double() ** 2).sum())
    return linear + attention + 6 * arch.vocab * h * int(batch["loss_mask"].sum())


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """FLOP/s of a square matrix product, the median of ten."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = [seconds(lambda: a @ b) for _ in range(13)][3:]
    return 2 * size**3 / sorted(times)[5]


def seconds(work) -> float:
    wait = torch.cuda.synchronize if platform.has_cuda() else (lambda: None)
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    dtype = "bfloat16" if platform.has_cuda() else "float32"
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(SHAPES[args.shape], args.longest, Path(folder))
        config = EngineConfig(
            model=ModelConfig(path=folder, init="random", dtype=dtype),
            optimizer=OptimizerConfig(lr=1e-6),
            tokens_per_microbatch=args.tokens_per_microbatch,
        )
        engine = MegatronEngine(config)
        engine.initialize(None, FinetuneSpec(total_updates=args.steps + 2))
    batch = log_normal_batch(args.tokens, args.longest, engine.arch.vocab)
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig()))
    engine.train()
    for _ in range(2):
        engine.train_batch(batch, loss)
    times = sorted(seconds(lambda: engine.train_batch(batch, loss)) for _ in range(args.steps))
    median, tokens = times[len(times) // 2], int(batch.cu_seqlens[-1])
    peak = matmul_rate(getattr(torch, dtype), engine.device, 8192 if platform.has_cuda() else 1024)
    rate = model_flops(engine.arch, batch) / median
    memory = torch.cuda.max_memory_allocated() / 2**30 if platform.has_cuda() else float("nan")
    where = torch.cuda.get_device_name() if platform.has_cuda() else f"CPU, {torch.get_num_threads()} threads"
    parameters = sum(p.numel() for p in engine.parameters())
    print(
        "| device | torch | dtype | parameters | sequences | tokens | s/step (min-max) | tokens/s | peak GiB | "
        "TFLOP/s | of matmul |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {where} | {torch.__version__} | {dtype} | {parameters / 1e6:,.0f} M | {len(batch)} | {tokens:,} | "
        f"{median:.3f} "
        f"({times[0]:.3f}-{times[-1]:.3f}) | {tokens / median:,.0f} | {memory:.1f} | {rate / 1e12:.2f} | "
        f"{rate / peak:.0%} |"
    )
    engine.destroy()


if __name__ == "__main__":
    main()
