"""Say yes or no to each bar that the project has set itself, from the JSON that a GPU suite left in a folder.

Usage: python benchmarks/suite_bars.py FOLDER. Needs no torch. A bar counts the worst row that was measured for it. One
for which nothing was measured is told from one that is missed, and what a GPU does not tell has the command that does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Names of tables, of what they measure, and of the file that each part of the suite writes.
LOGPROBS = "Log-probabilities of materialised logits"
HEADS = "Output layer and loss, bfloat16 weights"
LOSSES = "Policy loss from log-probabilities"
GAE = "Advantages of packed sequences"
CHECKSUMS = "Checksums of a publication"
OUR_LOSS = "ours, loss, gradient and statistics"
ENTROPY, LOGP_BACKWARD = "logp, entropy", "logp, backward"
OPERATORS, PEERS, STEP = "gpu_suite.json", "gpu_peers.json", "train_step.json"
GRAPH = "replayed us"
"""Column with the time of a call replayed as a CUDA graph: launching alone takes the host longer than the call runs."""

WIRE_GB_S = 50.0
"""400 Gb/s, at which weights are published."""


@dataclass(frozen=True)
class Found:
    """What the suite measured; empty where a part failed."""

    tables: dict[str, Any]
    step: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Found:
        parts = [json.loads(path.read_text()) if path.exists() else {} for path in (folder / OPERATORS, folder / STEP)]
        return cls(parts[0].get("tables", {}), parts[1])

    def worst(self, column: str, table: str, *, least: bool = False, above: int = 0, **wanted: Any) -> float | None:
        """Return the largest of a column (or the least) in rows with these values and at least so many tokens."""
        rows = self.tables.get(table, {"rows": []})["rows"]
        values = [
            row[column]
            for row in rows
            if row.get(column) is not None
            and row.get("T", above) >= above
            and all(row.get(key) == value for key, value in wanted.items())
        ]
        return (min if least else max)(values, default=None)


@dataclass(frozen=True)
class Bar:
    what: str
    limit: float
    value: Callable[[Found], float | None]
    at_least: bool = False

    def answer(self, found: Found) -> tuple[float | None, bool | None]:
        """(the worst figure, whether it reaches the bar); None where there is none."""
        value = self.value(found)
        reached = None if value is None else value >= self.limit if self.at_least else value <= self.limit
        return value, reached


def of_copy(what: str) -> Callable[[Found], float | None]:
    return lambda found: found.worst(
        "of copy", LOGPROBS, least=True, above=4096, what=what, peer="ours", logits="bfloat16", masked=0.0
    )


def of_loss(column: str, **wanted: Any) -> Callable[[Found], float | None]:
    return lambda found: found.worst(column, LOSSES, what=OUR_LOSS, T=32768, **wanted)


def of_wire(found: Found) -> float | None:
    rate = found.worst("GB/s", CHECKSUMS, least=True, peer="ours")
    return None if rate is None else WIRE_GB_S / rate


def of_step(key: str) -> Callable[[Found], float | None]:
    return lambda found: found.step.get(key)


BARS = (
    Bar("bf16 log-prob and entropy, T of 4k and more: share of a copy", 0.92, of_copy(ENTROPY), at_least=True),
    Bar("bf16 log-prob and gradient, T of 4k and more: share of a copy", 0.92, of_copy(LOGP_BACKWARD), at_least=True),
    Bar(
        "output layer and policy loss, T of 8k and more: times its three products",
        1.08,
        lambda found: found.worst("over floor", HEADS, above=8192, what="ours"),
    ),
    Bar("logits alive in it, in chunks", 1.6, lambda found: found.worst("chunks", HEADS, what="ours")),
    Bar("policy loss of 32k tokens: us", 8.0, of_loss(GRAPH, loss="decoupled")),
    Bar("policy loss by sequence, one of 32k tokens: us", 20.0, of_loss(GRAPH, loss="by sequence", sequences=1)),
    Bar("policy loss: launches", 1.0, of_loss("launches")),
    Bar("policy loss: waits of the host", 0.0, of_loss("waits")),
    Bar("GAE of 32k tokens, however they are split: us", 10.0, lambda f: f.worst(GRAPH, GAE, what="ours", T=32768)),
    Bar("checksums of a publication at 400 Gb/s: share of its time", 0.05, of_wire),
    Bar("a training step: waits of the host that are our own", 3.0, of_step("own waits")),
    Bar("a training step: copies to the device for each microbatch", 2.0, of_step("copies a microbatch")),
)  # fmt: skip
"""Chunks of logits are counted in float32; the half of one is its gradient in 16 bits."""

ELSEWHERE = {
    "output layer and policy loss on a CPU: at most 1.15 of its three products": "python benchmarks/bench_ops_cpu.py",
    "memory, traffic, waits, copies and kernels of a step, and the plan's figures beside them": "megatron-rl rehearse",
    "replies of 32k tokens, and requests that an executor sustains": "python benchmarks/bench_executor.py",
    "a publication: at least 80 % of a bare broadcast": "python benchmarks/bench_publish.py",
    "a publication of changes: at most 3 % of the bytes": "python benchmarks/bench_delta.py",
    "asynchronous against synchronous: at least 2.77 times": "python benchmarks/bench_async.py",
    "make test, make test-fast": "make test",
}
"""Bars that a GPU does not tell, and what does."""


def text_of(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def lines_of(found: Found) -> list[str]:
    """The answers as a markdown table."""
    lines = ["| bar | worst measured | needed | reached |", "|---|---|---|---|"]
    for bar in BARS:
        value, reached = bar.answer(found)
        said = "not measured" if reached is None else "yes" if reached else "NO"
        needed = f"{'at least' if bar.at_least else 'at most'} {bar.limit:g}"
        lines.append(f"| {bar.what} | {text_of(value)} | {needed} | {said} |")
    return lines + [f"| {what} | - | - | not of a GPU: `{command}` |" for what, command in ELSEWHERE.items()]


def main() -> None:
    print("\n".join(lines_of(Found.read(Path(sys.argv[1])))))


if __name__ == "__main__":
    main()
