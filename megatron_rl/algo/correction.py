"""The section `correction`, as it acts on tokens that another policy has sampled: their weights, and what is left out.

The operator has its own weights by token and by a sequence's mean for fused losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algo.torch_losses import LossRows, mean_of_sequence, sequence_of_rows, sum_of_sequence
from megatron_rl.config import CorrectionConfig
from megatron_rl.ops.reference import bounded


def behavior_weight(rows: LossRows, correction: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Return each row's p(proximal) / p(behaviour), bounded as `correction` says, and whether it was outside: `[T]`."""
    log_weight = _log_weight(rows)
    if correction.weight == "off":
        return torch.ones_like(log_weight), torch.zeros_like(rows.trained)
    if correction.level != "token":
        assert rows.cu_seqlens is not None
        log_weight = (
            sum_of_sequence(log_weight, rows.cu_seqlens)
            if correction.level == "product"
            else mean_of_sequence(log_weight, rows.trained, rows.cu_seqlens)
        )
    weight = bounded(log_weight).exp()
    is_outside = (weight < correction.low) | (weight > correction.high)
    if correction.weight == "mask":
        return weight.masked_fill(is_outside, 0.0), is_outside
    return weight.clamp(correction.low, correction.high), is_outside


def is_left_out(rows: LossRows, correction: CorrectionConfig) -> Tensor:
    """Return which trained rows lose their advantage, as they are too far from who sampled them: `[T]` bool."""
    left_out = torch.zeros_like(rows.trained)
    if correction.negative_bound > 0:
        assert rows.cu_seqlens is not None
        fallen = rows.behavior_logprobs - rows.logprobs.detach()
        is_far = mean_of_sequence(fallen, rows.trained, rows.cu_seqlens) > correction.negative_bound
        left_out = left_out | (is_far & (rows.advantages < 0))
    if correction.reject != "off":
        left_out = left_out | (_distance(rows, correction).abs() > correction.reject_bound)
    return left_out & rows.trained


def _distance(rows: LossRows, correction: CorrectionConfig) -> Tensor:
    """Each row's estimate of KL(behaviour || proximal), `[T]`, of its token or of its sequence."""
    log_weight = _log_weight(rows)
    near = bounded(log_weight)
    distance = {"k1": -log_weight, "k2": log_weight.square() / 2, "k3": torch.expm1(near) - near}[correction.reject]
    if correction.reject_level == "token":
        return distance
    assert rows.cu_seqlens is not None
    if correction.reject_level == "mean":
        return mean_of_sequence(distance, rows.trained, rows.cu_seqlens)
    if correction.reject_level == "sum":
        return sum_of_sequence(distance, rows.cu_seqlens)
    return largest_of_sequence(distance.abs(), rows.cu_seqlens)


def _log_weight(rows: LossRows) -> Tensor:
    """Return log p(proximal) - log p(behaviour), `[T]`; 0 where it is not finite, which is counted as not_finite."""
    log_weight = (rows.proximal_logprobs - rows.behavior_logprobs).detach()
    return log_weight.masked_fill(~log_weight.isfinite(), 0.0)


def largest_of_sequence(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return for each row the largest value, at least 0, of its sequence's rows, `[T]`."""
    sequence = sequence_of_rows(values, cu_seqlens)
    return values.new_zeros(len(cu_seqlens) - 1).scatter_reduce(0, sequence, values, "amax")[sequence]
