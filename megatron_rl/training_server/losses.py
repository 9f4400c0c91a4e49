"""The losses that a client asks for by name. Each is a sum over tokens: nothing is averaged, as the client's docs say.

With p the model's log-probability of a target, q that of the sampler (`logprobs`), A `advantages`, w `weights`,
r = exp(p - q), and clip to [clip_low_threshold, clip_high_threshold]:

    cross_entropy        -w p; with several targets of a token, the sum of -w p over them
    importance_sampling  -r A
    ppo                  -min(r A, clip(r) A)
    cispo                -stop_gradient(clip(r)) A p
    dro                  -(A p - beta / 2 (p - q)^2)
    gspo                 as ppo, with each token's r replaced by its sequence's geometric mean, whose gradient is the
                         token's own. The mean is over tokens whose `sequence_ratio_mask` is not 0.

Source of formulas and defaults: https://tinker-docs.thinkingmachines.ai/tinker/losses, and for the clips of cispo the
tutorial 202_loss_functions of tinker-cookbook.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl.api import LogprobLoss

CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CISPO_CLIPS = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
"""Default clip thresholds of cispo. Only large ratios are clipped. The clipped ratio is a factor without gradient, so
every token keeps its gradient."""
TokenLoss = Callable[[Tensor, TensorDict, Mapping[str, float]], Tensor]


@dataclass(frozen=True)
class Loss:
    """One of the losses. `fn(logprobs, rows, options)` returns the loss of each row.

    by_row: the rows are independent, so `fn` is called with trained rows only.
    """

    fn: TokenLoss
    inputs: tuple[str, ...]
    """Inputs that each datum must have in addition to target_tokens."""
    options: dict[str, float] = field(default_factory=dict)
    """The loss's options with their defaults. A datum may instead give a clip threshold for each of its tokens."""
    by_row: bool = True


def cross_entropy(logprobs: Tensor, rows: TensorDict, options: Mapping[str, float]) -> Tensor:
    return cast(Tensor, -rows["weights"] * logprobs)


def importance_sampling(logprobs: Tensor, rows: TensorDict, options: Mapping[str, float]) -> Tensor:
    return cast(Tensor, -(logprobs - rows["logprobs"]).exp() * rows["advantages"])


def ppo(logprobs: Tensor, rows: TensorDict, options: Mapping[str, float]) -> Tensor:
    return _clipped((logprobs - rows["logprobs"]).exp(), rows, options)


def cispo(logprobs: Tensor, rows: TensorDict, options: Mapping[str, float]) -> Tensor:
    ratio = (logprobs.detach() - rows["logprobs"]).exp()
    return cast(Tensor, -_within_clips(ratio, rows, options) * rows["advantages"] * logprobs)


def dro(logprobs: Tensor, rows: TensorDict, options: Mapping[str, float]) -> Tensor:
    penalty = 0.5 * options["beta"] * (logprobs - rows["logprobs"]).square()
    return cast(Tensor, penalty - rows["advantages"] * logprobs)


def gspo(logprobs: Tensor, rows: TensorDict, options: Mapping[str, float]) -> Tensor:
    lengths = rows["cu_seqlens"].diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    counted = (rows["sequence_ratio_mask"] != 0) & (rows["labels"] >= 0)
    sums = logprobs.new_zeros(len(lengths)).index_add(0, sequence, (logprobs.detach() - rows["logprobs"]) * counted)
    counts = logprobs.new_zeros(len(lengths)).index_add(0, sequence, counted.to(logprobs.dtype))
    mean = (sums / counts.clamp(min=1))[sequence]
    return _clipped((mean + logprobs - logprobs.detach()).exp(), rows, options)


def _clipped(ratio: Tensor, rows: TensorDict, options: Mapping[str, float]) -> Tensor:
    advantages = rows["advantages"]
    return -torch.minimum(ratio * advantages, _within_clips(ratio, rows, options) * advantages)


def _within_clips(ratio: Tensor, rows: TensorDict, options: Mapping[str, float]) -> Tensor:
    low, high = (rows[key] if key in rows.keys() else torch.full_like(ratio, options[key]) for key in CLIPS)
    return torch.minimum(torch.maximum(ratio, low), high)


OF_POLICY = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(cross_entropy, ("weights",)),
    "importance_sampling": Loss(importance_sampling, OF_POLICY),
    "ppo": Loss(ppo, OF_POLICY, CLIPS),
    "cispo": Loss(cispo, OF_POLICY, CISPO_CLIPS),
    "dro": Loss(dro, OF_POLICY, {"beta": 0.05}),
    "gspo": Loss(gspo, (*OF_POLICY, "sequence_ratio_mask"), CLIPS, by_row=False),
}


def make_loss(name: str, given: Mapping[str, Any]) -> LogprobLoss:
    """Return the loss of this name from LOSSES, in the engine's form. given: its options, already checked."""
    loss = LOSSES[name]
    options = loss.options | {key: float(value) for key, value in given.items()}
    return LogprobLoss(functools.partial(_sum, loss, options), by_row=loss.by_row)


def _sum(
    loss: Loss, options: Mapping[str, float], logprobs: Tensor, _: Tensor, rows: TensorDict
) -> tuple[Tensor, dict[str, Tensor]]:
    # Untrained rows have log-probabilities of 0 on both sides, so that their ratio is 1 and overflows nowhere.
    of_rows = loss.fn(logprobs, rows, options)
    return of_rows.masked_fill(rows["labels"] < 0, 0.0).sum(), {}
