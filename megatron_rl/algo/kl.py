"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

Schulman, "Approximating KL divergence" (2020); all are differentiable in `logprobs`.
"""

from __future__ import annotations

from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, never negative; its gradient is that of the KL in expectation."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, never negative."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
