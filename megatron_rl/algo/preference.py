"""Losses on pairs of replies to one prompt, of which one is preferred, and their computation by an engine.

A batch holds the chosen and the rejected reply of each pair next to each other, in this order. The column `pair`
numbers the pairs. In the formulas, r is a reply's implicit reward, d = r(chosen) - r(rejected), and s is the sigmoid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_rl.algo.aggregation import sums_by_sequence
from megatron_rl.algo.registry import PairLoss, Rules, above_0, pair_loss
from megatron_rl.api import LogprobLoss, ValueLoss
from megatron_rl.config.users_code import call

Sums = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of a microbatch as a loss sees them: `[P, 2]` tensors of one float dtype, the chosen reply first.

    For example:

        @pair_loss()
        def hinge(pairs: Pairs, *, margin: float = 1.0) -> tuple[Tensor, Tensor]:
            rewards = pairs.values / pairs.tokens
            return (margin - margins(rewards)).clamp_min(0.0), rewards
    """

    values: Tensor
    """log p of the whole reply, with gradient. If the loss is for a value head, it is the head's score of the reply."""
    log_ratios: Tensor
    """log p - log p(reference) of the whole reply, with gradient; equals `values` if the loss needs no reference."""
    tokens: Tensor
    """Number of trained tokens of the reply."""


def margins(rewards: Tensor) -> Tensor:
    return rewards[:, 0] - rewards[:, 1]


BETA: Rules = {"beta": (above_0, "must be above 0")}
PER_TOKEN: Rules = {"per_token": (lambda value: isinstance(value, bool), "must be true or false")}
DPO: Rules = {
    "label_smoothing": (lambda value: 0 <= value < 0.5, "must be in [0, 0.5)"),
    "sft": (lambda value: value >= 0, "must be at least 0; 0 disables the term"),
}
KTO: Rules = {name: (lambda value: value >= 0, "must be at least 0") for name in ("desirable", "undesirable")}


@pair_loss("dpo", needs_reference=True, rules={**BETA, **PER_TOKEN, **DPO})
def dpo(
    pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0, per_token: bool = False, sft: float = 0.0
) -> tuple[Tensor, Tensor]:
    """-(1 - label_smoothing) log s(d) - label_smoothing log s(-d) + sft nll, r = beta log(p / p_reference).

    label_smoothing above 0 is conservative DPO: it assumes that this share of the pairs is mislabelled. per_token
    divides r by the reply's tokens n (arXiv 2411.15124), and needs a larger beta, such as 5. sft above 0 keeps the
    chosen reply likely; nll is its -log p per token (arXiv 2404.19733).
    Source: arXiv 2305.18290
    """
    rewards = beta * (pairs.log_ratios / pairs.tokens if per_token else pairs.log_ratios)
    d = margins(rewards)
    losses = -(1 - label_smoothing) * logsigmoid(d) - label_smoothing * logsigmoid(-d)
    return losses - sft * pairs.values[:, 0] / pairs.tokens[:, 0], rewards


@pair_loss("ipo", needs_reference=True, rules={**BETA, **PER_TOKEN})
def ipo(pairs: Pairs, *, beta: float = 0.1, per_token: bool = False) -> tuple[Tensor, Tensor]:
    """(d - 1 / (2 beta))^2, r = log(p / p_reference), with per_token divided by the reply's tokens.

    The paper's formula sums over the whole reply. TRL and AReaL divide by its tokens, which the authors have confirmed
    as the intention.
    Source: arXiv 2310.12036
    """
    rewards = pairs.log_ratios / pairs.tokens if per_token else pairs.log_ratios
    return (margins(rewards) - 1 / (2 * beta)).square(), rewards


@pair_loss("kto", needs_reference=True, rules={**BETA, **KTO})
def kto(
    pairs: Pairs, *, beta: float = 0.1, point: float = 0.0, desirable: float = 1.0, undesirable: float = 1.0
) -> tuple[Tensor, Tensor]:
    """desirable (1 - s(r(chosen) - point)) + undesirable (1 - s(point - r(rejected))), r = beta log(p / p_reference).

    Each reply is compared with a reference point instead of the other reply. The paper estimates the point from replies
    to other prompts of the batch. Here the point is an option, so that a pair's loss does not depend on its neighbours.
    Source: arXiv 2402.01306
    """
    rewards = beta * pairs.log_ratios
    chosen, rejected = rewards.unbind(1)
    return desirable * torch.sigmoid(point - chosen) + undesirable * torch.sigmoid(rejected - point), rewards


