"""Policy losses: what each row's loss is, before KL and entropy terms, behaviour weights and aggregation.

u is p(policy) / p(proximal) of a row, A its advantage. Those that large runs train with are fused: one pass of the
operator over the rows makes loss, gradient and statistics, in the chunks of the output layer where they look at single
rows. The others are plain torch on `[T]` tensors, which are small beside the logits, and take the same chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log, log1p
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algo.registry import loss
from megatron_rl.algo.selection import second_moment
from megatron_rl.config import AlgorithmConfig, CorrectionConfig
from megatron_rl.ops.reference import bounded


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """What a loss in plain torch sees: `[T]` tensors of one float dtype, row t describes the prediction of `labels[t]`.

    Rows that are not trained hold 0, and what a loss returns for them is not read.
    """

    logprobs: Tensor
    """With gradient."""
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    trained: Tensor
    """bool."""
    cu_seqlens: Tensor | None
    """`[B + 1]` int64 bounds of whole sequences, for a loss that is declared by_sequence."""

    @property
    def log_ratio(self) -> Tensor:
        """log u."""
        return self.logprobs - self.proximal_logprobs

    @property
    def ratio(self) -> Tensor:
        """u, with log u at most LOG_RATIO_BOUND from 0: beyond it has no gradient."""
        return bounded(self.log_ratio).exp()


@loss("ppo_clip", fused=True)
def ppo_clip(options: AlgorithmConfig) -> dict[str, Any]:
    """max(-A u, -A clip(u, 1 - clip_low, 1 + clip_high)), at most -dual_clip A where A < 0.

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476), dual_clip > 0 the dual clip (arXiv 1912.09729); with
    the section `correction` it is decoupled PPO (arXiv 2505.24298).
    Source: arXiv 1707.06347
    """
    return {"clip_low": options.clip_low, "clip_high": options.clip_high, "dual_clip": options.dual_clip}


@loss("gspo", fused=True)
def gspo(options: AlgorithmConfig) -> dict[str, Any]:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s the geometric mean of u over the sequence.

    The slope of s in a token's log p is s, as if it were the token's own ratio: the paper's GSPO-token. It is GSPO
    where A and the behaviour weight are the same for all tokens of a sequence; elsewhere each token is moved by its
    own, and one that is left out is not. The paper clips at 3e-4 and 4e-4, and takes algo.aggregation = sequence_mean.
    Source: arXiv 2507.18071
    """
    ratio = {"sequence_ratio": True, "clip_low": options.clip_low, "clip_high": options.clip_high}
    return ratio | {"dual_clip": options.dual_clip}


@loss("cispo", fused=True)
def cispo(options: AlgorithmConfig) -> dict[str, Any]:
    """-A clip(u, 1 - clip_low, 1 + clip_high) log p, the clipped ratio without gradient.

    Source: arXiv 2506.13585
    """
    return {"mode": "cispo", "clip_low": options.clip_low, "clip_high": options.clip_high}


def above_0(value: Any) -> bool:
    return bool(0 < value < inf)


SAPO = {name: (above_0, "must be above 0; a larger one is steeper") for name in ("positive", "negative")}
M2PO = {"bound": (above_0, "must be above 0; the paper's is 0.04")}
CPGD = {
    "drift": (lambda value: 0 <= value < inf, "must be at least 0; 0 leaves the drift out"),
    "drift_cap": (above_0, "must be above 0"),
}
DPPO = {
    "bound": (above_0, "must be above 0; a probability moves by 1 at most"),
    "most": (lambda value: value >= 1, "must be at least 1, the ratio of a token that has not moved"),
}


@loss("sapo", fused=True, rules=SAPO)
def sapo(options: AlgorithmConfig, *, positive: float = 1.0, negative: float = 1.05) -> dict[str, Any]:
    """-A 4 / s sigmoid(s (u - 1)), s = positive where A > 0, negative elsewhere.

    Source: arXiv 2511.20347
    """
    return {"mode": "sapo", "sapo_positive": positive, "sapo_negative": negative}


