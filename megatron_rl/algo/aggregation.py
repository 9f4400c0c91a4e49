"""From the rows' losses to one number: a weight for each row, and the divisor of the sum.

The weights are made of whole trajectories before they are packed, and the divisor is counted over all microbatches and
ranks; so the result depends on neither. A trajectory counts where it has a trained token.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl.config import AlgorithmConfig
from megatron_rl.types import TrajectoryBatch

DEMONSTRATED = "demonstrated"
"""The column of tokens that are imitated, with their weights: algo/demonstrations.py."""


def set_row_weights(batch: TrajectoryBatch, options: AlgorithmConfig) -> None:
    """Set `row_weights` `[N]` float32 for a mean over trajectories.

    sequence_mean: of each one's mean (GRPO). sequence_sum: of each one's sum. constant: of that over
    algo.aggregation_length (Dr. GRPO, arXiv 2503.20783). token_mean, the mean over all tokens (DAPO, arXiv 2503.14476),
    needs no weights.
    """
    mask = predicted(batch)
    weights = torch.ones(len(mask))
    if options.aggregation == "sequence_mean":
        weights = batch.spread(1.0 / batch.sums_of_tokens(mask).clamp_min(1))
    elif options.aggregation == "constant":
        weights = weights / options.aggregation_length
    batch.tokens["row_weights"] = weights  # the engine then divides by the `trained_sequences` of all ranks


def predicted(batch: TrajectoryBatch) -> Tensor:
    """`[N]` int64: 1 for the tokens that the policy's loss is of, 0 for others and for those to be imitated."""
    mask = batch["loss_mask"].long()
    if DEMONSTRATED in batch:
        mask = mask * (batch[DEMONSTRATED] == 0)
    mask[batch.cu_seqlens[:-1][batch.cu_seqlens.diff() > 0]] = 0  # nothing predicts a sequence's first token
    return mask


def weight_of(batch: TrajectoryBatch, options: AlgorithmConfig) -> Tensor:
    """Return what the engine divides the policy's loss by, counted over these trajectories, 0-dim int64."""
    mask = predicted(batch)
    return mask.sum() if options.aggregation == "token_mean" else (batch.sums_of_tokens(mask) > 0).sum()


def is_trained(rows: TensorDict) -> Tensor:
    """`[T]` bool: the rows of a microbatch that the policy's loss is of."""
    trained: Tensor = rows["labels"] >= 0
    if DEMONSTRATED in rows.keys():  # noqa: SIM118
        trained = trained & (rows[DEMONSTRATED] == 0)
    return trained


def trained_tokens(rows: TensorDict) -> Tensor:
    """The loss weight of a mean over tokens: how many of a microbatch's the policy's loss is of, 0-dim int64."""
    return is_trained(rows).sum()


def set_positive_weights(batch: TrajectoryBatch, rewards: Tensor, options: AlgorithmConfig) -> float:
    """Set `positive_weights` `[N]` float32: the weight of each token's -log p in the term of positive trajectories.

    With them the sum over the step, divided as the policy's loss is, is algo.positive_weight times the mean over the
    trajectories with rewards `[B]` of algo.positive_reward or more. Return their share, of tokens or trajectories as
    the aggregation counts. The batch is the whole step's; all ranks call it.
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
    """The loss weight of means over trajectories: how many of a microbatch's have a trained row, 0-dim int64."""
    return (sums_by_sequence(is_trained(rows).long(), rows) > 0).sum()


def sums_by_sequence(values: Tensor, rows: TensorDict) -> Tensor:
    """Add up a microbatch's rows, `[T]` -> `[B]`, one sum for each sequence."""
    bounds = rows["cu_seqlens"].long()
    # Row t belongs to the first sequence that ends above t.
    sequence = torch.bucketize(torch.arange(len(values), device=values.device), bounds[1:], right=True)  # [T]
    sums = torch.zeros(len(bounds) - 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, sequence, values)
