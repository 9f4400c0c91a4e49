"""Policy losses from log-probabilities: loss, gradient and statistics in one pass over the tokens.

Shapes: T packed rows, B sequences. All results are sums over trained rows, and never averages.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from megatron_rl.ops.library import ops

MODES = ("clip", "cispo", "sapo", "reinforce")
BEHAVIOR = ("off", "mask", "clamp")
KL_ESTIMATORS = ("k1", "k2", "k3")

PPO_SUMS = (
    *("loss", "tokens", "clipped_tokens", "dual_clipped_tokens", "dropped_tokens", "ratio", "ratio_deviation"),
    *("approx_kl", "approx_kl_k2", "approx_kl_k3", "behavior_weight", "behavior_mismatch", "behavior_log_ratio"),
    *("reference_kl", "entropy", "logprobs", "clipped_logprobs", "bounded_tokens", "not_finite"),
    "squared_gradient",
)
"""Names of `ppo_loss`'s statistics: sums and counts over trained rows, in the order of csrc/math/ppo.h.

- ratio_deviation: |ratio - 1|
- approx_kl, approx_kl_k2, approx_kl_k3: estimates of KL(proximal || policy)
- behavior_*: statistics of log p(proximal) - log p(behavior)
- dropped_tokens: rows outside behavior_low and behavior_high
- bounded_tokens: rows with a log ratio beyond LOG_RATIO_BOUND
- not_finite: rows whose loss or gradient, in its stored dtype, or whose behavior ratio is NaN or infinite
"""


@dataclass(frozen=True, kw_only=True)
class PpoOptions:
    """Options of `ppo_loss`. u is p(policy) / p(proximal) of a row, A its advantage, w its behavior weight.

    The log ratios of u and w are clamped to [-20, 20] before exponentiation, as in verl, and have no gradient outside.
    In the estimator k3, log(p(reference) / p(policy)) is clamped only from above.

        decoupled = PpoOptions(clip_high=0.28, behavior="mask", behavior_high=5.0)
        loss, sums = ppo_loss(logprobs, proximal, behavior, advantages, trained, decoupled)
        sums["clipped_tokens"] / sums["tokens"]
    """

    mode: str = "clip"
    """The loss of a row. clip: w max(-A u, -A clip(u)), PPO (arXiv 1707.06347). cispo: -w clip(u) A log p, without
    gradient through clip(u) (arXiv 2506.13585). sapo: -w A 4/s sigmoid(s (u - 1)), where s is SAPO's temperature (arXiv
    2511.20347). reinforce: -w A log p."""
    sequence_ratio: bool = False
    """If True, u is the geometric mean of the ratios of the sequence's trained rows. Its derivative by a row's log p is
    u: GSPO-token (arXiv 2507.18071). This equals GSPO if A and w are the same in all rows of a sequence. Needs
    cu_seqlens."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """If above 0, the loss of a row with A < 0 is at most this times -A (arXiv 1912.09729). Must be 0 or at least 1."""
    behavior: str = "off"
    """How w is computed. off: w = 1. mask, clamp: w = p(proximal) / p(behavior), without gradient (decoupled PPO, arXiv
    2505.24298). mask drops rows whose w is outside [behavior_low, behavior_high]; clamp moves w into that range."""
    behavior_by_sequence: bool = False
    """If True, w is the geometric mean of the weights of the sequence's trained rows. Needs cu_seqlens."""
    behavior_low: float = 0.0
    behavior_high: float = inf
    kl_estimator: str = "k3"
    kl_weighted: bool = False
    """If True, the KL term is multiplied by u, with gradient. It is then unbiased although the rows were sampled by the
    proximal policy."""
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    """sapo_positive and sapo_negative are SAPO's temperatures for rows with A > 0, and for all others."""

    def __post_init__(self) -> None:
        for name, value, right, rule in (
            ("mode", self.mode, self.mode in MODES, f"must be one of {', '.join(MODES)}"),
            ("behavior", self.behavior, self.behavior in BEHAVIOR, f"must be one of {', '.join(BEHAVIOR)}"),
            ("kl_estimator", self.kl_estimator, self.kl_estimator in KL_ESTIMATORS, "must be k1, k2 or k3"),
            ("clip_low", self.clip_low, 0 <= self.clip_low <= 1, "must be in [0, 1]"),
            ("clip_high", self.clip_high, self.clip_high >= 0, "must be at least 0"),
            ("dual_clip", self.dual_clip, self.dual_clip == 0 or self.dual_clip >= 1, "must be 0 (off) or at least 1"),
            ("behavior_low", self.behavior_low, self.behavior_low <= self.behavior_high, "is above behavior_high"),
            ("sapo_positive", self.sapo_positive, self.sapo_positive > 0, "must be above 0"),
            ("sapo_negative", self.sapo_negative, self.sapo_negative > 0, "must be above 0"),
        ):
            if not right:
                raise ValueError(f"PpoOptions.{name} is {value}: it {rule}.")

    @property
    def by_sequence(self) -> bool:
        return self.sequence_ratio or self.behavior_by_sequence

    def packed(self, scale: float) -> list[float]:
        """Return the options in the layout that csrc/math/ppo.h reads."""
        # Strings become indices into the enums there. KL estimators count from 1.
        numbers = {"mode": MODES, "behavior": BEHAVIOR, "kl_estimator": ("", *KL_ESTIMATORS)}
        order = (
            *("mode", "sequence_ratio", "clip_low", "clip_high", "dual_clip", "behavior", "behavior_by_sequence"),
            *("behavior_low", "behavior_high", "kl_estimator", "kl_weighted", "kl_coefficient"),
            *("entropy_coefficient", "sapo_positive", "sapo_negative"),
        )
        values = {name: getattr(self, name) for name in order}
        return [float(numbers[k].index(v)) if k in numbers else float(v) for k, v in values.items()] + [scale]


