"""Sends bytes to the ranks that need them, over the control process group.

A rank receives each byte once. Bytes go from the first rank of one replica to the first rank of another, and from there
to the replica's other ranks along a binary tree. Every function is collective: all ranks call it with the same plan.
Sizes that follow from the plan are not communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import TrajectoryBatch, prefix_sums

Layout = list[tuple[str, torch.dtype, tuple[int, ...]]]
"""Name (as in TrajectoryBatch.columns), dtype and per-entry shape of each token column; the same on all ranks."""


def token_layout(batch: TrajectoryBatch) -> Layout:
    columns = batch.columns().items()
    found = [(name, column) for name, column in columns if name.partition(".")[0] in ("tokens", "versions")]
    return sorted((name, column.dtype, tuple(column.shape[1:])) for name, column in found)


def gather(own: Tensor, sizes: Sequence[int], groups: ParallelGroups) -> Tensor:
    """Return the bytes of all replicas, concatenated, on every rank.

    own: this replica's bytes, as uint8. They are read only on the replica's first rank.
    sizes: the number of bytes of each replica.

    Each round doubles the number of replicas whose bytes a first rank has. No byte is sent to a rank twice.
    """
    place, leaders = groups.data.rank, [ranks[0] for ranks in groups.replicas]
    if groups.rank != leaders[place]:
        return spread(torch.empty(sum(sizes), dtype=torch.uint8), groups)
    blocks = [own]  # of this replica and the following ones, cyclically
    while (known := len(blocks)) < len(sizes):
        count = min(known, len(sizes) - known)
        expected = [sizes[(place + known + number) % len(sizes)] for number in range(count)]
        outgoing, incoming = torch.cat(blocks[:count]), torch.empty(sum(expected), dtype=torch.uint8)
        to, source = leaders[(place - known) % len(sizes)], leaders[(place + known) % len(sizes)]
        _wait([*_send(outgoing, to, groups), *_receive(incoming, source, groups)])
        blocks += torch.split(incoming, expected)
    return spread(torch.cat([blocks[(number - place) % len(sizes)] for number in range(len(sizes))]), groups)


def spread(flat: Tensor, groups: ParallelGroups) -> Tensor:
    """Broadcast `flat` from the first rank of each replica to its other ranks, in place, and return it."""
    ranks = groups.replicas[groups.data.rank]
    place = ranks.index(groups.rank)
    if place > 0:
        _wait(_receive(flat, ranks[(place - 1) // 2], groups))
    children = ranks[2 * place + 1 : 2 * place + 3]
    _wait([work for child in children for work in _send(flat, child, groups)])
    return flat


def deliver(
    held: TrajectoryBatch, layout: Layout, *, lengths: Tensor, sender: Tensor, owner: Tensor, groups: ParallelGroups
) -> TrajectoryBatch:
    """Send trajectories' tokens to the replicas of `groups`, and return those that this rank's replica receives.

    The result is in the order of the step's trajectories.
    held: the trajectories that this rank sends, in the order of the step. Ranks that send nothing may pass anything.
    lengths: `[B]`, the number of tokens of each trajectory of the step.
    sender: `[B]`, the rank that holds each trajectory.
    owner: `[B]`, the replica that receives each trajectory.
    """
    ranks = groups.replicas[groups.data.rank]
    parts: dict[int, TrajectoryBatch] = {}
    if bool((sender == groups.rank).any()):
        goes_to = owner[sender == groups.rank]
        for replica in sorted(set(goes_to.tolist())):
            parts[groups.replicas[replica][0]] = held.select((goes_to == replica).nonzero()[:, 0].tolist())
    wanted = (owner == groups.data.rank).nonzero()[:, 0]
    from_ranks = sorted(set(sender[wanted].tolist())) if groups.rank == ranks[0] else []
    others = {rank: _flat(part, layout) for rank, part in parts.items() if rank != groups.rank}
    found = _swapped(others, from_ranks, layout, groups)
    batches, order = [], []
    for rank in from_ranks:
        of_rank = wanted[sender[wanted] == rank]
        order.append(of_rank)
        batches.append(parts[rank] if rank == groups.rank else _unflat(*found[rank], layout, lengths[of_rank]))
    sizes, flat = torch.zeros(len(layout), dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
    if batches:
        joined = TrajectoryBatch.cat([replace(batch, sequences={}) for batch in batches])
        places = torch.cat(order)
        if bool((places.diff() < 0).any()):
            joined = joined.select(places.argsort().tolist())
        if len(ranks) == 1:
            return joined
        sizes, flat = _flat(joined, layout)
    spread(sizes, groups)
    if groups.rank != ranks[0]:
        flat = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    return _unflat(sizes, spread(flat, groups), layout, lengths[wanted])


def _swapped(
    parts: dict[int, tuple[Tensor, Tensor]], from_ranks: list[int], layout: Layout, groups: ParallelGroups
) -> dict[int, tuple[Tensor, Tensor]]:
    """Send each rank its entry of `parts`, and return what the other ranks of `from_ranks` sent, by rank.

    A part is a pair of tensors: the size of each column in bytes, and the bytes of all columns.
    """
    found = {rank: torch.empty(len(layout), dtype=torch.int64) for rank in from_ranks if rank != groups.rank}
    works = [work for rank, (sizes, _) in parts.items() for work in _send(sizes, rank, groups)]
    _wait([*works, *(work for rank, sizes in found.items() for work in _receive(sizes, rank, groups))])
    bytes_of = {rank: torch.empty(int(sizes.sum()), dtype=torch.uint8) for rank, sizes in found.items()}
    works = [work for rank, (_, flat) in parts.items() for work in _send(flat, rank, groups)]
    _wait([*works, *(work for rank, flat in bytes_of.items() for work in _receive(flat, rank, groups))])
    return {rank: (found[rank], bytes_of[rank]) for rank in found}


def _flat(batch: TrajectoryBatch, layout: Layout) -> tuple[Tensor, Tensor]:
    columns = batch.columns()
    parts = [columns[name].contiguous().flatten().view(torch.uint8) for name, _, _ in layout]
    return torch.tensor([len(part) for part in parts]), torch.cat(parts)


def _unflat(sizes: Tensor, flat: Tensor, layout: Layout, lengths: Tensor) -> TrajectoryBatch:
    parts = zip(layout, torch.split(flat, sizes.tolist()), strict=True)
    # The clone is aligned for its dtype.
    columns = {name: part.clone().view(dtype).view(-1, *entry) for (name, dtype, entry), part in parts}
    return TrajectoryBatch.from_columns(columns | {"cu_seqlens": prefix_sums(lengths)})


Works = list[dist.Work | None]


def _send(flat: Tensor, rank: int, groups: ParallelGroups) -> Works:
    return [dist.isend(flat, rank, group=groups.control)] if flat.numel() else []


def _receive(flat: Tensor, rank: int, groups: ParallelGroups) -> Works:
    return [dist.irecv(flat, rank, group=groups.control)] if flat.numel() else []


def _wait(works: Works) -> None:
    for work in works:
        assert work is not None, "this rank is in the group of all ranks"
        work.wait()
