"""Distributes a step's trajectories to the ranks that train them, sending each token once.

Rollout ranks share the numbers of their trajectories (lengths, rewards, prompts) with all ranks. From these, every rank
computes the same plan (batch/share_plan.py), and tokens go only to the replica that computes all passes over them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batch import delivery, packing, share_plan
from megatron_rl.batch.delivery import Layout
from megatron_rl.batch.step_batch import SharePlan, StepBatch
from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import MicroBatch, TrajectoryBatch

Compute = Callable[[TrajectoryBatch], Tensor]
LENGTH, PLACE, SHARED = ".length", ".place", ".shared"
"""Names of three numbers that are sent along for each trajectory: its length, and the two columns of
`packing.beginnings`."""

Table = list[tuple[str, torch.dtype]]
"""Name and dtype of each column that has one number per trajectory; the same on all ranks."""


def share_out(
    own: TrajectoryBatch | None, groups: ParallelGroups, *, updates: int, seed: int, share_prompts: bool = False
) -> StepBatch:
    """Distribute the step's trajectories: each one goes to the replica that trains it. Collective: all ranks call it.

    own: the trajectories of a rollout rank, and None on other ranks. The result has the trajectories in rank order, and
    `group` numbers that are unique over all ranks. The trajectories are divided into `updates` optimizer steps, in an
    order shuffled by `seed`. Greedy replies (`is_greedy`) belong to no optimizer step: they are only scored. With
    `share_prompts`, a group's trajectories get the same update and replica as far as balanced shares allow.

    Raises RuntimeError on all ranks if rollout ranks have different columns.
    """
    numbers: dict[str, Tensor] = {}
    layout: Layout = []
    if own is not None:
        numbers, layout = {LENGTH: own.lengths.int()} | own.sequences, delivery.token_layout(own)
        if share_prompts:
            place, shared = packing.beginnings(own).T.clone(memory_format=torch.contiguous_format)
            # int16, since every rank receives these. They only balance work, so clamping does little harm.
            numbers[PLACE], numbers[SHARED] = place.clamp_max(torch.iinfo(torch.int16).max).short(), shared.int()
    table = sorted((name, column.dtype) for name, column in numbers.items())
    told = [(table, layout)]
    dist.broadcast_object_list(told, src=0, group=groups.control)
    is_alike = told == [(table, layout)]
    table, layout = told[0]
    found = gather_numbers(numbers if is_alike else {}, table, groups)
    if found is None:
        columns = [name for name, _ in table] + [name for name, *_ in layout]
        names = [name.removeprefix("tokens.") for name in columns if not name.startswith((".", "versions."))]
        raise RuntimeError(
            f"rollout ranks have trajectories with different columns; rank 0 has {', '.join(names)}. Have the workflow "
            f"return the same ones for every prompt."
        )
    numbers, sender = found
    lengths = numbers.pop(LENGTH).long()
    begin = torch.stack([numbers.pop(PLACE), numbers.pop(SHARED)], dim=1).long() if share_prompts else None
    plan = plan_step(numbers, lengths, groups, updates=updates, seed=seed, begin=begin)
    held = own if own is not None else TrajectoryBatch({}, {}, torch.zeros(1, dtype=torch.int64))
    tokens = delivery.deliver(held, layout, lengths=lengths, sender=sender, owner=plan.owner, groups=groups)
    return StepBatch.of_tokens(tokens, numbers, plan)


def gather_numbers(
    numbers: dict[str, Tensor], table: Table, groups: ParallelGroups
) -> tuple[dict[str, Tensor], Tensor] | None:
    """Return the columns `[B]` of all rollout ranks, and the rank `[B]` that holds each trajectory. Collective.

    numbers: the columns `[n]` of a rollout rank's own trajectories, as named in `table`. A rank whose columns differ
    from `table` passes {}, and then all ranks return None. The result has the trajectories in rank order, and `group`
    numbers that are unique over all ranks. A column of int64 has one value per prompt. It is sent once per run of equal
    rows, because the trajectories of a group are adjacent.
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
    """Find runs of equal consecutive rows: `[n, k]` -> `[R, 1 + k]`, the length of each run followed by its row."""
    found, counts = torch.unique_consecutive(rows, dim=0, return_counts=True) if len(rows) else (rows, rows[:, 0])
    return torch.cat([counts[:, None], found], dim=1)


