"""Plain-torch definitions that the operators are tested against: short, slow, any float dtype, with autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_rl.ops.ppo import PpoOptions


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


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased, high variance, may be negative. k1, k2, k3: Schulman, "Approximating KL" (2020)."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, never negative. Its expected gradient is that of the KL."""
    return (logprobs - ref_logprobs).square() / 2


LOG_RATIO_BOUND = 20.0
"""Bound on log ratios before exponentiation; same value as in csrc/math/ppo.h."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp log ratios to [-LOG_RATIO_BOUND, LOG_RATIO_BOUND]; no gradient outside. NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy || reference): r - 1 - log r. log r: ref_logprobs - logprobs, at most 20."""
    log_ratio = (ref_logprobs - logprobs).clamp_max(LOG_RATIO_BOUND)
    return log_ratio.exp() - 1 - log_ratio


KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


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


CHECKSUM_COLUMNS = 1024
"""8-byte words per row of the matrix in which a tensor's bytes are summed; same value as in csrc/math/checksum.h."""


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


TILE_WORDS = 8192
TILES_AT_ONCE = 512
"""Tiles hashed at a time. It limits temporary memory to 16 MB for each of a few tensors."""
FIRST_SEED = 0x243F6A88
SEEDS = (FIRST_SEED, (FIRST_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
POSITION_TURNS = (15, 13)


def tile_hash(parts: list[Tensor], begin: int, whole_nbytes: int) -> Tensor:
    """`ops.tile_hashes` for one slice, given as contiguous parts. Returns a 0-dim tensor.

    The slice starts at byte `begin` of a tensor of `whole_nbytes` bytes.
    """
    data = torch.cat([part.view(-1).view(torch.uint8) for part in parts])
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    words = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    length = 4 * -(-whole_nbytes // 4)
    for start in range(begin // 4, begin // 4 + words.numel(), TILE_WORDS * TILES_AT_ONCE):
        chunk = words[start - begin // 4 :][: TILE_WORDS * TILES_AT_ONCE]
        # Torch has no unsigned arithmetic. int32 wraps around with the same bits, and so do int64 sums.
        place = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=data.device).to(torch.int32)
        halves = []
        for seed, factor, turn in zip(SEEDS, POSITION_FACTORS, POSITION_TURNS, strict=True):
            turned = (place << turn) | _shift_right(place, 32 - turn)
            mixed = _mix(chunk ^ ((place * _signed(factor) + _signed(seed)) ^ turned))
            tiles = torch.nn.functional.pad(mixed, (0, -mixed.numel() % TILE_WORDS)).view(-1, TILE_WORDS)
            sums = tiles.sum(1, dtype=torch.int64).to(torch.int32)  # mod 2^32
            halves.append(_mix(sums ^ _signed(length & 0xFFFFFFFF)).to(torch.int64))
        total += ((halves[0] << 32) | (halves[1] & 0xFFFFFFFF)).sum()
    return total


def _mix(words: Tensor) -> Tensor:
    """Apply the finalizer of MurmurHash3 to int32 words taken as unsigned."""
    for turn, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ _shift_right(words, turn)) * _signed(factor)
    return words ^ _shift_right(words, 16)


def _shift_right(words: Tensor, count: int) -> Tensor:
    return (words >> count) & ((1 << (32 - count)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
