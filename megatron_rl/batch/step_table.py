"""Shares the numbers of a step's trajectories with all ranks: a few bytes per trajectory.

int64 columns belong to prompts (group number, place in the data). They are sent once per run of equal rows, because a
group's trajectories are adjacent. Other columns are sent per trajectory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.batch import delivery
from megatron_rl.parallel import ParallelGroups

Table = list[tuple[str, torch.dtype]]
"""Names and dtypes of the number columns; the same on all ranks."""


def gather(numbers: dict[str, Tensor], table: Table, groups: ParallelGroups) -> tuple[dict[str, Tensor], Tensor] | None:
    """Return the columns `[B]` of all rollout ranks, and the rank `[B]` that holds each trajectory. Collective.

    numbers: `[n]` columns of a rollout rank's own trajectories, as named in `table`. A rank with different columns
    passes {}, and then all ranks return None. The result has the trajectories in rank order, with `group` numbers made
    unique.
    """
    of_prompts = [name for name, dtype in table if dtype == torch.int64]
    singly = [(name, dtype) for name, dtype in table if dtype != torch.int64]
    count, runs, flat = -1, 0, torch.zeros(0, dtype=torch.uint8)
    if numbers:
        in_runs = _runs_of(torch.stack([numbers[name] for name in of_prompts], dim=1))
        columns = [in_runs.flatten(), *(numbers[name].contiguous() for name, _ in singly)]
        flat = torch.cat([column.view(torch.uint8) for column in columns])
        count, runs = len(numbers["group"]), len(in_runs)
    record = torch.tensor([count, runs]).view(torch.uint8)
    told = delivery.gather(record, [len(record)] * groups.data.size, groups).view(torch.int64).view(-1, 2)
    counts = told[:, 0]
    if bool((counts < 0).any()):
        return None
    # Per rollout rank: the bytes of each part.
    sizes = [[r * 8 * (1 + len(of_prompts)), *(n * dtype.itemsize for _, dtype in singly)] for n, r in told.tolist()]
    totals = [sum(of_rank) for of_rank in sizes]
    found: dict[str, list[Tensor]] = {name: [] for name, _ in table}
    groups_before = 0
    for part, of_rank in zip(torch.split(delivery.gather(flat, totals, groups), totals), sizes, strict=True):
        first, *columns = (piece.clone() for piece in torch.split(part, of_rank))  # clones are aligned for their dtypes
        times, *values = first.view(torch.int64).view(-1, 1 + len(of_prompts)).unbind(1)
        for name, value in zip(of_prompts, values, strict=True):
            found[name].append(value.repeat_interleave(times))
        for (name, dtype), column in zip(singly, columns, strict=True):
            found[name].append(column.view(dtype))
        group = found["group"][-1]
        group += groups_before  # each rollout rank numbers its groups from 0
        groups_before = int(group.max()) + 1 if len(group) else groups_before
    leaders = torch.tensor([ranks[0] for ranks in groups.replicas])
    return {name: torch.cat(columns) for name, columns in found.items()}, leaders.repeat_interleave(counts)


def _runs_of(rows: Tensor) -> Tensor:
    """Run-length encode rows: `[n, k]` -> `[R, 1 + k]`, each run's length followed by its row."""
    found, counts = torch.unique_consecutive(rows, dim=0, return_counts=True) if len(rows) else (rows, rows[:, 0])
    return torch.cat([counts[:, None], found], dim=1)
