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


def set_row_weights(batch: TrajectoryBatch, options: AlgorithmConfig) -> None:
    """Set `row_weights` `[N]` float32 for a mean over trajectories.

    sequence_mean: of each one's mean (GRPO). sequence_sum: of each one's sum. constant: of that over
    algo.aggregation_length (Dr. GRPO, arXiv 2503.20783). token_mean, the mean over all tokens (DAPO, arXiv 2503.14476),
    needs no weights.
    """
    mask = batch["loss_mask"].long()
    weights = torch.ones(len(mask))
    if options.aggregation == "sequence_mean":
        mask[batch.cu_seqlens[:-1][batch.lengths > 0]] = 0  # nothing predicts a sequence's first token
        weights = batch.spread(1.0 / batch.sums_of_tokens(mask).clamp_min(1))
    elif options.aggregation == "constant":
        weights = weights / options.aggregation_length
    batch.tokens["row_weights"] = weights  # the engine then divides by the `trained_sequences` of all ranks


def trained_sequences(rows: TensorDict) -> Tensor:
    """The loss weight of means over trajectories: how many of a microbatch's have a trained row, 0-dim int64."""
    return (sums_by_sequence((rows["labels"] >= 0).long(), rows) > 0).sum()


def sums_by_sequence(values: Tensor, rows: TensorDict) -> Tensor:
    """Add up a microbatch's rows, `[T]` -> `[B]`, one sum for each sequence."""
    bounds = rows["cu_seqlens"].long()
    # Row t belongs to the first sequence that ends above t.
    sequence = torch.bucketize(torch.arange(len(values), device=values.device), bounds[1:], right=True)  # [T]
    sums = torch.zeros(len(bounds) - 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, sequence, values)
