"""Plain-torch definitions that the operators are tested against: short, slow, any floating dtype."""

from __future__ import annotations

from torch import Tensor


def logprobs_entropy(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Return log p(label) and entropy in nats, both `[T]`: logits `[T, V]`, labels `[T]`, 0 where a label is negative.

    temperature: a number or `[T, 1]`. A column of -inf has probability 0 and no part in the entropy.
    """
    distribution = (logits / temperature).log_softmax(-1)
    kept = labels >= 0
    chosen = distribution.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution.masked_fill(distribution == float("-inf"), 0.0)).sum(-1)
    return chosen.masked_fill(~kept, 0.0), entropy.masked_fill(~kept, 0.0)