@loss("reinforce", fused=True)
def reinforce(options: AlgorithmConfig) -> dict[str, Any]:
    """-A log p.

    Source: Williams 1992
    """
    return {"mode": "reinforce"}


@loss("m2po", fused=True, select=second_moment, rules=M2PO)
def m2po(options: AlgorithmConfig, *, bound: float = 0.04) -> dict[str, Any]:
    """-A u, but for the tokens with the largest (log u)^2: as few as bring its mean over the others to bound.

    The tokens are chosen among all of a step's before its updates, by the policy's distance from the behaviour policy;
    the paper's u is the ratio to that one: correction.proximal = behavior.
    Source: arXiv 2510.01161
    """
    return {"clip_low": 1.0, "clip_high": inf}


@loss("cpgd", rules=CPGD)
def cpgd(rows: LossRows, options: AlgorithmConfig, *, drift: float = 0.01, drift_cap: float = 0.2) -> Tensor:
    """max(-A log u, -A clip(log u, log(1 - clip_low), log(1 + clip_high))) + drift (u - 1 - log u).

    The policy drift, an estimate of KL(proximal || policy), has the slope min(u - 1, drift_cap) in log p: beyond
    u = 1 + drift_cap it goes on as a line.
    Source: arXiv 2505.12504
    """
    distance = rows.log_ratio
    clipped = distance.clamp(log1p(-options.clip_low), log1p(options.clip_high))
    edge = log(1.0 + drift_cap)
    near = distance.clamp_max(edge)
    drifted = torch.expm1(near) - near + drift_cap * (distance - near)
    return torch.maximum(-rows.advantages * distance, -rows.advantages * clipped) + drift * drifted


@loss("dppo", rules=DPPO)
def dppo(rows: LossRows, options: AlgorithmConfig, *, bound: float = 0.2, most: float = 20.0) -> Tensor:
    """-A min(u, most) log p, the ratio without gradient, where sign(A) (p - p_proximal) <= bound; else 0.

    DPPO with the binary total variation: a token's probability, and not its ratio, says when it has moved far enough.
    Source: arXiv 2602.04879
    """
    moved = rows.logprobs.detach().exp() - rows.proximal_logprobs.exp()
    has_moved = torch.where(rows.advantages > 0, moved, -moved) > bound
    ratio = rows.ratio.detach().clamp_max(most)
    return (-rows.advantages * ratio * rows.logprobs).masked_fill(has_moved, 0.0)


def behavior_weight(rows: LossRows, correction: CorrectionConfig) -> Tensor:
    """Return each row's p(proximal) / p(behaviour), bounded as `correction` says: `[T]`.

    The operator has its own for fused losses.
    """
    log_weight = (rows.proximal_logprobs - rows.behavior_logprobs).detach()
    log_weight = log_weight.masked_fill(~log_weight.isfinite(), 0.0)
    if correction.weight == "off":
        return torch.ones_like(log_weight)
    if correction.level == "sequence":
        assert rows.cu_seqlens is not None
        log_weight = mean_of_sequence(log_weight, rows.trained, rows.cu_seqlens)
    weight = bounded(log_weight).exp()
    if correction.weight == "mask":
        return weight.masked_fill((weight < correction.low) | (weight > correction.high), 0.0)
    return weight.clamp(correction.low, correction.high)


def mean_of_sequence(values: Tensor, trained: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return for each row the mean over its sequence's trained rows, `[T]`; values are 0 in the others."""
    sequence = torch.bucketize(torch.arange(len(values), device=values.device), cu_seqlens[1:], right=True)
    zeros = values.new_zeros(len(cu_seqlens) - 1)
    count = zeros.index_add(0, sequence, trained.to(values.dtype))
    return (zeros.index_add(0, sequence, values) / count.clamp_min(1.0))[sequence]
