"""Plan of a step: the update that trains each trajectory, and the replica that computes all passes over it.

The plan uses only numbers of whole trajectories, which every rank has, and no tokens. So every rank computes the same
plan before any token is sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.batch import packing

UNITS_PER_RANK = 16
"""Families are divided until there are about this many units per rank, which balances ranks within a few percent."""


def plan_updates(count: int, updates: int, *, seed: int, group: Tensor | None = None) -> Tensor:
    """Assign each trajectory to an update: `[count]` int64. The sizes of updates differ by at most one.

    group: the prompt number of each trajectory. If it is given, the trajectories of a prompt go to the same update,
    except where the boundary between two updates divides a prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    if group is None:
        order = torch.randperm(count, generator=generator)
    else:
        prompts, number = torch.unique(group, return_inverse=True)
        # Shuffle prompts; the trajectories of each stay adjacent, in their order.
        order = torch.randperm(len(prompts), generator=generator)[number].argsort(stable=True)
    update = torch.empty(count, dtype=torch.int64)
    for number, chosen in enumerate(order.tensor_split(updates)):
        update[chosen] = number
    return update


def plan_owners(
    update: Tensor,
    lengths: Tensor,
    replicas: int,
    *,
    group: Tensor | None = None,
    begin: Tensor | None = None,
    pair: Tensor | None = None,
) -> Tensor:
    """Assign each trajectory to a replica: `[B]` int64.

    A unit is a set of trajectories computed together (`packing.Unit`). The costs of two replicas differ by at most the
    cost of one unit, both within an update and over all updates. All tensors are `[B]`.
    begin: the result of `packing.beginnings`, if families are computed together.
    pair: pair numbers. The two replies of a pair go to the same replica.
    """
    owner = torch.zeros(len(update), dtype=torch.int64)
    if replicas == 1:
        return owner
    spent = [0.0] * replicas
    for number in sorted(set(update.tolist())):
        chosen = (update == number).nonzero()[:, 0]
        own = lengths[chosen]
        families = []
        if begin is not None and group is not None:
            own_begin = packing.selected_beginnings(begin, group, chosen)
            families = packing.families_of(own, group[chosen], own_begin)
        most_rows = max(1, int(own.sum()) // (UNITS_PER_RANK * replicas))
        parts = packing.divide(own.tolist(), families, None if pair is None else pair[chosen], most_rows)
        costs = [unit.cost for unit in parts]
        shares = packing.split_evenly(costs, replicas)
        cost_of = [sum(costs[unit] for unit in share) for share in shares]
        # The costliest share goes to the replica with the least so far, as passes before the updates cover all of them.
        poorest = sorted(range(replicas), key=lambda replica: spent[replica])
        costliest = sorted(range(replicas), key=lambda share: -cost_of[share])
        for replica, share in zip(poorest, costliest, strict=True):
            members = [index for unit in shares[share] for index in parts[unit].members]
            owner[chosen[torch.tensor(members, dtype=torch.int64)]] = replica
            spent[replica] += cost_of[share]
    return owner
