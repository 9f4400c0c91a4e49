"""Aggregation of the rows' losses into one number: a weight for each row, and the divisor of the sum.

Weights are computed before packing, and the divisor is counted over all microbatches and ranks. So the result does not
depend on how trajectories are divided over them. A mean over trajectories counts those with a trained token.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl.config import AlgorithmConfig
from megatron_rl.types import TrajectoryBatch

DEMONSTRATED = "demonstrated"
"""Name of the token column with the weights of imitated tokens; see algo/demonstrations.py."""


def set_row_weights(batch: TrajectoryBatch, options: AlgorithmConfig) -> None:
    """Set `row_weights` `[N]` float32 for a mean over trajectories.

    sequence_mean is the mean over trajectories of their mean loss (GRPO). sequence_sum is the mean over trajectories of
    their summed loss. constant is sequence_sum divided by algo.aggregation_length (Dr. GRPO, arXiv 2503.20783).
    token_mean (DAPO, arXiv 2503.14476) needs no weights.
    """
    mask = predicted(batch)
    weights = torch.ones(len(mask))
    if options.aggregation == "sequence_mean":
        weights = batch.spread(1.0 / batch.sums_of_tokens(mask).clamp_min(1))
    elif options.aggregation == "constant":
        weights = weights / options.aggregation_length
    batch.tokens["row_weights"] = weights  # the engine then divides by the `trained_sequences` of all ranks


def predicted(batch: TrajectoryBatch) -> Tensor:
    """Return `[N]` int64: 1 for tokens with a policy loss, 0 for imitated and all other tokens."""
    mask = batch["loss_mask"].long()
    if DEMONSTRATED in batch:
        mask = mask * (batch[DEMONSTRATED] == 0)
    mask[batch.cu_seqlens[:-1][batch.cu_seqlens.diff() > 0]] = 0  # nothing predicts a sequence's first token
    return mask


def weight_of(batch: TrajectoryBatch, options: AlgorithmConfig) -> Tensor:
    """Return the divisor of the policy's loss for these trajectories, 0-dim int64.

    With algo.aggregation = token_mean, it is the number of trained tokens. Otherwise it is the number of trajectories
    that have a trained token.
    """
    mask = predicted(batch)
    return mask.sum() if options.aggregation == "token_mean" else (batch.sums_of_tokens(mask) > 0).sum()


def is_trained(rows: TensorDict) -> Tensor:
    """Return which rows of a microbatch have a policy loss, `[T]` bool."""
    trained: Tensor = rows["labels"] >= 0
    if DEMONSTRATED in rows.keys():  # noqa: SIM118
        trained = trained & (rows[DEMONSTRATED] == 0)
    return trained


def trained_tokens(rows: TensorDict) -> Tensor:
    """Return the loss weight for a mean over tokens: the number of rows with a policy loss, 0-dim int64."""
    return is_trained(rows).sum()


def set_positive_weights(batch: TrajectoryBatch, rewards: Tensor, options: AlgorithmConfig) -> float:
    """Set `positive_weights` `[N]` float32: each token's weight of -log p in the loss term of positive trajectories.

    A trajectory is positive if its reward in `rewards`, `[B]`, is at least algo.positive_reward. The loss term is
    algo.positive_weight times the mean of -log p over positive trajectories. The weights are such that their weighted
    sum over the step, divided like the policy's loss, equals this term. Returns the share of the step's tokens, or of
    its trajectories, that are positive, whichever the aggregation counts. Collective: every rank calls it.
    """
    mask = predicted(batch)
    counts = batch.sums_of_tokens(mask)  # [B]
    units = counts if options.aggregation == "token_mean" else (counts > 0).long()
    is_positive = rewards >= options.positive_reward
    positive = int(units[is_positive].sum())
    weight = options.positive_weight * int(units.sum()) / max(positive, 1)
    batch.tokens["positive_weights"] = batch.spread(torch.where(is_positive, weight, 0.0)).float() * mask
    return positive / max(int(units.sum()), 1)


def trained_sequences(rows: TensorDict) -> Tensor:
    """Return the loss weight for means over trajectories: how many sequences have a trained row, 0-dim int64."""
    return (sums_by_sequence(is_trained(rows).long(), rows["cu_seqlens"]) > 0).sum()


def sums_by_sequence(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum a microbatch's rows by sequence, `[T]` -> `[B]`."""
    return values.new_zeros(len(cu_seqlens) - 1).index_add(0, sequence_of_rows(values, cu_seqlens), values)


def sequence_of_rows(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the index of the sequence that contains each row, `[T]` int64."""
    return torch.bucketize(torch.arange(len(values), device=values.device), cu_seqlens[1:].long(), right=True)
