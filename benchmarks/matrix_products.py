"""Float32 matrix products on this CPU: torch's own library against oneDNN, for SmolLM2-135M's layers at 1,184 tokens.

python benchmarks/matrix_products.py
"""

import os
import statistics
import time

import torch

from megatron_rl.platform import cpu

SHAPES = {
    "qkv": (1184, 576, 960),
    "gate and up": (1184, 576, 3072),
    "down": (1184, 1536, 576),
    "head": (160, 576, 49152),
}


def training_product_s(rows: int, inner: int, columns: int, repeats: int = 9) -> float:
    """Median seconds of one linear layer forward and backward."""
    x = torch.randn(rows, inner, requires_grad=True)
    weight = torch.randn(columns, inner, requires_grad=True)
    grad = torch.randn(rows, columns)
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        (x @ weight.t()).backward(grad)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def main() -> None:
    before = {name: training_product_s(*shape) for name, shape in SHAPES.items()}
    library = cpu.use_onednn_for_matrix_products()
    after = {name: training_product_s(*shape) for name, shape in SHAPES.items()}
    del library
    print(
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; used here: {cpu.has_slow_matrix_products()}"
    )
    print(f"{'layer':<14}{'GFLOP/s':>10}{'oneDNN':>10}{'ratio':>8}")
    for name, (rows, inner, columns) in SHAPES.items():
        flops = 6 * rows * inner * columns / 1e9
        print(f"{name:<14}{flops / before[name]:>10.0f}{flops / after[name]:>10.0f}{before[name] / after[name]:>8.2f}")


if __name__ == "__main__":
    main()
