"""The operators of megatron_rl.ops in plain torch, to compare with: short, slow, any float dtype, with autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.ops import PpoOptions, VocabShard, lm_head_logprobs, lm_head_loss
from megatron_rl.ops import ppo_loss as fused_ppo_loss
from megatron_rl.ops.reference import CHECKSUM_COLUMNS, KL, bounded


def logprobs_entropy(
    logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0, support: Tensor | None = None,
    adjustment: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return log p(label) and entropy in nats, both `[T]`, for logits `[T, V]` and labels `[T]`; 0 for negative labels.

    temperature: a number or `[T, 1]`. A column of -inf has probability 0 and does not affect the entropy.
    support: `[T, W]`, as in megatron_rl/support.py; all other columns of such a row have probability 0.
    adjustment: `[T, W, P]`, as in megatron_rl/support.py.
    """
    if support is not None:
        inside = torch.zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
        places = support.long() % inside.shape[1]  # NO_TOKEN is the added last column
        inside.scatter_(1, places, True)
        if adjustment is not None:
            planes = [torch.zeros_like(inside, dtype=logits.dtype) for _ in range(adjustment.shape[2])]
            before, *more = (
                plane.scatter(1, places, adjustment[:, :, number].to(logits.dtype))[:, :-1]
                for number, plane in enumerate(planes)
            )
            logits = logits + before
            if more:
                penalty = more[0].masked_fill(more[0] == 0, 1.0)
                logits = torch.where(logits < 0, logits * penalty, logits / penalty) + more[1]
        logits = logits.masked_fill(~(inside[:, :-1] | (support[:, :1] < 0)), float("-inf"))
    distribution = (logits / temperature).log_softmax(-1)
    kept = labels >= 0
    chosen = distribution.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
    # Masked before it is multiplied: the gradient of 0 * -inf would be NaN.
    known = distribution.masked_fill(distribution == float("-inf"), 0.0)
    entropy = -(distribution.exp() * known).sum(-1)
    return chosen.masked_fill(~kept, 0.0), entropy.masked_fill(~kept, 0.0)


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
) -> Tensor:
    """`ops.ppo_loss` without its statistics."""
    proximal = logprobs.detach() if proximal_logprobs is None else proximal_logprobs
    # Masked before exp, so that values of masked rows, even NaN, reach neither the loss nor the gradient.
    log_ratio = (logprobs - proximal).masked_fill(~mask, 0.0)
    token_ratio = bounded(log_ratio).exp()
    if options.sequence_ratio:
        assert cu_seqlens is not None
        mean = mean_of_sequence(log_ratio, mask, cu_seqlens)
        log_ratio = log_ratio + (mean - log_ratio).detach()  # the sequence's value with each row's own gradient
    ratio, own = bounded(log_ratio).exp(), logprobs.masked_fill(~mask, 0.0)
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.mode == "clip":
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if options.dual_clip > 0:
            loss = torch.where(advantages < 0, torch.minimum(loss, -options.dual_clip * advantages), loss)
    elif options.mode == "cispo":
        loss = -clipped.detach() * advantages * own
    elif options.mode == "sapo":
        steepness = torch.where(advantages > 0, options.sapo_positive, options.sapo_negative)
        loss = -advantages * 4 / steepness * torch.sigmoid(steepness * (ratio - 1))  # 4 / s: the slope at u = 1 is -A
    else:
        loss = -advantages * own
    if options.behavior != "off":
        assert behavior_logprobs is not None
        log_weight = (proximal - behavior_logprobs).masked_fill(~mask, 0.0).detach()
        unknown = log_weight.isnan()  # such a row has no weight, and is not part of its sequence's mean
        if options.behavior_by_sequence:
            assert cu_seqlens is not None
            log_weight = mean_of_sequence(log_weight.masked_fill(unknown, 0.0), mask & ~unknown, cu_seqlens)
        weight = bounded(log_weight).exp()  # +inf and -inf are clamped like other large values
        unknown = unknown | weight.isnan()
        outside = (weight < options.behavior_low) | (weight > options.behavior_high)
        clamped = weight.clamp(options.behavior_low, options.behavior_high)
        weight = weight.masked_fill(outside, 0.0) if options.behavior == "mask" else clamped
        weight = weight.masked_fill(unknown, 0.0)
        loss = loss.masked_fill(weight == 0, 0.0) * weight
    if options.kl_coefficient > 0:
        assert ref_logprobs is not None
        divergence = KL[options.kl_estimator](own, ref_logprobs.masked_fill(~mask, 0.0))
        loss = loss + options.kl_coefficient * divergence * (token_ratio if options.kl_weighted else 1.0)
    if options.entropy_coefficient != 0:
        assert entropy is not None
        loss = loss - options.entropy_coefficient * entropy
    if row_weights is not None:
        loss = loss * row_weights.masked_fill(~mask, 0.0)
    return loss.masked_fill(~mask, 0.0).sum() / (1.0 if normalizer is None else normalizer)


