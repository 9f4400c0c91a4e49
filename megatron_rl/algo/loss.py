"""Policy and value losses: packed `[T]` tensors in, sums over trained rows out; nothing is averaged here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl.config import AlgorithmConfig, CorrectionConfig
from megatron_rl.ops import PpoOptions, ppo_loss

Sums = dict[str, Tensor]


def supervised(logprobs: Tensor, entropy: Tensor, rows: TensorDict) -> tuple[Tensor, Sums]:
    """-log p per trained token: the loss of a supervised warm start."""
    return -logprobs.sum(), {"entropy": entropy.detach().sum()}


@dataclass(frozen=True)
class PolicyLoss:
    """The configured policy loss with its KL and entropy terms, as a LogprobLoss function."""

    options: AlgorithmConfig
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    @property
    def terms(self) -> PpoOptions:
        options, correction = self.options, self.correction
        return PpoOptions(
            mode={"ppo_clip": "clip", "reinforce": "reinforce"}[options.loss],
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            behavior=correction.weight,
            behavior_by_sequence=correction.weight != "off" and correction.level == "sequence",
            behavior_low=correction.low,
            behavior_high=correction.high,
            kl_estimator=options.kl_estimator,
            kl_coefficient=options.kl_coefficient,
            entropy_coefficient=options.entropy_coefficient,
        )

    def __call__(self, logprobs: Tensor, entropy: Tensor, rows: TensorDict) -> tuple[Tensor, Sums]:
        """rows: `advantages`, `loss_mask`, `logprobs` (behaviour), `ref_logprobs` for a KL term; `cu_seqlens` for a
        weight by sequence. The proximal policy is that of `proximal_logprobs` where rows have them, lies at
        `proximal_share` of the way from the behaviour policy to this one, or is this one: in the step's first update.
        """

        def column(name: str) -> Tensor:
            return torch.as_tensor(rows[name], dtype=logprobs.dtype)  # float64 where the model is

        names, behavior, proximal = set(rows.keys()), column("logprobs"), None
        if self.correction.proximal == "behavior":
            proximal = behavior
        elif "proximal_logprobs" in names:
            proximal = column("proximal_logprobs")
        elif "proximal_share" in names:
            proximal = torch.lerp(behavior, logprobs.detach(), column("proximal_share"))
        loss, sums = ppo_loss(
            logprobs,
            proximal,
            behavior,
            column("advantages"),
            rows["labels"] >= 0,
            self.terms,
            ref_logprobs=column("ref_logprobs") if self.options.kl_coefficient > 0 else None,
            entropy=entropy,
            cu_seqlens=rows["cu_seqlens"].long() if self.terms.by_sequence else None,
        )
        kept = ["entropy"]
        kept += ["clipped_tokens", "ratio_deviation", "approx_kl"] if self.options.loss == "ppo_clip" else []
        kept += ["dropped_tokens", "behavior_weight"] if self.correction.weight != "off" else []
        kept += ["reference_kl"] if self.options.kl_coefficient > 0 else []
        return loss, {name: sums[name] for name in kept}


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
