"""Functions in plain torch that the compiled operators also implement: bounded ratios, KL estimates, tile hashes."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return log p - log q: unbiased, of high variance, and possibly negative.

    k1, k2 and k3 are the estimators of KL(policy || reference) in Schulman, "Approximating KL Divergence" (2020).
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return (log p - log q)^2 / 2: biased and never negative. Its expected gradient is that of the KL."""
    return (logprobs - ref_logprobs).square() / 2


LOG_RATIO_BOUND = 20.0
"""Bound on log ratios before exponentiation. csrc/math/ppo.h has the same value."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp log ratios to [-LOG_RATIO_BOUND, LOG_RATIO_BOUND]. The gradient is 0 outside; NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy || reference): r - 1 - log r, log r = ref_logprobs - logprobs, at most 20."""
    log_ratio = (ref_logprobs - logprobs).clamp_max(LOG_RATIO_BOUND)
    return log_ratio.exp() - 1 - log_ratio


KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


CHECKSUM_COLUMNS = 1024
"""Number of 8-byte words in a row of the matrix in which a tensor's bytes are summed. csrc/math/checksum.h has the same
value."""


TILE_WORDS = 8192
TILES_AT_ONCE = 512
"""Number of tiles that are hashed at a time. It limits each of a few temporary tensors to 16 MB."""
FIRST_SEED = 0x243F6A88
SEEDS = (FIRST_SEED, (FIRST_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
POSITION_TURNS = (15, 13)


def tile_hash(parts: list[Tensor], begin: int, whole_nbytes: int) -> Tensor:
    """Return the hash of one slice as in `ops.tile_hashes`, 0-dim int64.

    parts: the slice's contiguous parts. The slice starts at byte `begin` of a tensor of `whole_nbytes` bytes.
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
