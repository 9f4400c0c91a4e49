"""The operators on one CUDA device beside every peer that is there: tables in markdown on stdout and one JSON.

Usage: python benchmarks/bench_ops_cuda.py [--results FOLDER] [--seconds 220]. Each table has a share of the seconds;
its rows are in order of importance, and those left when the share is used up are listed as skipped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from device_clock import DeviceClock
from frame import commit
from logits_tables import HEADS, LOGPROBS, head_cases, head_table, logits_cases, logprob_table, shard_cases, shard_table
from operator_peers import ENTROPY, LOGP_BACKWARD, Peers, find_peers
from suite_report import Budget, Report, shown
from token_tables import GAE, LOSSES, OUR_LOSS, gae_table, loss_table, token_cases

SHARES = {"heads": 0.22, "logprobs": 0.5, "loss": 0.12, "gae": 0.06, "shards": 0.1}
"""Of the seconds, in the tables' order."""


def facts(clock: DeviceClock, peers: Peers) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if clock.device == "cuda" else clock.device,
        "torch": torch.__version__,
        "commit": commit(),
        "ceilings": clock.ceilings(),
        "peers": peers.described(),
        "absent": peers.absent,
    }


def print_facts(report: Report) -> None:
    found = report.facts
    ceilings = ", ".join(f"{name} {value:.0f} GB/s" for name, value in found["ceilings"].items())
    print(f"{found['device']}, torch {found['torch']}, commit {found['commit']}. Ceilings of this run: {ceilings}")
    print("(copy: bytes read plus written; read: the fastest of sum, maximum and dot product).\n")
    print("| peer | version | what it does |\n|---|---|---|")
    for name, peer in found["peers"].items():
        print(f"| {name} | {peer['version']} | {peer['notes']} |")
    for name, reason in found["absent"].items():
        print(f"| {name} | absent | {shown(reason)} |")


def all_tables(clock: DeviceClock, report: Report, peers: Peers, seconds: float) -> None:
    budgets = {name: share * seconds for name, share in SHARES.items()}
    head_table(clock, report, Budget(budgets["heads"]), peers.present, head_cases())
    logprob_table(clock, report, Budget(budgets["logprobs"]), peers.present, logits_cases())
    loss_table(clock, report, Budget(budgets["loss"]), token_cases())
    gae_table(clock, report, Budget(budgets["gae"]), token_cases())
    shard_table(clock, report, Budget(budgets["shards"]), shard_cases())


def bars(report: Report) -> list[tuple[str, float | None, float, bool]]:
    """(what, the worst of the rows it is about, the bar, whether more is better); None where no row was measured."""

    def worst(rows: list[dict[str, Any]], column: str, more_is_better: bool) -> float | None:
        values = [row[column] for row in rows if row.get(column) is not None]
        return (min if more_is_better else max)(values) if values else None

    ours = [row for row in report.found(LOGPROBS, peer="ours", masked=0.0) if row["T"] >= 4096]
    forward = [row for row in ours if row["what"] == ENTROPY]
    both = [row for row in ours if row["what"] == LOGP_BACKWARD]
    heads = report.found(HEADS, what="ours")
    loss = report.found(LOSSES, what=OUR_LOSS, T=32768)
    gae = report.found(GAE, what="ours", T=32768)
    return [
        ("log-prob and entropy, of copy", worst(forward, "of copy", True), 0.90, True),
        ("log-prob and backward, of copy", worst(both, "of copy", True), 0.88, True),
        ("output layer and policy loss, over three products", worst(heads, "over floor", False), 1.08, False),
        ("policy loss at 32768 tokens, us", worst(loss, "us", False), 12.0, False),
        ("policy loss at 32768 tokens, launches", worst(loss, "launches", False), 1.0, False),
        ("policy loss at 32768 tokens, waits", worst(loss, "waits", False), 0.0, False),
        ("packed GAE at 32768 tokens, us", worst(gae, "us", False), 30.0, False),
    ]


def print_bars(report: Report) -> None:
    print(
        "\n### Bars\n\nThe worst measured row against the bar.\n\n| what | worst | bar | reached |\n|---|---|---|---|"
    )
    for what, value, bar, more_is_better in bars(report):
        reached = None if value is None else (value >= bar if more_is_better else value <= bar)
        print(f"| {what} | {shown(value)} | {shown(bar)} | {shown(reached)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of gpu_suite.json")
    parser.add_argument("--seconds", type=float, default=220, help="for all tables together")
    arguments = parser.parse_args()
    clock, peers = DeviceClock(), find_peers()
    report = Report(arguments.results / "gpu_suite.json", facts(clock, peers))
    print_facts(report)
    all_tables(clock, report, peers, arguments.seconds)
    print_bars(report)


if __name__ == "__main__":
    main()
