"""Policy and value losses: packed `[T]` tensors in, sums over trained rows out; nothing is averaged here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl.algo import kl
from megatron_rl.config import AlgorithmConfig

Sums = dict[str, Tensor]


def ppo_clip(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    token_weights: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """w max(-A u, -A clip(u, 1 - clip_low, 1 + clip_high)), u = exp(logprobs - proximal_logprobs), per token.

    PPO (arXiv 1707.06347); clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476). token_weights `[T]` are w,
    1 where absent; decoupled PPO's come from `behavior_weights`.
    """
    # Masked rows become ratio 1 before exp(), so an overflow there cannot reach the gradient.
    log_ratio = (logprobs - proximal_logprobs).masked_fill(~loss_mask, 0.0)
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    if token_weights is not None:
        loss = loss * token_weights
    return loss.masked_fill(~loss_mask, 0.0).sum(), {
        "clipped_tokens": ((clipped > plain) & loss_mask).sum(),
        "ratio_deviation": (ratio.detach() - 1.0).abs().sum(),
        "approx_kl": -log_ratio.detach().sum(),
    }


def behavior_weights(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor, *, cap: float
) -> tuple[Tensor, Sums]:
    """exp(proximal - behaviour) per token, 0 (the token is dropped) above `cap`: decoupled PPO (arXiv 2505.24298).

    No gradient flows through it, and dropped tokens stay in the loss's denominator.
    """
    weights = (proximal_logprobs - behavior_logprobs).masked_fill(~loss_mask, 0.0).exp().detach()
    dropped = weights > cap
    return weights.masked_fill(dropped, 0.0), {"dropped_tokens": dropped.sum()}


def reinforce(
    logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, *, token_weights: Tensor | None = None
) -> tuple[Tensor, Sums]:
    """-w A log p per token; token_weights `[T]` are w, 1 where absent."""
    loss = -advantages * logprobs
    if token_weights is not None:
        loss = loss * token_weights
    return loss.masked_fill(~loss_mask, 0.0).sum(), {}


def supervised(logprobs: Tensor, entropy: Tensor, rows: TensorDict) -> tuple[Tensor, Sums]:
    """-log p per trained token: the loss of a supervised warm start."""
    return -logprobs.sum(), {"entropy": entropy.detach().sum()}


@dataclass(frozen=True)
class PolicyLoss:
    """The configured policy loss with its KL and entropy terms, as a LogprobLoss function."""

    options: AlgorithmConfig

    def __call__(self, logprobs: Tensor, entropy: Tensor, rows: TensorDict) -> tuple[Tensor, Sums]:
        """rows: `advantages`, `loss_mask`, `logprobs` (behaviour), optionally `proximal_logprobs` and `ref_logprobs`.

        Without `proximal_logprobs` this is the step's only update, and the policy itself is the proximal one.
        """
        options, mask = self.options, rows["labels"] >= 0
        proximal = rows["proximal_logprobs"] if "proximal_logprobs" in rows.keys() else logprobs.detach()  # noqa: SIM118
        weights: Tensor | None = None
        weight_sums: Sums = {}
        if options.behavior_weight_cap > 0:
            cap = options.behavior_weight_cap
            weights, weight_sums = behavior_weights(proximal, rows["logprobs"], mask, cap=cap)
        if options.loss == "ppo_clip":
            clips = {"clip_low": options.clip_low, "clip_high": options.clip_high}
            loss, sums = ppo_clip(logprobs, proximal, rows["advantages"], mask, **clips, token_weights=weights)
        else:
            loss, sums = reinforce(logprobs, rows["advantages"], mask, token_weights=weights)
        sums |= weight_sums
        mismatch = (proximal - rows["logprobs"]).masked_fill(~mask, 0.0)
        sums |= {"entropy": entropy.detach().sum(), "behavior_mismatch": mismatch.abs().sum()}
        if options.kl_coefficient > 0:
            divergence = (
                kl.ESTIMATORS[options.kl_estimator](logprobs, rows["ref_logprobs"]).masked_fill(~mask, 0.0).sum()
            )
            loss = loss + options.kl_coefficient * divergence
            sums["reference_kl"] = divergence.detach()
        if options.entropy_coefficient > 0:
            loss = loss - options.entropy_coefficient * entropy.sum()
        return loss, sums


def value_clip(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, clip: float
) -> tuple[Tensor, Sums]:
    """max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2 per token: PPO's clipped value loss.

    A value that has moved more than `clip` since the step began is not moved further. clip = 0 leaves the bound out.
    The sums of R, R^2, R - v and (R - v)^2 give the explained variance of any number of ranks together.
    """
    errors = (returns - values).masked_fill(~loss_mask, 0.0)
    loss = errors.square()
    sums: Sums = {}
    if clip > 0:
        near = old_values + (values - old_values).clamp(-clip, clip)
        bounded = (returns - near).masked_fill(~loss_mask, 0.0).square()
        sums["clipped_values"] = (bounded > loss).sum()
        loss = torch.maximum(loss, bounded)
    known, errors = returns.masked_fill(~loss_mask, 0.0), errors.detach()
    return 0.5 * loss.sum(), sums | {
        "returns": known.sum(),
        "squared_returns": known.square().sum(),
        "errors": errors.sum(),
        "squared_errors": errors.square().sum(),
    }


def explained_variance(sums: Mapping[str, float], count: float) -> float:
    """1 - Var(R - v) / Var(R) from `value_clip`'s sums over `count` tokens; 0 where all returns are the same."""
    variance = sums["squared_returns"] / count - (sums["returns"] / count) ** 2
    residual = sums["squared_errors"] / count - (sums["errors"] / count) ** 2
    return 1.0 - residual / variance if variance > 1e-12 else 0.0


@dataclass(frozen=True)
class ValueClipLoss:
    """The critic's loss as a ValueLoss function."""

    clip: float

    def __call__(self, values: Tensor, rows: TensorDict) -> tuple[Tensor, Sums]:
        """rows: `values` as they were before the step's first update, and `returns`."""
        return value_clip(values, rows["values"], rows["returns"], rows["labels"] >= 0, clip=self.clip)
