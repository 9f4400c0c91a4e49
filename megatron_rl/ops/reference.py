"""Plain-torch definitions that the operators are tested against: short, slow, any floating dtype."""

from __future__ import annotations

from torch import Tensor


def logprobs_entropy(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """`[T, V]` logits and `[T]` labels (-100.

    Ignored) -> log p(label) and entropy in nats, both `[T]`, 0 where ignored.
    """
    distribution = (logits / temperature).log_softmax(-1)
    kept = labels >= 0
    chosen = distribution.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    return chosen.masked_fill(~kept, 0.0), entropy.masked_fill(~kept, 0.0)
