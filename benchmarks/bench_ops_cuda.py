"""The operators on one CUDA device beside every peer that is there: tables in markdown on stdout and one JSON.

Usage: python benchmarks/bench_ops_cuda.py [--results FOLDER] [--seconds 220] [--ours]. Each table has a share of the
seconds; its rows are in order of importance, and those left when the share is used up are listed as skipped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from checksum_table import bucket_cases, checksum_table
from device_clock import DeviceClock
from frame import commit
from logits_tables import head_cases, head_table, logits_cases, logprob_table, shard_cases, shard_table
from operator_peers import LOADERS, Peers, find_peers
from suite_bars import OPERATORS, PEERS
from suite_report import Budget, Report, shown
from token_tables import gae_table, loss_table, token_cases

SHARES = {"heads": 0.35, "logprobs": 0.35, "loss": 0.1, "gae": 0.05, "checksums": 0.05, "shards": 0.1}
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
    checksum_table(clock, report, Budget(budgets["checksums"]), bucket_cases())
    shard_table(clock, report, Budget(budgets["shards"]), shard_cases())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of the JSON")
    parser.add_argument("--seconds", type=float, default=220, help="for all tables together")
    parser.add_argument("--ours", action="store_true", help="our own operators alone: all rows in a minute")
    arguments = parser.parse_args()
    clock, peers = DeviceClock(), find_peers(LOADERS[:1] if arguments.ours else LOADERS)
    name = OPERATORS if arguments.ours else PEERS
    report = Report(arguments.results / name, facts(clock, peers), peers=not arguments.ours)
    print_facts(report)
    all_tables(clock, report, peers, arguments.seconds)


if __name__ == "__main__":
    main()
