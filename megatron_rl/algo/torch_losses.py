"""Policy losses in plain torch, the kind that users write: functions that return each row's loss.

The trainer adds KL and entropy terms, behaviour weights and aggregation. A loss in which a row does not depend on other
rows is called once per chunk of the output layer. In the formulas, u is p(policy) / p(proximal) of a row and A its
advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, log, log1p

import torch
from torch import Tensor

from megatron_rl.algo.aggregation import sequence_of_rows, sums_by_sequence
from megatron_rl.algo.registry import SHARE, above_0, torch_loss
from megatron_rl.algo.selection import highest_covariance
from megatron_rl.config import AlgorithmConfig
from megatron_rl.ops.reference import bounded


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """The rows of a microbatch as a loss in plain torch sees them: `[T]` tensors of one float dtype.

    Row t describes the prediction of `labels[t]`. Untrained rows hold 0, and their loss is ignored.

        @torch_loss()  # algo.loss: my_package.mine:likelihood_ratio
        def likelihood_ratio(rows: LossRows, options: AlgorithmConfig) -> Tensor:
            return -rows.advantages * rows.ratio
    """

    logprobs: Tensor
    """log p of each row's token under the trained policy, with gradient."""
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    trained: Tensor
    """bool, True for trained rows."""
    cu_seqlens: Tensor | None
    """`[B + 1]` int64 bounds of the sequences, if some part of the loss depends on whole sequences; otherwise None."""
    marked: Tensor | None = None
    """bool, True for the tokens that the loss's own `mark` selected. None if the loss has no `mark`."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """All `[T]` columns of the microbatch by name, including those a workflow put into `Trajectory.tokens`. Entry t
    belongs to the token `labels[t]`. Integers and bools keep their dtype."""

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.proximal_logprobs

    @property
    def ratio(self) -> Tensor:
        """The ratio u of each row. log u is clamped to [-LOG_RATIO_BOUND, LOG_RATIO_BOUND], with gradient 0 outside."""
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

    The policy drift u - 1 - log u estimates KL(proximal || policy). Its derivative with respect to log p is min(u - 1,
    drift_cap). So beyond u = 1 + drift_cap it is linear in log p.
    Source: arXiv 2505.12504
    """
    distance = rows.log_ratio
    clipped = distance.clamp(log1p(-options.clip_low), log1p(options.clip_high))
    edge = log(1.0 + drift_cap)
    near = distance.clamp_max(edge)
    # u - 1 - log u, continued by its tangent beyond the edge
    drifted = torch.expm1(near) - near + drift_cap * (distance - near)
    return torch.maximum(-rows.advantages * distance, -rows.advantages * clipped) + drift * drifted


@torch_loss("dppo", rules=DPPO)
def dppo(rows: LossRows, options: AlgorithmConfig, *, bound: float = 0.2, most: float = 20.0) -> Tensor:
    """-A min(u, most) log p, the ratio without gradient, where sign(A) (p - p_proximal) <= bound; else 0.

    DPPO with the binary total variation: the change in a token's probability, not its ratio, decides when the token has
    moved far enough.
    Source: arXiv 2602.04879
    """
    moved = rows.logprobs.detach().exp() - rows.proximal_logprobs.exp()
    has_moved = torch.where(rows.advantages > 0, moved, -moved) > bound
    ratio = rows.ratio.detach().clamp_max(most)  # without gradient, so that d(u log p) = u d log p
    return (-rows.advantages * ratio * rows.logprobs).masked_fill(has_moved, 0.0)


GMPO = {"width": (above_0, "must be above 0; the paper's is 0.4")}


@torch_loss("gmpo", by_sequence=True, rules=GMPO)
def gmpo(rows: LossRows, options: AlgorithmConfig, *, width: float = 0.4) -> Tensor:
    """-A s, s the geometric mean over the sequence of min(u, e^width) where A > 0, of max(u, e^-width) elsewhere.

    The derivative of s with respect to a token's log p is s, as if s were the token's own ratio. It is 0 if the token's
    u is clipped. As in gspo, this is the paper's gradient if A is the same for all tokens. The paper uses
    sequence_mean.
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

    Positive examples are learned at full weight, however old. Negative ones count only as far as the policy would still
    produce them. These weights replace the behaviour weights: set correction.weight = off.
    Source: arXiv 2503.14286
    """
    assert rows.cu_seqlens is not None
    distance = (rows.logprobs - rows.behavior_logprobs).detach()
    unknown = distance.isnan()
    total = sum_of_sequence(distance.masked_fill(unknown, 0.0), rows.cu_seqlens)
    unknown = unknown | total.isnan()  # the behaviour log-prob is NaN, or one sequence has both +inf and -inf
    weight = torch.where(rows.advantages > 0, 1.0, total.clamp_max(0.0).exp().masked_fill(unknown, 0.0))
    return -rows.advantages * weight * rows.logprobs


KL_COV = {"share": SHARE, "weight": (lambda value: 0 <= value < inf, "must be at least 0; the paper's is 1")}


@torch_loss("kl_cov", mark=highest_covariance, rules=KL_COV)
def kl_cov(rows: LossRows, options: AlgorithmConfig, *, share: float = 2e-3, weight: float = 1.0) -> Tensor:
    """-A u + weight abs(log u) for a share of the tokens, of the highest c = (log p - mean) (A - mean); else -A u.

    The penalised tokens are the `share` of the step's trained tokens with the highest c. As in clip_cov, c is computed
    before the step's updates. u differs from 1 from the second update on.
    Source: arXiv 2505.22617
    """
    assert rows.marked is not None
    return -rows.advantages * rows.ratio + weight * rows.log_ratio.abs().masked_fill(~rows.marked, 0.0)


def sum_of_sequence(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return for each row the sum of the values in its sequence, `[T]`. Untrained rows must have the value 0."""
    return sums_by_sequence(values, cu_seqlens)[sequence_of_rows(values, cu_seqlens)]


def mean_of_sequence(values: Tensor, trained: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return for each row the mean of the values of its sequence's trained rows, `[T]`.

    The values of other rows must be 0.
    """
    count = sum_of_sequence(trained.to(values.dtype), cu_seqlens)
    return sum_of_sequence(values, cu_seqlens) / count.clamp_min(1.0)