def plan_step(
    sequences: dict[str, Tensor],
    lengths: Tensor,
    groups: ParallelGroups,
    *,
    updates: int,
    seed: int,
    begin: Tensor | None = None,
) -> SharePlan:
    """Plan the update that trains each trajectory, and the replica that computes all passes over it.

    sequences, lengths: columns `[B]` of the whole step. begin: the result of `packing.beginnings` for the whole step,
    if prompts are shared.
    """
    is_trained = sequences["is_greedy"] == 0 if "is_greedy" in sequences else torch.ones(len(lengths), dtype=torch.bool)
    group = sequences["group"]
    update = torch.full((len(lengths),), updates)
    update[is_trained] = share_plan.plan_updates(
        int(is_trained.sum()), updates, seed=seed, group=group[is_trained] if begin is not None else None
    )
    owner = share_plan.plan_owners(update, lengths, groups.data.size, group=group, begin=begin)
    columns = {"lengths": lengths, "update": update, "owner": owner, "group": group}
    return SharePlan(groups=groups, updates=updates, **columns, begin=begin)


def pack_alike(
    batch: TrajectoryBatch,
    groups: ParallelGroups,
    *,
    tokens_per_microbatch: int,
    allow_longer: bool = True,
    multiple_of: int = 1,
    share_prompts: bool = False,
    final_rows: bool = True,
) -> list[MicroBatch]:
    """Pack this rank's trajectories into microbatches, equally many on every rank. Collective: all ranks call it.

    The number of microbatches is the largest number that any rank needs. The options are those of `packing.pack` and
    `packing.least_microbatches`.
    """
    options = {"share_prompts": share_prompts, "final_rows": final_rows}
    least = least_alone(batch, tokens_per_microbatch, multiple_of, allow_longer=allow_longer, **options)
    count = torch.tensor([least])
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=groups.control)  # passes contain collectives
    return packing.pack(batch, tokens_per_microbatch=tokens_per_microbatch, count=int(count), **options)


def least_alone(
    batch: TrajectoryBatch, tokens_per_microbatch: int, multiple_of: int, *, allow_longer: bool, **options: bool
) -> int:
    rows = [unit.rows for unit in packing.units(batch, tokens_per_microbatch, **options)]
    return packing.least_microbatches(rows, tokens_per_microbatch, multiple_of=multiple_of, allow_longer=allow_longer)


def own_share(batch: TrajectoryBatch, groups: ParallelGroups, *, share_prompts: bool = False) -> TrajectoryBatch:
    """Return this data-parallel rank's share of a batch that every rank has.

    The shares of all ranks have about the same estimated cost. With `share_prompts`, the trajectories of a group stay
    together as far as balanced shares allow.
    """
    options = {"group": batch.sequences.get("group"), "pair": batch.sequences.get("pair")}
    if share_prompts:
        options["begin"] = packing.beginnings(batch)
    together = torch.zeros(len(batch), dtype=torch.int64)
    owner = share_plan.plan_owners(together, batch.lengths, groups.data.size, **options)
    return batch.select((owner == groups.data.rank).nonzero()[:, 0].tolist())


def by_token(
    batch: TrajectoryBatch, groups: ParallelGroups, compute: Compute, *, share_prompts: bool = False
) -> Tensor:
    """Apply `compute` to a batch that every rank has. Returns one value per token, `[N]` float32, on every rank.

    Each data-parallel rank applies `compute` to its share of the batch, and the results are combined. Collective: all
    ranks call it with the same batch. `compute` must use an engine in the layout of `groups`.
    """
    rows = {"row": torch.arange(len(batch["input_ids"]))}  # travels with the tokens and says where results belong
    numbered = dataclasses.replace(batch, tokens=batch.tokens | rows)
    share = own_share(numbered, groups, share_prompts=share_prompts)
    result = torch.zeros(len(batch["input_ids"]))  # every entry is written by one rank, so the sum is exact
    computed = compute(share)
    if groups.is_rollout_rank:  # only one of the ranks that computed the same share contributes
        result[share["row"]] = computed.cpu()
    dist.all_reduce(result, group=groups.control)
    return result
