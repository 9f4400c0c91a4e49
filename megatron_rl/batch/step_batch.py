"""A rank's view of a step: numbers of all trajectories, and the tokens of those that its replica trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import routes
from megatron_rl.batch import delivery, packing, share_plan
from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import TrajectoryBatch, prefix_sums


@dataclass(frozen=True, kw_only=True)
class SharePlan:
    """The plan of a step: the update and the replica that train each trajectory; the same on all ranks.

    All tensors are `[B]` int64.
    """

    groups: ParallelGroups
    updates: int
    lengths: Tensor  # in tokens
    update: Tensor  # the update that each trajectory is trained in, or `updates` if it is only scored
    owner: Tensor  # the data-parallel rank of `groups` that computes all passes over each trajectory
    group: Tensor  # number of each trajectory's prompt
    begin: Tensor | None = None  # packing.beginnings, if families are computed together

    def in_layout(self, groups: ParallelGroups) -> SharePlan:
        """Return a plan for the replicas of another layout. The trajectories keep their updates."""
        columns = {"group": self.group, "begin": self.begin}
        owner = share_plan.plan_owners(self.update, self.lengths, groups.data.size, **columns)
        return replace(self, groups=groups, owner=owner)

    def select(self, order: Tensor) -> SharePlan:
        begin = None if self.begin is None else packing.selected_beginnings(self.begin, self.group, order)
        return replace(
            self,
            lengths=self.lengths[order],
            update=self.update[order],
            owner=self.owner[order],
            group=self.group[order],
            begin=begin,
        )


@dataclass(kw_only=True)
class StepBatch(TrajectoryBatch):
    """The trajectories of a step. On each rank `sequences` covers all of them, `tokens` only those of its replica.

        batch = exchange.share_out(own, groups, updates=2, seed=step)
        batch["rewards"]      # [B], of the whole step, the same on every rank
        batch["input_ids"]    # [N], of the trajectories that this replica trains, whichever update they are in
        batch.spread(values)  # [B] -> [N]
        for share in batch.shares():  # a TrajectoryBatch for each update
            engine.train_batch(share, loss)

    In `cu_seqlens` a trajectory without tokens on this rank has length 0; `lengths` has the true lengths. Per-token
    results cover the tokens on this rank. `sums_of_tokens` covers all trajectories, because replicas exchange their
    sums. Each sum is taken within one trajectory in token order, so it does not depend on the layout.
    """

    plan: SharePlan
    _in_layouts: dict[int, StepBatch] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of_tokens(cls, own: TrajectoryBatch, sequences: dict[str, Tensor], plan: SharePlan, **more: Any) -> Self:
        """Build the batch from a plan. own: the trajectories of this replica with their tokens, in the step's order."""
        here = plan.lengths.where(plan.owner == plan.groups.data.rank, 0)
        return cls(**_fields(own) | {"sequences": sequences, "cu_seqlens": prefix_sums(here)}, plan=plan, **more)

    @property
    def lengths(self) -> Tensor:
        return self.plan.lengths

    @property
    def _is_here(self) -> Tensor:
        return self.plan.owner == self.plan.groups.data.rank  # [B]

    def select(self, indices: Any) -> StepBatch:
        order = torch.as_tensor(list(indices), dtype=torch.int64)
        chosen = super().select(order.tolist())
        return StepBatch(**_fields(chosen), plan=self.plan.select(order))

    def completed(self, values: Tensor) -> Tensor:
        plan = self.plan
        counts = torch.bincount(plan.owner, minlength=plan.groups.data.size).tolist()
        own = values[self._is_here].contiguous().view(torch.uint8)
        size = values.dtype.itemsize
        found = delivery.gather(own, [count * size for count in counts], plan.groups).view(values.dtype)
        result = torch.empty_like(values)
        result[plan.owner.argsort(stable=True)] = found  # found is ordered by replica, then by trajectory
        return result

    def total(self, counts: Tensor) -> Tensor:
        groups = self.plan.groups
        counted = counts.clone() if groups.is_rollout_rank else torch.zeros_like(counts)
        dist.all_reduce(counted, group=groups.control)
        return counted

    def own(self) -> TrajectoryBatch:
        here = self._is_here
        sequences = {key: column[here] for key, column in self.sequences.items()}
        return TrajectoryBatch(
            **_fields(self) | {"sequences": sequences, "cu_seqlens": prefix_sums(self.lengths[here])}
        )

    def by_sequence(self, compute: Callable[[TrajectoryBatch], Tensor]) -> Tensor:
        """Let every replica apply `compute` to its own trajectories. Returns the values of all, `[B]` float32.

        `compute` returns one value for each trajectory of the batch that it gets.
        """
        found = torch.zeros(len(self))
        found[self._is_here] = compute(self.own()).cpu().float()
        return self.completed(found)

    def shares(self) -> list[TrajectoryBatch]:
        """Return, for each update, the trajectories that this rank's replica trains in it."""
        plan, here = self.plan, self._is_here
        chosen = [(here & (plan.update == number)).nonzero()[:, 0].tolist() for number in range(plan.updates)]
        return [TrajectoryBatch.select(self, indices) for indices in chosen]

    def shown(self, indices: list[int]) -> TrajectoryBatch:
        chosen = self.select(indices)
        goes_to = torch.zeros(len(indices), dtype=torch.int64)  # the main rank is in the first replica
        tokens = _delivered(chosen, self.plan.groups, goes_to)
        if self.plan.groups.data.rank != 0:
            return chosen.own()
        return replace(tokens, sequences=chosen.sequences)

    # -- other layouts ------------------------------------------------------------------------------------------------

    def in_layout(self, groups: ParallelGroups) -> StepBatch:
        """Return the same step distributed for another layout. The first call for a layout sends the tokens."""
        if groups is self.plan.groups:
            return self
        if id(groups) not in self._in_layouts:
            there = self.plan.in_layout(groups)
            # Only the policy replays routes. Other models use their own routing.
            columns = {key: column for key, column in self.tokens.items() if key != routes.COLUMN}
            tokens = _delivered(replace(self, tokens=columns), groups, there.owner)
            self._in_layouts[id(groups)] = StepBatch.of_tokens(tokens, self.sequences, there)
        return self._in_layouts[id(groups)]

    def taken_from(self, other: StepBatch, column: Tensor) -> Tensor:
        """Bring a per-token column `[N]` of `other` to this batch. `other` is the same step in another layout."""
        if other is self:
            return column
        one = TrajectoryBatch({"column": column}, {}, other.cu_seqlens)
        moved = StepBatch(**_fields(one), plan=other.plan)
        return _delivered(moved, self.plan.groups, self.plan.owner)["column"]


def _fields(batch: TrajectoryBatch) -> dict[str, Any]:
    return {entry.name: getattr(batch, entry.name) for entry in fields(TrajectoryBatch)}


def _delivered(batch: StepBatch, groups: ParallelGroups, owner: Tensor) -> TrajectoryBatch:
    """Send the tokens of a batch to the replicas of `groups`. owner: `[B]`, the replica that gets each trajectory."""
    leaders = torch.tensor([ranks[0] for ranks in batch.plan.groups.replicas])
    plan = {"lengths": batch.lengths, "sender": leaders[batch.plan.owner], "owner": owner}
    return delivery.deliver(batch.own(), delivery.token_layout(batch), **plan, groups=groups)
