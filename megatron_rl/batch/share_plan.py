"""Plans who trains what: the update of each trajectory of a step, and the replica that computes all passes over it.

The plan is made of numbers of whole trajectories, which every rank has, and not of their tokens. So every rank makes
the same one, before a token has been sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.batch import packing

UNITS_PER_RANK = 16
"""Families are divided until a rank has as many units to choose from, which keeps ranks within some percent."""


def plan_updates(count: int, updates: int, *, seed: int, group: Tensor | None = None) -> Tensor:
    """`[count]` int64: the update that each trajectory is trained in; updates have as many, but for one.

    group: keeps the trajectories of each prompt side by side, as far as even updates allow.
    """
    generator = torch.Generator().manual_seed(seed)
    if group is None:
        order = torch.randperm(count, generator=generator)
    else:
        prompts, number = torch.unique(group, return_inverse=True)
        # Prompts are shuffled, and the trajectories of each stay side by side in their order.
        order = torch.randperm(len(prompts), generator=generator)[number].argsort(stable=True)
    update = torch.empty(count, dtype=torch.int64)
    # The cuts are by number: a group at a cut is in both parts.
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
    """`[B]` int64: the replica that each trajectory is computed on.

    Shares of one update differ in cost by one unit at most, and so do those of all updates. All are `[B]`; begin:
    `packing.beginnings`, where families are computed together; pair: the number of each one's, which stay together.
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
        # The costliest share goes to the replica that has had least, as passes before the updates are over all of them.
        poorest = sorted(range(replicas), key=lambda replica: spent[replica])
        costliest = sorted(range(replicas), key=lambda share: -cost_of[share])
        for replica, share in zip(poorest, costliest, strict=True):
            members = [index for unit in shares[share] for index in parts[unit].members]
            owner[chosen[torch.tensor(members, dtype=torch.int64)]] = replica
            spent[replica] += cost_of[share]
    return owner
