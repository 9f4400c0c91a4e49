"""Measure how much of its data sheet one GPU reaches, by kind and size of work. Constants of `megatron-rl plan` use it.

    python benchmarks/device_rates.py [--json FILE]      # about 20 seconds

Products are bf16 on random numbers, each the median of at least ten calls on device events with a cold L2. Attention is
torch's variable-length kernel, causal, its FLOPs those of the lower triangle. Traffic counts bytes read and written.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import frame
import torch
from device_clock import DeviceClock
from torch.nn.attention.varlen import varlen_attn

ROWS = (64, 256, 1024, 4096, 16384)
PRODUCTS = {
    "1B: qkv": (2048, 3072),
    "1B: down": (8192, 2048),
    "8B: qkv": (4096, 6144),
    "8B: gate and up": (4096, 28672),
    "8B: down": (14336, 4096),
    "70B, a rank of 8: gate and up": (8192, 7168),
    "70B, a rank of 8: down": (3584, 8192),
    "30B-A3B, an expert: gate and up": (2048, 1536),
}
"""Columns in and out."""
ATTENTION = [(32, 512), (8, 2048), (2, 8192), (1, 32768)]
"""Sequences and their length, with 32 heads of 128."""


def median_us(clock: DeviceClock, call: Callable[[], Any]) -> float:
    return statistics.median(clock.times_us(call, None, clock.repeats(call)))


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def product_rates(clock: DeviceClock) -> dict[str, dict[int, float]]:
    """TFLOP/s of each product for each number of rows."""
    rates: dict[str, dict[int, float]] = {}
    for name, (inner, columns) in PRODUCTS.items():
        weight = tensor(columns, inner)
        for rows in ROWS:
            x = tensor(rows, inner)
            us = median_us(clock, lambda x=x, weight=weight: x @ weight.T)
            rates.setdefault(name, {})[rows] = 2 * rows * inner * columns / us / 1e6
    return rates


def attention_rates(clock: DeviceClock) -> dict[str, list[float]]:
    """TFLOP/s forward, and backward."""
    rates = {}
    for count, length in ATTENTION:
        q, k, v = (tensor(count * length, 32, 128).requires_grad_() for _ in range(3))
        cu = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length

        def forward(q=q, k=k, v=v, cu=cu, length=length) -> torch.Tensor:
            return varlen_attn(q, k, v, cu, cu, length, length, window_size=(-1, 0))

        out = forward()
        grad = torch.randn_like(out)

        def backward(out=out, inputs=(q, k, v), grad=grad) -> object:
            return torch.autograd.grad(out, inputs, grad, retain_graph=True)

        flops = 4 * 32 * 128 * count * length * (length + 1) / 2
        rates[f"{count} x {length}"] = [
            flops / median_us(clock, forward) / 1e6,
            2.5 * flops / median_us(clock, backward) / 1e6,
        ]
    return rates


def traffic_rates(clock: DeviceClock) -> dict[str, float]:
    """GB/s of the device's memory by the size of an addition, and between it and the host's."""
    rates = {}
    for megabytes in (1, 16, 256, 2048):
        a = tensor(megabytes << 19)
        rates[f"add in place, {megabytes} MB"] = 2 * a.nbytes / median_us(clock, lambda a=a: a.add_(1)) / 1e3
    there, here = tensor(1 << 29), torch.empty(1 << 29, dtype=torch.bfloat16, pin_memory=True)
    rates["to the host, 1 GiB"] = there.nbytes / median_us(clock, lambda: here.copy_(there, non_blocking=True)) / 1e3
    rates["from the host, 1 GiB"] = there.nbytes / median_us(clock, lambda: there.copy_(here, non_blocking=True)) / 1e3
    moments = [torch.zeros(1 << 28, device="cuda") for _ in range(4)]
    state = [[part] for part in moments] + [[torch.ones((), device="cuda")]]

    def adam() -> None:
        parameters, grads, first, second, steps = state
        options = dict(lr=1e-6, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)
        torch._fused_adamw_(parameters, grads, first, second, [], steps, **options)

    rates["AdamW, 28 bytes a parameter"] = 28 * moments[0].numel() / median_us(clock, adam) / 1e3
    one = tensor(8)
    rates["launches a ms"] = 1e3 / clock.host_us(lambda: one.add_(1), 1000)
    return rates


def print_table(head: str, columns: list[object], rows: dict[str, list[float]]) -> None:
    print(f"\n| {head} | {' | '.join(map(str, columns))} |\n|{'---|' * (len(columns) + 1)}")
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.0f}' for value in values)} |")


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = frame.arguments(parser, argv)
    clock = DeviceClock(seconds=0.1)
    products, attention, traffic = product_rates(clock), attention_rates(clock), traffic_rates(clock)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print_table("TFLOP/s, rows", [*ROWS], {name: list(rates.values()) for name, rates in products.items()})
    print_table("TFLOP/s, sequences", ["forward", "backward"], attention)
    print_table("GB/s", [""], {name: [rate] for name, rate in traffic.items()})
    if args.json is not None:
        found = {"device": torch.cuda.get_device_name(), "TFLOP/s": products, "attention": attention, "GB/s": traffic}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    frame.run(main)
