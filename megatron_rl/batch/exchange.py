"""Moves trajectories between ranks.

Every rank gets the step's batch, then takes its data-parallel share of each update.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.batch import packing
from megatron_rl.batch.packing import estimated_cost, split_evenly
from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import MicroBatch, TrajectoryBatch


def gather(batch: TrajectoryBatch | None, groups: ParallelGroups) -> TrajectoryBatch:
    """Return the whole step's trajectories on every rank. All ranks call it; data heads give theirs, others None.

    Trajectories come in the order of the data axis, and `group` numbers are made unique over the heads.
    """
    parts: list[TrajectoryBatch | None] = [None] * groups.world_size
    dist.all_gather_object(parts, batch, group=groups.control)
    present = [part for part in parts if part is not None]
    offset = 0
    for part in present:
        part.sequences["group"] = part.sequences["group"] + offset
        offset = int(part.sequences["group"].max()) + 1
    return TrajectoryBatch.cat(present)


def pack_alike(
    batch: TrajectoryBatch,
    groups: ParallelGroups,
    *,
    tokens_per_microbatch: int,
    allow_longer: bool = True,
    multiple_of: int = 1,
) -> list[MicroBatch]:
    """Pack this rank's share into as many microbatches as the rank that needs most, a multiple of `multiple_of`."""
    least = packing.least_microbatches(
        batch.lengths.tolist(), tokens_per_microbatch, multiple_of=multiple_of, allow_longer=allow_longer
    )
    count = torch.tensor([least])
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=groups.control)
    return packing.pack(batch, tokens_per_microbatch=tokens_per_microbatch, count=int(count))


def update_shares(batch: TrajectoryBatch, updates: int, groups: ParallelGroups, *, seed: int) -> list[TrajectoryBatch]:
    """Split a whole batch into `updates` shuffled parts and return this data-parallel rank's balanced share of each.

    Every rank computes the same split from the same batch; shares of one update differ in cost by one sequence at most.
    """
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    shares = []
    for chosen in order.tensor_split(updates):
        part = batch.select(sorted(chosen.tolist()))
        costs = estimated_cost(part.lengths.double()).tolist()
        shares.append(part.select(split_evenly(costs, groups.data.size)[groups.data.rank]))
    return shares