@pair_loss("simpo", rules=BETA)
def simpo(pairs: Pairs, *, beta: float = 2.0, margin: float = 1.0) -> tuple[Tensor, Tensor]:
    """-log s(d - margin), r = beta log(p) / n, n the reply's tokens; without a reference.

    Source: arXiv 2405.14734
    """
    rewards = beta * pairs.values / pairs.tokens
    return -logsigmoid(margins(rewards) - margin), rewards


@pair_loss("bradley_terry", head="value")
def bradley_terry(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """-log s(d), r the model's score of the whole reply: makes a reward model.

    Source: Bradley and Terry 1952; arXiv 2203.02155
    """
    return -logsigmoid(margins(pairs.values)), pairs.values


@dataclass(frozen=True)
class PreferenceLoss:
    """The configured pair loss, summed over the pairs of a microbatch."""

    entry: PairLoss
    args: dict[str, Any]

    def for_engine(self) -> LogprobLoss | ValueLoss:
        """Return the loss for an engine whose head is `entry.head`. The engine's loss_weight_fn must be `pairs_of`."""
        if self.entry.head == "value":
            return ValueLoss(self)
        # Not by_row: a pair's loss needs the sums over both of its replies.
        return LogprobLoss(lambda logprobs, entropy, rows: self(logprobs, rows))

    def __call__(self, results: Tensor, rows: TensorDict) -> tuple[Tensor, Sums]:
        """Return the summed loss of a microbatch and its statistics.

        results: `[T]` log-probs or values, 0 in untrained rows. rows: `ref_logprobs` if the loss needs a reference.
        """
        ratios = results
        if self.entry.needs_reference:
            ratios = results - torch.as_tensor(rows["ref_logprobs"], dtype=results.dtype)
        pairs = Pairs(
            values=_by_pair(results, rows),
            log_ratios=_by_pair(ratios, rows),
            tokens=_by_pair((rows["labels"] >= 0).to(results.dtype), rows),
        )
        contract = "it is called with Pairs and returns `[P]` losses and `[P, 2]` rewards"
        losses, rewards = call(self.entry.function, [pairs], self.args, key="preference.loss", contract=contract)
        chosen, rejected = rewards.detach().unbind(1)
        return losses.sum(), {
            "preferred": (chosen > rejected).sum(),
            "chosen_reward": chosen.sum(),
            "rejected_reward": rejected.sum(),
        }


def pairs_of(rows: TensorDict) -> Tensor:
    """Return the loss weight: the number of pairs in a microbatch, 0-dim int64."""
    sequences = len(rows["cu_seqlens"]) - 1  # a single one, untrained, if there is no pair
    assert sequences == 1 or sequences % 2 == 0, f"{sequences} sequences are no pairs: packing has parted some"
    return torch.tensor(sequences // 2)


def _by_pair(values: Tensor, rows: TensorDict) -> Tensor:
    """Sum a microbatch's rows over each sequence, and arrange the sums by pair: `[T]` -> `[P, 2]`."""
    sums, count = sums_by_sequence(values, rows["cu_seqlens"]), int(pairs_of(rows))
    # packing keeps chosen and rejected replies adjacent; an idle microbatch has no pair
    return sums[: 2 * count].view(count, 2)


def preference_metrics(sums: Mapping[str, float], pairs: float) -> dict[str, float]:
    """Return the accuracy and the mean rewards.

    sums: the statistics of `PreferenceLoss`, summed over all pairs. pairs: the number of these pairs.
    """
    chosen, rejected = (sums[name] / pairs for name in ("chosen_reward", "rejected_reward"))
    means = {"chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected}
    return {"accuracy": sums["preferred"] / pairs} | means
