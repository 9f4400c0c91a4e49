"""Room that packing leaves, balance and planning time, beside first-fit-decreasing and Karmarkar-Karp.

    python benchmarks/bench_packing.py

Packed rows are not padded to the longest sequence, so "padding" can mean two things, and both are printed:
  added   tokens that no trajectory has, over all rows computed. Only an idle microbatch adds one (its single untrained
          token); with sequence parallelism the schedule adds at most tp - 1 rows to a microbatch on top.
  unused  1 - tokens / (microbatches x budget): budget that was free. It costs neither memory nor time. Because counts
          are whole and equal on all ranks no plan can leave less than `least`.
  ranks   cost imbalance over data-parallel ranks, max / mean - 1 of their sums: what they wait for at the step's end.
  steps   the same where ranks meet after every microbatch, as expert parallelism makes them: sum over positions of the
          costliest rank / sum of the mean - 1.
  ms      planning for all ranks in one process (a run plans one rank's microbatches in each), median over batches.
"""

import argparse
import heapq
import math
import statistics
import time
from collections.abc import Callable

import frame
import torch

from megatron_rl.batch import packing

Plan = list[list[list[int]]]  # per rank, per microbatch: indices of sequences
METHODS: dict[str, Callable[[list[int], int, int], Plan]] = {}


def method(name: str):
    return lambda function: METHODS.setdefault(name, function)


def costs_of(lengths: list[int]) -> list[float]:
    return packing.estimated_cost(torch.tensor(lengths, dtype=torch.float64)).tolist()


@method("megatron_rl")
def ours(lengths: list[int], ranks: int, budget: int) -> Plan:
    """Balance shares by cost and pack each, as exchange.share_out and the engine do."""
    shares = packing.split_evenly(costs_of(lengths), ranks)
    own = [[lengths[i] for i in share] for share in shares]
    count = max(packing.least_microbatches(part, budget) for part in own)
    plans = [packing.plan(part, budget, count) for part in own]
    return [[[share[i] for i in part] for part in plan] for share, plan in zip(shares, plans, strict=True)]


@method("first-fit-decreasing")
def first_fit_decreasing(lengths: list[int], ranks: int, budget: int) -> Plan:
    """Bins of the whole step by tokens, dealt to the ranks in turn."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = next((i for i, free in enumerate(room) if lengths[index] <= free), len(bins))
        if fitting == len(bins):
            bins.append([])
            room.append(budget)
        bins[fitting].append(index)
        room[fitting] -= lengths[index]
    bins += [[] for _ in range(-len(bins) % ranks)]
    return [bins[rank::ranks] for rank in range(ranks)]


@method("Karmarkar-Karp")
def karmarkar_karp(lengths: list[int], ranks: int, budget: int) -> Plan:
    """Ranks by cost, then microbatches by tokens: the least count at which all ranks are within the budget."""
    shares = differencing(costs_of(lengths), ranks)
    count = max(math.ceil(sum(lengths[i] for i in share) / budget) for share in shares)
    while True:
        plans = [
            [[share[i] for i in part] for part in differencing([lengths[i] for i in share], count)] for share in shares
        ]
        if all(sum(lengths[i] for i in part) <= budget for plan in plans for part in plan):
            return plans
        count += 1


def differencing(weights: list, parts: int) -> list[list[int]]:
    """Largest differencing method: join the two partial solutions of the widest spread, heaviest part to lightest."""
    heap = []
    for index, weight in enumerate(weights):
        heap.append((-weight, index, [(0, [])] * (parts - 1) + [(weight, [index])]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        joined = [(x + y, s + t) for (x, s), (y, t) in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda part: part[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], tie, joined))
    return [part for _, part in heap[0][2]]


def log_normal_lengths(count: int, args: argparse.Namespace, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    location = math.log(args.mean) - args.sigma**2 / 2
    lengths = torch.empty(count, dtype=torch.float64).log_normal_(location, args.sigma, generator=generator)
    return lengths.long().clamp(1, args.longest).tolist()


def measure(plan: Plan, lengths: list[int], budget: int) -> dict[str, float]:
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= budget for rank in plan for part in rank)
    count, costs = len(plan[0]), costs_of(lengths)
    assert all(len(rank) == count for rank in plan)
    # Every method's microbatches are put in falling order of cost, which favours none.
    by_rank = torch.tensor([sorted((sum(costs[i] for i in part) for part in rank), reverse=True) for rank in plan])
    tokens, slots = sum(lengths), len(plan) * count * budget
    added = sum(1 for rank in plan for part in rank if not part)
    sums = by_rank.sum(1)
    return {
        "added": added / (tokens + added),
        "unused": 1 - tokens / slots,
        "least": 1 - tokens / (len(plan) * budget * math.ceil(tokens / (len(plan) * budget))),
        "count": count,
        "ranks": float(sums.max() / sums.mean() - 1),
        "steps": float(by_rank.max(0).values.sum() / by_rank.mean(0).sum() - 1),
    }


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8192, 1024])
    parser.add_argument("--mean", type=float, default=2000.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batches", type=int, default=10)
    args = frame.arguments(parser, argv, sequences=[64], ranks=2, batches=1)

    machine = frame.Machine()
    print(
        f"log-normal lengths, mean {args.mean:.0f}, sigma {args.sigma:g}, at most {args.longest}; {args.ranks} ranks, "
        f"{args.budget} tokens per microbatch, {args.batches} batches: mean (worst)"
    )
    head = f"{'sequences':>9}  {'method':<21}{'added':>8}{'unused':>17}{'least':>8}{'microbatches':>14}"
    print(head + f"{'ranks':>19}{'steps':>17}{'ms (worst)':>16}")
    for sequences in args.sequences:
        batches = [log_normal_lengths(sequences, args, seed) for seed in range(args.batches)]
        for name, make_plan in METHODS.items():
            rows, times = [], []
            for lengths in batches:
                begin = time.perf_counter()
                plan = make_plan(lengths, args.ranks, args.budget)
                times.append((time.perf_counter() - begin) * 1e3)
                rows.append(measure(plan, lengths, args.budget))
            mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
            worst = {key: max(row[key] for row in rows) for key in rows[0]}
            print(
                f"{sequences:>9}  {name:<21}{mean['added']:>8.4%}{mean['unused']:>8.2%} ({worst['unused']:>5.2%})"
                f"{mean['least']:>8.2%}{mean['count']:>14.1f}{mean['ranks']:>9.3%} ({worst['ranks']:>7.3%})"
                f"{mean['steps']:>8.2%} ({worst['steps']:>5.2%}){statistics.median(times):>8.0f} ({max(times):>5.0f})",
                flush=True,
            )
    print(f"{machine}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)")


if __name__ == "__main__":
    frame.run(main)
