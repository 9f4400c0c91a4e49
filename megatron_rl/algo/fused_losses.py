"""Fused policy losses, meant for large runs. Each is a setting of the operator `ops.ppo_loss`.

The operator computes loss, gradient and statistics in one pass over the rows. In the formulas, u is p(policy) /
p(proximal) of a row and A its advantage.
"""

from __future__ import annotations

from math import inf

from megatron_rl.algo.registry import SHARE, above_0, fused_loss
from megatron_rl.algo.selection import but_covariant, second_moment
from megatron_rl.config import AlgorithmConfig
from megatron_rl.ops import PpoOptions


@fused_loss("ppo_clip")
def ppo_clip(options: AlgorithmConfig) -> PpoOptions:
    """max(-A u, -A clip(u, 1 - clip_low, 1 + clip_high)), at most -dual_clip A where A < 0.

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476). dual_clip > 0 is the dual clip (arXiv 1912.09729).
    With the section `correction` this is decoupled PPO (arXiv 2505.24298).
    Source: arXiv 1707.06347
    """
    return PpoOptions(clip_low=options.clip_low, clip_high=options.clip_high, dual_clip=options.dual_clip)


@fused_loss("gspo")
def gspo(options: AlgorithmConfig) -> PpoOptions:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s the geometric mean of u over the sequence.

    The derivative of s with respect to a token's log p is s, as if s were the token's own ratio: the paper's
    GSPO-token. This equals GSPO if A and the behaviour weight are the same for all tokens of a sequence. Otherwise each
    token has its own A and weight, and a rejected token gets no gradient. The paper clips at 3e-4 and 4e-4, and uses
    algo.aggregation = sequence_mean.
    Source: arXiv 2507.18071
    """
    return PpoOptions(
        sequence_ratio=True, clip_low=options.clip_low, clip_high=options.clip_high, dual_clip=options.dual_clip
    )


@fused_loss("cispo")
def cispo(options: AlgorithmConfig) -> PpoOptions:
    """-A clip(u, 1 - clip_low, 1 + clip_high) log p, the clipped ratio without gradient.

    Source: arXiv 2506.13585
    """
    return PpoOptions(mode="cispo", clip_low=options.clip_low, clip_high=options.clip_high)


SAPO = {name: (above_0, "must be above 0; a larger one is steeper") for name in ("positive", "negative")}
M2PO = {"bound": (above_0, "must be above 0; the paper's is 0.04")}


@fused_loss("sapo", rules=SAPO)
def sapo(options: AlgorithmConfig, *, positive: float = 1.0, negative: float = 1.05) -> PpoOptions:
    """-A 4 / s sigmoid(s (u - 1)), s = positive where A > 0, negative elsewhere.

    Source: arXiv 2511.20347
    """
    return PpoOptions(mode="sapo", sapo_positive=positive, sapo_negative=negative)


@fused_loss("reinforce")
def reinforce(options: AlgorithmConfig) -> PpoOptions:
    """-A log p.

    Source: Williams 1992
    """
    return PpoOptions(mode="reinforce")


@fused_loss("m2po", select=second_moment, rules=M2PO)
def m2po(options: AlgorithmConfig, *, bound: float = 0.04) -> PpoOptions:
    """-A u, but for the tokens with the largest (log u)^2: as few as bring its mean over the others to bound.

    These tokens get advantage 0. As few as possible are excluded such that the mean of (log u)^2 over the others is at
    most `bound`. They are selected among all tokens of a step, before the step's updates; u is then the ratio of the
    policy to the behaviour policy. In the paper, u in the loss is this ratio too: set correction.proximal = behavior.
    Source: arXiv 2510.01161
    """
    return PpoOptions(clip_low=1.0, clip_high=inf)  # u is in [0, inf), so nothing is clipped


@fused_loss("clip_cov", select=but_covariant, rules={"share": SHARE})
def clip_cov(options: AlgorithmConfig, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0) -> PpoOptions:
    """ppo_clip, but for a share of the tokens, drawn of those with c in [low, high], c = (log p - mean) (A - mean).

    The drawn tokens get advantage 0, because an update on tokens of high covariance lowers the entropy. The means are
    over all trained tokens of a step, and p is the policy's before the step's updates. The same tokens are drawn in
    every layout.
    Source: arXiv 2505.22617
    """
    return PpoOptions(clip_low=options.clip_low, clip_high=options.clip_high)
