"""Which tokens' advantages count: masks over the whole step's batch, from one pass of the policy before its updates.

A token that is left out has advantage 0; it stays in the denominator, and KL and entropy terms hold for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.types import TrajectoryBatch


def high_entropy(batch: TrajectoryBatch, *, share: float, level: str) -> Tensor:
    """Keep the `share` of trained tokens with the highest entropy, of each sequence or of the batch: `[N]` bool.

    ceil(share n) of n tokens; of equal ones the earlier. `entropies` are the policy's before the step's updates.
    Source: arXiv 2506.01939
    """
    trained = batch["loss_mask"].nonzero()[:, 0]
    sequence = batch.sequence_ids[trained] if level == "sequence" else torch.zeros_like(trained)
    by_entropy = batch["entropies"][trained].argsort(descending=True, stable=True)
    order = by_entropy[sequence[by_entropy].argsort(stable=True)]  # within each sequence, the highest first
    count = torch.bincount(sequence)
    rank = torch.arange(len(order)) - (count.cumsum(0) - count)[sequence[order]]  # place within the sequence
    kept = torch.zeros(len(batch["loss_mask"]), dtype=torch.bool)
    # The product is rounded first: 0.2 * 5 is a little more than 1 in floating point.
    most = (share * count.double()).mul(1e9).round().div(1e9).ceil().long()
    kept[trained[order[rank < most[sequence[order]]]]] = True
    return kept


def second_moment(batch: TrajectoryBatch, *, bound: float = 0.04) -> Tensor:
    """Keep the trained tokens but those with the largest d^2 until its mean over the kept is `bound` at most.

    d = log p(policy before the updates) - log p(behaviour policy): `[N]` bool.
    Source: arXiv 2510.01161
    """
    trained = batch["loss_mask"].nonzero()[:, 0]
    moment = (batch["proximal_logprobs"] - batch["logprobs"])[trained].double().square()
    moment = moment.nan_to_num(nan=torch.inf)  # sorted last: left out, and out of the mean of those kept
    ascending, order = moment.sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(order) + 1)
    kept = torch.zeros(len(batch["loss_mask"]), dtype=torch.bool)
    kept[trained[order[means <= bound]]] = True  # the mean rises with every token, so these are the first ones
    return kept


def keep(batch: TrajectoryBatch, kept: Tensor) -> float:
    """Set the advantages of the other tokens to 0; return the share of trained tokens that is kept."""
    batch.tokens["advantages"] = batch["advantages"].masked_fill(~kept, 0.0)
    trained = batch["loss_mask"]
    return float((kept & trained).sum() / trained.sum().clamp_min(1))