def mean_of_sequence(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return for each row the mean over its sequence's rows where mask is True: `[T]`. values must be 0 elsewhere."""
    parts = [values[a:b].sum() / mask[a:b].sum().clamp_min(1) for a, b in bounds_of(cu_seqlens)]
    lengths = cu_seqlens.diff()
    return torch.stack(parts).repeat_interleave(lengths) if parts else values


def bounds_of(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    bounds = cu_seqlens.tolist()
    return list(zip(bounds, bounds[1:], strict=False))


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    discount: float,
    trace_decay: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.packed_gae` as a loop over tokens."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for sequence, (start, stop) in enumerate(bounds_of(cu_seqlens)):
        advantage, next_value = 0.0, 0.0 if bootstrap is None else float(bootstrap[sequence])
        for t in reversed(range(start, stop)):
            if mask[t]:
                delta = float(rewards[t]) + discount * next_value - float(values[t])
                advantage, next_value = delta + discount * trace_decay * advantage, float(values[t])
                advantages[t], returns[t] = advantage, advantage + next_value
    return advantages, returns


def packed_labels(
    input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.packed_labels`, one sequence at a time."""
    labels, positions, numbers = torch.full_like(input_ids, -100), input_ids.clone(), input_ids.clone()
    for number, (start, stop) in enumerate(bounds_of(cu_seqlens)):
        positions[start:stop], numbers[start:stop] = torch.arange(stop - start), number
        if stop > start:
            labels[start : stop - 1] = input_ids[start + 1 : stop]
            if loss_mask is not None:
                labels[start : stop - 1].masked_fill_(~loss_mask[start + 1 : stop], -100)
    return labels, positions, numbers


def word_sums(tensor: Tensor) -> Tensor:
    """`ops.word_sums` for one contiguous tensor."""
    data = tensor.view(-1).view(torch.uint8)
    if data.storage_offset() % 8:  # a slice that is not aligned to words
        data = data.clone()
    whole = data.numel() // (8 * CHECKSUM_COLUMNS) * (8 * CHECKSUM_COLUMNS)
    rest = torch.nn.functional.pad(data[whole:], (0, -data.numel() % 8)).view(torch.int64)  # -n % 8 fills up a word
    if not whole:
        return rest
    matrix = data[:whole].view(torch.int64).view(-1, CHECKSUM_COLUMNS)
    return torch.cat([matrix.sum(1), matrix.sum(0), rest])  # int64 sums wrap around: mod 2^64


def lm_head_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    proximal_logprobs: Tensor | None,
    behavior_logprobs: Tensor | None,
    advantages: Tensor,
    options: PpoOptions,
    *,
    shard: VocabShard,
    ref_logprobs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | None = None,
    **head: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy loss of the log-probabilities of `hidden @ weight.T`, computed as the engine does.

    A loss by row runs in the chunks of the output layer. A loss by sequence needs all log-probabilities before the
    first gradient, so the logits are computed twice. head: further options of the output layer.
    """
    columns = [
        None if column is None else column.detach().to(torch.promote_types(hidden.dtype, torch.float32))
        for column in (proximal_logprobs, behavior_logprobs, advantages, ref_logprobs)
    ]
    if options.by_sequence:
        logprobs, entropy = lm_head_logprobs(hidden, weight, labels, shard=shard, **head)
        *given, ref = columns
        more = {"ref_logprobs": ref, "entropy": entropy, "cu_seqlens": cu_seqlens, "normalizer": normalizer}
        return fused_ppo_loss(logprobs, *given, labels >= 0, options, **more)

    def loss(logprobs: Tensor, entropy: Tensor, places: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        *given, ref = (None if column is None else column.index_select(0, places) for column in columns)
        trained = torch.ones_like(logprobs, dtype=torch.bool)
        more = {"ref_logprobs": ref, "entropy": entropy, "normalizer": normalizer}
        return fused_ppo_loss(logprobs, *given, trained, options, **more)

    return lm_head_loss(hidden, weight, labels, loss, shard=shard, **head)
