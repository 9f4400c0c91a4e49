"""What stands around `ops.packed_gae`: rewards per token before it, whitened advantages after it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.types import TrajectoryBatch


def rewards_at_the_end(batch: TrajectoryBatch) -> Tensor:
    """Return `[N]` float32: each trajectory's reward on its last trained token. One without any gets none."""
    trained = batch["loss_mask"].nonzero()[:, 0]
    sequence = batch.sequence_ids[trained]
    is_last = torch.ones(len(trained), dtype=torch.bool)
    is_last[:-1] = sequence[1:] != sequence[:-1]
    rewards = torch.zeros(len(batch["loss_mask"]))
    rewards[trained[is_last]] = batch["rewards"][sequence[is_last]].float()
    return rewards


def whiten(advantages: Tensor, mask: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(A - mean) / (std + eps) over the trained tokens of the whole batch, 0 elsewhere; std is the population's."""
    trained = advantages[mask].double()
    result = torch.zeros_like(advantages)
    if len(trained) > 0:
        result[mask] = ((trained - trained.mean()) / (trained.std(correction=0) + eps)).to(advantages.dtype)
    return result
