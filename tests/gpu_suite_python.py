"""The `python` that a test gives benchmarks/gpu_suite.sh: each command with its real arguments, on stand-ins.

What needs no GPU runs as it is. The build only reads its arguments and tests are only collected. The operators' tables
run small on the emulated device, or where nvcc is not there on a CPU, and so does a step. A training run is configured.
"""

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]


def build() -> None:
    from csrc import build

    build.build = lambda cuda, architectures: [f"a stand-in for {cuda} and {architectures}"]
    build.main()


SCALE = 64
"""Rows are so much fewer than the tables say."""


def operators() -> None:
    from csrc.emulation import emulated

    device = "cpu" if emulated.missing() else "cuda"
    if device == "cuda":
        import tests.emulated_device  # noqa: F401  before torch
    import bench_ops_cuda as suite
    import device_clock
    import torch
    from checksum_table import Bucket
    from logits_tables import Head, Logits, Shard
    from token_tables import Tokens

    from tests.device_stand_ins import stand_in

    class Clock(device_clock.DeviceClock):
        def __init__(self) -> None:
            super().__init__(device, seconds=0.0)

        def ceilings(self) -> dict[str, float]:
            return super().ceilings(1 << 12)

        def launches_and_waits(self, *_) -> tuple[int, int]:
            return 1, 0

        def times_us(self, call, prepare, repeats: int) -> list[float]:
            return super().times_us(call, prepare, 1) * repeats

        def host_us(self, call, repeats: int = 1) -> float:
            return super().host_us(call, repeats)

    class Report(suite.Report):
        def row(self, **values) -> None:
            super().row(**values | ({"T": values["T"] * SCALE} if "T" in values else {}))

    suite.Budget.is_spent = lambda budget: False  # a busy machine is no reason to skip rows
    stand_in(setattr)
    device_clock.SCRATCH_BYTES = 1024
    suite.DeviceClock, suite.Report = Clock, Report
    suite.logits_cases = lambda: [Logits(64, 50), Logits(512, 20, torch.float32, 0.5, slow_peers=True)]
    suite.head_cases = lambda: [Head(128, 100, 16)]
    suite.token_cases = lambda: [Tokens(512, 64), Tokens(512, 1)]
    suite.bucket_cases = lambda: [Bucket(1 << 20, 3)]
    suite.shard_cases = lambda: [Shard(16, 64, 4)]
    torch.compile = lambda function=None, **_: function or (lambda given: given)
    suite.main()


def step() -> None:
    import bench_train_step as bench
    import torch

    from megatron_rl import platform
    from tests.device_stand_ins import stand_in

    stand_in(setattr)
    # The engine asks the real platform, and is on the CPU; the benchmark asks this one.
    bench.platform = SimpleNamespace(has_cuda=lambda: True, device=platform.device)
    bench.SHAPES["1b"], bench.WORKLOADS["long"] = bench.SHAPES["tiny"], bench.WORKLOADS["quick"]
    bench.matmul_rate = lambda *_: 1.0
    copies = [SimpleNamespace(name="Memcpy HtoD (Pinned -> Device)")]
    trace = contextlib.nullcontext(SimpleNamespace(events=lambda: copies))
    torch.profiler.profile = lambda activities: trace

    def run_side(side, workload, args):
        args.side, args.workload = side, workload
        return bench.measure_side(args)

    bench.run_side = run_side
    bench.main()


def configured(path: str, *overrides: str) -> None:
    from megatron_rl.config import load_config

    print(load_config(path, list(overrides)).rollout.backend)


def main() -> None:
    words = sys.argv[1:]
    if words[:2] == ["-W", "ignore"]:
        words = words[2:]
    failing = os.environ.get("STAND_IN_FAILS", "").split()
    sys.path[0:0] = [str(ROOT), str(ROOT / "benchmarks")]
    what = words[1] if words[0] == "-m" else Path(words[0]).stem
    if what in failing:
        sys.exit(f"{what} fails, as it was told to")
    if words == ["-c", "import sglang"]:
        return
    if words[:2] == ["-m", "megatron_rl.train"]:
        return configured(*words[2:])
    parts = {"build": build, "bench_ops_cuda": operators, "bench_train_step": step, "device_rates": lambda: None}
    if words[0] != "-m" and what in parts:
        sys.argv = words
        return parts[what]()
    if words[:2] == ["-m", "pytest"]:
        words.append("--collect-only")
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
