"""Policy losses in plain torch, the kind that a user writes: a function from rows to each row's loss.

KL and entropy terms, behaviour weights and aggregation are added to it. The tensors are `[T]`, small beside the logits,
and a loss that looks at single rows takes the chunks of the output layer. In the formulas u is p(policy) / p(proximal)
of a row, A its advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, log, log1p

import torch
from torch import Tensor

from megatron_rl.algo.registry import SHARE, above_0, torch_loss
from megatron_rl.algo.selection import highest_covariance
from megatron_rl.config import AlgorithmConfig
from megatron_rl.ops.reference import bounded


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """The rows of a microbatch as a loss in plain torch sees them: `[T]` tensors of one float dtype.

    Row t describes the prediction of `labels[t]`. Rows that are not trained hold 0, and their loss is not read.

        @torch_loss()  # algo.loss: my_package.mine:likelihood_ratio
        def likelihood_ratio(rows: LossRows, options: AlgorithmConfig) -> Tensor:
            return -rows.advantages * rows.ratio
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
    marked: Tensor | None = None
    """bool: the tokens that the loss's own `mark` has chosen, where it is declared with one."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """All `[T]` columns of the microbatch by name, among them what a workflow put into `Trajectory.tokens`: entry t is
    that of the token `labels[t]`. Whole numbers and bools keep their dtype."""

    @property
    def log_ratio(self) -> Tensor:
        """log u."""
        return self.logprobs - self.proximal_logprobs

    @property
    def ratio(self) -> Tensor:
        """u, with log u at most LOG_RATIO_BOUND from 0: beyond it has no gradient."""
        return bounded(self.log_ratio).exp()


CPGD = {
    "drift": (lambda value: 0 <= value < inf, "must be at least 0; 0 leaves the drift out"),
    "drift_cap": (above_0, "must be above 0"),
}
DPPO = {
    "bound": (above_0, "must be above 0; a probability moves by 1 at most"),
    "most": (lambda value: value >= 1, "must be at least 1, the ratio of a token that has not moved"),
}


@torch_loss("cpgd", rules=CPGD)
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
    drifted = torch.expm1(near) - near + drift_cap * (distance - near)  # u - 1 - log u, its tangent beyond the edge
    return torch.maximum(-rows.advantages * distance, -rows.advantages * clipped) + drift * drifted


@torch_loss("dppo", rules=DPPO)
def dppo(rows: LossRows, options: AlgorithmConfig, *, bound: float = 0.2, most: float = 20.0) -> Tensor:
    """-A min(u, most) log p, the ratio without gradient, where sign(A) (p - p_proximal) <= bound; else 0.

    DPPO with the binary total variation: a token's probability, and not its ratio, says when it has moved far enough.
    Source: arXiv 2602.04879
    """
    moved = rows.logprobs.detach().exp() - rows.proximal_logprobs.exp()
    has_moved = torch.where(rows.advantages > 0, moved, -moved) > bound
    ratio = rows.ratio.detach().clamp_max(most)  # a constant: the slope is log p's, as d u = u d log p
    return (-rows.advantages * ratio * rows.logprobs).masked_fill(has_moved, 0.0)


GMPO = {"width": (above_0, "must be above 0; the paper's is 0.4")}


@torch_loss("gmpo", by_sequence=True, rules=GMPO)
def gmpo(rows: LossRows, options: AlgorithmConfig, *, width: float = 0.4) -> Tensor:
    """-A s, s the geometric mean over the sequence of min(u, e^width) where A > 0, of max(u, e^-width) elsewhere.

    The slope of s in a token's log p is s, as if it were the token's own ratio, and 0 where the token's u is bounded;
    as in gspo that is the paper's gradient where A is the same for all tokens. The paper takes sequence_mean.
    Source: arXiv 2507.20673
    """
    assert rows.cu_seqlens is not None
    distance = bounded(rows.log_ratio)
    near = torch.where(rows.advantages > 0, distance.clamp_max(width), distance.clamp_min(-width))
    mean = mean_of_sequence(near.detach(), rows.trained, rows.cu_seqlens)
    return -rows.advantages * mean.exp() * (near - near.detach()).exp()


@torch_loss("topr", by_sequence=True)
def topr(rows: LossRows, options: AlgorithmConfig) -> Tensor:
    """-A log p where A > 0; elsewhere -A min(w, 1) log p, w = p / p(behaviour) of the whole sequence, without gradient.

    What was good is learned however old it is, what was bad no more than the policy would still say it. Its weights
    take the place of the behaviour weights: correction.weight = off.
    Source: arXiv 2503.14286
    """
    assert rows.cu_seqlens is not None
    distance = (rows.logprobs - rows.behavior_logprobs).detach()
    unknown = distance.isnan()
    total = sum_of_sequence(distance.masked_fill(unknown, 0.0), rows.cu_seqlens)
    unknown = unknown | total.isnan()  # a behaviour log-prob that is NaN; or +inf and -inf in one sequence
    weight = torch.where(rows.advantages > 0, 1.0, total.clamp_max(0.0).exp().masked_fill(unknown, 0.0))
    return -rows.advantages * weight * rows.logprobs


KL_COV = {"share": SHARE, "weight": (lambda value: 0 <= value < inf, "must be at least 0; the paper's is 1")}


@torch_loss("kl_cov", mark=highest_covariance, rules=KL_COV)
def kl_cov(rows: LossRows, options: AlgorithmConfig, *, share: float = 2e-3, weight: float = 1.0) -> Tensor:
    """-A u + weight abs(log u) for a share of the tokens, of the highest c = (log p - mean) (A - mean); else -A u.

    As in clip_cov c is that before a step's updates; u leaves 1 in the second of them.
    Source: arXiv 2505.22617
    """
    assert rows.marked is not None
    return -rows.advantages * rows.ratio + weight * rows.log_ratio.abs().masked_fill(~rows.marked, 0.0)


def sum_of_sequence(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return for each row the sum over its sequence's rows, `[T]`; values are 0 in rows that are not trained."""
    sequence = sequence_of_rows(values, cu_seqlens)
    return values.new_zeros(len(cu_seqlens) - 1).index_add(0, sequence, values)[sequence]


def sequence_of_rows(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sequence of each row, `[T]` int64: the first that ends above it."""
    return torch.bucketize(torch.arange(len(values), device=values.device), cu_seqlens[1:], right=True)


def mean_of_sequence(values: Tensor, trained: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return for each row the mean over its sequence's trained rows, `[T]`; values are 0 in the others."""
    count = sum_of_sequence(trained.to(values.dtype), cu_seqlens)
    return sum_of_sequence(values, cu_seqlens) / count.clamp_min(1.0)
