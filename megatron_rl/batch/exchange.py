"""Moves trajectories between ranks.

Every rank gets the step's batch, then takes its data-parallel share of each update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batch import packing
from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import MicroBatch, TrajectoryBatch

Compute = Callable[[TrajectoryBatch], Tensor]


def gather(batch: TrajectoryBatch | None, groups: ParallelGroups) -> TrajectoryBatch:
    """Return the whole step's trajectories on every rank. All ranks call it; rollout ranks give theirs, others None.

    Trajectories come in the order of ranks, and `group` numbers are made unique over the rollout ranks. Only names and
    sizes travel as objects; each rollout rank's tensors are one flat broadcast.
    """
    columns = {} if batch is None else batch.columns()
    header = [(key, column.dtype, len(column)) for key, column in columns.items()]
    headers: list[list[tuple[str, torch.dtype, int]]] = [[] for _ in range(groups.world_size)]
    dist.all_gather_object(headers, header, group=groups.control)
    parts: list[TrajectoryBatch] = []
    for rank, layout in enumerate(headers):  # the same order of broadcasts on every rank
        if layout:
            parts.append(_broadcast(columns, layout, rank, groups))
    offset = 0
    for part in parts:  # rollout ranks number their groups each by itself
        part.sequences["group"] = part.sequences["group"] + offset
        offset = int(part.sequences["group"].max()) + 1
    return TrajectoryBatch.cat(parts)


def _broadcast(
    columns: dict[str, Tensor], layout: list[tuple[str, torch.dtype, int]], source: int, groups: ParallelGroups
) -> TrajectoryBatch:
    """Send one rollout rank's columns to every rank as bytes."""
    sizes = [length * dtype.itemsize for _, dtype, length in layout]
    if groups.rank == source:
        flat = torch.cat([columns[key].contiguous().view(torch.uint8) for key, _, _ in layout])
    else:
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(flat, src=source, group=groups.control)
    parts = zip(layout, torch.split(flat, sizes), strict=True)
    # A copy of its own is aligned for its dtype.
    return TrajectoryBatch.from_columns({name: part.clone().view(dtype) for (name, dtype, _), part in parts})


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
    """Pack this rank's share into as many microbatches as the rank that needs most, a multiple of `multiple_of`."""
    options = {"share_prompts": share_prompts, "final_rows": final_rows}
    least = least_alone(batch, tokens_per_microbatch, multiple_of, allow_longer=allow_longer, **options)
    count = torch.tensor([least])
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=groups.control)  # passes hold collectives: as many on every rank
    return packing.pack(batch, tokens_per_microbatch=tokens_per_microbatch, count=int(count), **options)


def least_alone(
    batch: TrajectoryBatch, tokens_per_microbatch: int, multiple_of: int, *, allow_longer: bool, **options: bool
) -> int:
    """Return the fewest microbatches that a rank's share takes, whatever others have; options: as of packing.units."""
    rows = [unit.rows for unit in packing.units(batch, tokens_per_microbatch, **options)]
    return packing.least_microbatches(rows, tokens_per_microbatch, multiple_of=multiple_of, allow_longer=allow_longer)


UNITS_PER_RANK = 16
"""Families are divided until a rank has as many units to choose from, which keeps ranks within some percent."""


def update_shares(
    batch: TrajectoryBatch, updates: int, groups: ParallelGroups, *, seed: int, share_prompts: bool = False
) -> list[TrajectoryBatch]:
    """Split a whole batch into `updates` shuffled parts and return this data-parallel rank's balanced share of each.

    Every rank computes the same split from the same batch; shares of one update differ in cost by one unit at most.
    With `share_prompts` the trajectories of a group stay together as far as even shares allow.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch), generator=generator)
    if share_prompts and "group" in batch:
        prompts, group = torch.unique(batch["group"], return_inverse=True)
        # Prompts are shuffled, and the trajectories of each stay side by side in their order.
        order = torch.randperm(len(prompts), generator=generator)[group].argsort(stable=True)
    shares = []
    # The cuts are by number: a group at a cut is in both parts. So a batch of pairs has one update.
    for chosen in order.tensor_split(updates):
        part = batch.select(sorted(chosen.tolist()))
        most_rows = len(part["input_ids"])  # one rank takes families whole
        if groups.data.size > 1:
            most_rows = max(1, most_rows // (UNITS_PER_RANK * groups.data.size))
        parts = packing.units(part, most_rows, share_prompts=share_prompts)
        own = packing.split_evenly([unit.cost for unit in parts], groups.data.size)[groups.data.rank]
        shares.append(part.select(sorted(index for number in own for index in parts[number].members)))
    return shares


def by_token(
    batch: TrajectoryBatch, groups: ParallelGroups, compute: Compute, *, share_prompts: bool = False
) -> Tensor:
    """Return `compute`'s `[N]` float32 of the whole batch on every rank, each data-parallel rank computing its share.

    All ranks call it with the same batch and an engine of this layout behind `compute`.
    """
    rows = {"row": torch.arange(len(batch["input_ids"]))}  # travels with the tokens and says where results belong
    numbered = dataclasses.replace(batch, tokens=batch.tokens | rows)
    return _computed_by_all(numbered, groups, compute, share_prompts)


def by_sequence(
    batch: TrajectoryBatch, groups: ParallelGroups, compute: Compute, *, share_prompts: bool = False
) -> Tensor:
    """The same for `compute`'s `[B]`, one number per trajectory."""
    numbered = dataclasses.replace(batch, sequences=batch.sequences | {"row": torch.arange(len(batch))})
    return _computed_by_all(numbered, groups, compute, share_prompts)


def _computed_by_all(
    numbered: TrajectoryBatch, groups: ParallelGroups, compute: Compute, share_prompts: bool
) -> Tensor:
    """numbered: has a column `row` that numbers the results."""
    result = torch.zeros(len(numbered["row"]))  # every place is written by one rank, so that their sum is exact
    (share,) = update_shares(numbered, 1, groups, seed=0, share_prompts=share_prompts)
    computed = compute(share)
    if groups.is_rollout_rank:  # of the ranks that computed the same share one contributes
        result[share["row"]] = computed.cpu()
    dist.all_reduce(result, group=groups.control)
    return result