# The fake gives torch.compile the shapes and dtypes that it needs to trace without computing.
@torch.library.register_fake("megatron_rl::ppo_loss")
def _(logprobs, proximal, behavior, advantages, mask, ref, entropy, row_weights, cu_seqlens, options):
    sums = logprobs.new_empty(len(PPO_SUMS), dtype=torch.float64)
    return logprobs.new_empty(()), sums, torch.empty_like(logprobs), torch.empty_like(logprobs)


def save_for_backward(ctx, inputs, output) -> None:
    _, sums, grad_logprobs, grad_entropy = output
    ctx.mark_non_differentiable(sums, grad_logprobs, grad_entropy)  # already computed in the forward pass
    ctx.save_for_backward(grad_logprobs, grad_entropy)
    ctx.has_entropy = inputs[6] is not None  # autograd accepts a gradient only for inputs that were given


def backward(ctx, grad_loss, *_):
    grad_logprobs, grad_entropy = ctx.saved_tensors
    by_entropy = grad_loss * grad_entropy if ctx.has_entropy else None
    return grad_loss * grad_logprobs, None, None, None, None, None, by_entropy, None, None, None


torch.library.register_autograd("megatron_rl::ppo_loss", backward, setup_context=save_for_backward)


def ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    behavior_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    options: PpoOptions,
    *,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    row_weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss summed over rows where mask is True, and its statistics, `PPO_SUMS` by name, 0-dim float64.

    All tensors are `[T]` of one float dtype (float32, on the CPU also float64), and mask is bool. Rows where mask is
    False may hold any values.

    proximal_logprobs: None if the policy itself is the proximal policy.
    behavior_logprobs: None if the proximal policy sampled the tokens.
    row_weights: factor of each row's loss, including its KL and entropy terms. Statistics are not multiplied. Default:
      1.
    cu_seqlens: `[B + 1]` int64. Needed only by options that work on whole sequences.
    normalizer: number by which the loss is divided.

    The loss is differentiable in logprobs and entropy. The function does not synchronize with the device, and is
    bitwise reproducible.
    """
    for name, tensor, is_needed in (
        ("behavior_logprobs", behavior_logprobs, options.behavior != "off"),
        ("ref_logprobs", ref_logprobs, options.kl_coefficient > 0),
        ("entropy", entropy, options.entropy_coefficient != 0),
        ("cu_seqlens", cu_seqlens, options.by_sequence),
    ):
        if is_needed and tensor is None:
            raise ValueError(f"{name} is missing: {options} needs it.")
    constants = {
        "proximal_logprobs": proximal_logprobs,
        "behavior_logprobs": behavior_logprobs,
        "advantages": advantages,
        "ref_logprobs": ref_logprobs,
        "row_weights": row_weights,
    }
    for name, tensor in (constants | {"entropy": entropy}).items():
        if tensor is not None and (tensor.shape != logprobs.shape or tensor.dtype != logprobs.dtype):
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: it must be as logprobs, {logprobs.dtype} "
                f"{tuple(logprobs.shape)}."
            )
    if logprobs.ndim != 1 or mask.dtype != torch.bool or mask.shape != logprobs.shape:
        raise ValueError(
            f"logprobs is {tuple(logprobs.shape)}, mask {mask.dtype} {tuple(mask.shape)}: both must be [T], mask bool."
        )
    if entropy is not None and options.entropy_coefficient == 0:
        entropy = entropy.detach()  # only used for a statistic: its zero gradient would cost a pass over the logits
    given = {name: None if row is None else row.detach().contiguous() for name, row in constants.items()}
    loss, sums, _, _ = ops.ppo_loss(
        logprobs.contiguous(),
        given["proximal_logprobs"],
        given["behavior_logprobs"],
        given["advantages"],
        mask.contiguous(),
        given["ref_logprobs"],
        None if entropy is None else entropy.contiguous(),
        given["row_weights"],
        cu_seqlens if options.by_sequence else None,
        options.packed(1.0 if normalizer is None else 1.0 / normalizer),
    )
    return loss, dict(zip(PPO_SUMS, sums.unbind(), strict=True))
