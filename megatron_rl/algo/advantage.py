"""Advantages of whole trajectories. `rewards` and `group` are `[B]`; results are `[B]` float32, one per trajectory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.types import TrajectoryBatch


def group_norm(rewards: Tensor, group: Tensor, *, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) within each group (GRPO, arXiv 2402.03300); without the division Dr. GRPO's numerator.

    The standard deviation is the sample's (n - 1). A group of one, or without variance, gives 0.
    """
    member = torch.unique(group, return_inverse=True)[1]
    count = torch.zeros(int(member.max()) + 1).index_add(0, member, torch.ones_like(rewards))
    mean = torch.zeros_like(count).index_add(0, member, rewards) / count
    centered = rewards - mean[member]
    if not normalize_std:
        return centered
    variance = torch.zeros_like(count).index_add(0, member, centered.square()) / (count - 1).clamp_min(1.0)
    return centered / (variance.sqrt()[member] + eps)


def reinforce(rewards: Tensor) -> Tensor:
    """The reward itself (Williams, 1992), undiscounted."""
    return rewards.clone()


def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """r - r(greedy reply) (ReMax, arXiv 2310.10505)."""
    return rewards - greedy_rewards


def _remax(batch: TrajectoryBatch, _: bool) -> Tensor:
    if "greedy_reward" not in batch:
        raise ValueError(
            f"algo.advantage = remax: the trajectories carry {sorted(batch.sequences)} and no greedy_reward; use a "
            f"workflow "
            f"that reports it, e.g. megatron_rl.rollout.workflows:ReMaxWorkflow."
        )
    return remax(batch["rewards"], batch["greedy_reward"])


ESTIMATORS: dict[str, Callable[[TrajectoryBatch, bool], Tensor]] = {
    "group_norm": lambda batch, normalize_std: group_norm(
        batch["rewards"], batch["group"], normalize_std=normalize_std
    ),
    "reinforce": lambda batch, _: reinforce(batch["rewards"]),
    "remax": _remax,
}


def compute(name: str, batch: TrajectoryBatch, *, normalize_std: bool) -> None:
    """Set `batch.tokens["advantages"]` `[N]`: every token of a trajectory has the trajectory's advantage."""
    advantages = ESTIMATORS[name](batch, normalize_std)
    batch.tokens["advantages"] = advantages[batch.sequence_ids].float()
