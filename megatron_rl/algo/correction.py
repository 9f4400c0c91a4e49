"""Off-policy correction from the section `correction`: importance weights and rejection of tokens.

For fused losses, the operator `ops.ppo_loss` computes the weights itself if correction.level is token or sequence.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from megatron_rl.algo.aggregation import sequence_of_rows
from megatron_rl.algo.torch_losses import LossRows, mean_of_sequence, sum_of_sequence
from megatron_rl.config import CorrectionConfig
from megatron_rl.ops.reference import bounded


def behavior_weight(rows: LossRows, correction: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Return each row's weight p(proximal) / p(behaviour), `[T]`, and whether it was out of bounds, `[T]` bool.

    A row whose log weight is infinite is out of bounds. A row whose log weight is NaN has weight 0.
    """
    log_weight, unknown = log_weights(rows)
    if correction.weight == "off":
        return torch.ones_like(log_weight), torch.zeros_like(rows.trained)
    if correction.level != "token":
        assert rows.cu_seqlens is not None
        log_weight = (
            sum_of_sequence(log_weight, rows.cu_seqlens)
            if correction.level == "product"
            else mean_of_sequence(log_weight, rows.trained & ~unknown, rows.cu_seqlens)
        )
    weight = bounded(log_weight).exp()
    unknown = unknown | weight.isnan()  # +inf and -inf in one sequence
    is_outside = unknown | (weight < correction.low) | (weight > correction.high)
    if correction.weight == "mask":
        return weight.masked_fill(is_outside, 0.0), is_outside
    return weight.clamp(correction.low, correction.high).masked_fill(unknown, 0.0), is_outside


def is_left_out(rows: LossRows, correction: CorrectionConfig) -> Tensor:
    """Return which trained rows lose their advantage because they are too far from the behaviour policy: `[T]` bool.

    `negative_bound` rejects whole sequences, as in DeepSeek-V3.2 (arXiv 2512.02556). It rejects a sequence if its mean
    distance exceeds the bound and its advantages have a negative sum.
    """
    left_out = log_weights(rows)[1]  # rows whose weight is NaN are always rejected
    if correction.negative_bound > 0:
        assert rows.cu_seqlens is not None
        fallen = rows.behavior_logprobs - rows.logprobs.detach()
        known = rows.trained & ~fallen.isnan()
        is_far = mean_of_sequence(fallen.masked_fill(~known, 0.0), known, rows.cu_seqlens) > correction.negative_bound
        is_negative = sum_of_sequence(rows.advantages, rows.cu_seqlens) < 0
        left_out = left_out | (is_far & is_negative)
    if correction.reject != "off":
        is_near = _distance(rows, correction).abs() <= correction.reject_bound  # False for NaN
        left_out = left_out | ~is_near
    return left_out & rows.trained


def _distance(rows: LossRows, correction: CorrectionConfig) -> Tensor:
    """Return each row's estimate of KL(behaviour || proximal), `[T]`.

    With correction.reject_level = token it is the estimate for the row's token, otherwise one for the whole sequence.
    """
    log_weight, unknown = log_weights(rows)
    near = bounded(log_weight)
    k3 = (torch.expm1(near) - near).masked_fill(log_weight.isinf(), inf)
    distance = {"k1": -log_weight, "k2": log_weight.square() / 2, "k3": k3}[correction.reject]
    if correction.reject_level == "token":
        return distance
    assert rows.cu_seqlens is not None
    if correction.reject_level == "mean":
        return mean_of_sequence(distance, rows.trained & ~unknown, rows.cu_seqlens)
    if correction.reject_level == "sum":
        return sum_of_sequence(distance, rows.cu_seqlens)
    sequence = sequence_of_rows(distance, rows.cu_seqlens)
    largest = distance.new_zeros(len(rows.cu_seqlens) - 1).scatter_reduce(0, sequence, distance.abs(), "amax")
    return largest[sequence]


def log_weights(rows: LossRows) -> tuple[Tensor, Tensor]:
    """Return log p(proximal) - log p(behaviour) of each row, `[T]`, and a mask of the rows where it is NaN, `[T]` bool.

    NaN is replaced by 0.
    """
    log_weight = (rows.proximal_logprobs - rows.behavior_logprobs).detach()
    unknown = log_weight.isnan()
    return log_weight.masked_fill(unknown, 0.0), unknown
