"""Selection of the tokens whose advantages count: masks over the step's batch, computed before its updates.

An unselected token has advantage 0. It still counts in the divisor, and KL and entropy terms still apply to it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from megatron_rl.types import TrajectoryBatch


def high_entropy(batch: TrajectoryBatch, *, share: float, level: str) -> Tensor:
    """Keep the `share` of trained tokens with the highest entropy, of each sequence or of the batch: `[N]` bool.

    Keeps ceil(share n) of n tokens; ties go to the earlier token.
    Source: arXiv 2506.01939
    """
    if level == "batch":
        return _highest(batch["entropies"], share, batch)
    trained = batch["loss_mask"].nonzero()[:, 0]
    sequence = batch.sequence_ids[trained]
    by_entropy = batch["entropies"][trained].argsort(descending=True, stable=True)
    order = by_entropy[sequence[by_entropy].argsort(stable=True)]  # within each sequence, the highest first
    count = torch.bincount(sequence)
    rank = torch.arange(len(order)) - (count.cumsum(0) - count)[sequence[order]]  # rank within the sequence
    kept = torch.zeros(len(batch["loss_mask"]), dtype=torch.bool)
    kept[trained[order[rank < _share_of(share, count)[sequence[order]]]]] = True
    return kept


def _share_of(share: float, count: Tensor) -> Tensor:
    # Rounded first, because 0.2 * 5 is a little more than 1 in floating point.
    return (share * count.double()).mul(1e9).round().div(1e9).ceil().long()


def second_moment(batch: TrajectoryBatch, *, bound: float = 0.04) -> Tensor:
    """Drop tokens with the largest d^2 until the mean of d^2 over the rest is at most `bound`: `[N]` bool, True = kept.

    d = log p(policy before the updates) - log p(behaviour policy).
    Source: arXiv 2510.01161
    """
    d = (batch["proximal_logprobs"] - batch["logprobs"]).float().abs()
    # tokens with an infinite or NaN d are dropped, and not in the mean
    finite = (batch["loss_mask"].bool() & d.isfinite()).nonzero()[:, 0]
    bits = d[finite].view(torch.int32).long()
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    root = torch.where(exponent > 0, fraction + 2**23, 2 * fraction)  # d = root 2^(exponent - 150)
    most = Fraction(bound) * 2**300
    kept = torch.zeros(len(d), dtype=torch.bool)
    kept[finite] = _first_that_fit(2 * bits, root.square(), batch, finite, lambda n, total: total <= n * most)
    return kept


def highest_covariance(batch: TrajectoryBatch, *, share: float = 2e-3, **_: float) -> Tensor:
    """Choose the `share` of the step's trained tokens with the highest `covariances`: `[N]` bool.

    Source: arXiv 2505.22617, KL-Cov
    """
    return _highest(covariances(batch), share, batch)


def but_covariant(batch: TrajectoryBatch, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0) -> Tensor:
    """Keep the trained tokens except a `share` of them, drawn from those with `covariances` in [low, high]: `[N]` bool.

    Source: arXiv 2505.22617, Clip-Cov
    """
    kept = batch["loss_mask"].bool()
    most = int(_share_of(share, batch.total(kept.sum())))
    found = covariances(batch)
    inside = (kept & (found >= low) & (found <= high)).nonzero()[:, 0]
    keys = _drawn_keys(batch, inside)
    drawn = _first_that_fit(keys, torch.zeros_like(keys), batch, inside, lambda n, _: n <= most)
    kept = kept.clone()
    kept[inside[drawn]] = False
    return kept


def covariances(batch: TrajectoryBatch) -> Tensor:
    """Return (log p - mean of log p) (A - mean of A), with means over the step's trained tokens: `[N]` float64.

    p is the policy's before the updates. A token whose log p is NaN or infinite counts in neither mean, and gets -inf.
    """
    logprobs, advantages = batch["proximal_logprobs"].double(), batch["advantages"].double()
    counted = batch["loss_mask"].bool() & logprobs.isfinite()
    count = batch.total(counted.sum()).clamp_min(1)

    def centered(values: Tensor) -> Tensor:
        # Summed per trajectory, so that the result is bitwise the same whichever rank holds the tokens.
        return values - batch.sums_of_tokens(values.masked_fill(~counted, 0.0)).sum() / count

    return (centered(logprobs) * centered(advantages)).masked_fill(~counted, float("-inf"))


def _drawn_keys(batch: TrajectoryBatch, places: Tensor) -> Tensor:
    """Return a pseudo-random key for each of the tokens `places`: `[n]` int64, from 0 to 2^32 - 1.

    The keys depend only on the tokens, so they are the same in every layout.
    """
    bits = batch["logprobs"][places].float().view(torch.int32).long() & 0xFFFFFFFF
    keys = torch.zeros_like(bits)
    for part in (places - batch.cu_seqlens[batch.sequence_ids[places]], batch["input_ids"][places].long(), bits):
        for factor, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):  # MurmurHash3's finalizer
            keys = (keys ^ part) * factor & 0xFFFFFFFF
            keys = keys ^ keys >> shift
    return keys


def _highest(values: Tensor, share: float, batch: TrajectoryBatch) -> Tensor:
    """Choose the `share` of the step's trained tokens with the highest float32 values: `[N]` bool.

    NaN counts as the highest value. Of equal values, the earlier token's is chosen first. Collective: every rank calls
    it.
    """
    trained = batch["loss_mask"].nonzero()[:, 0]
    most = int(_share_of(share, batch.total(torch.tensor(len(trained)))))
    bits = (values[trained].float() + 0.0).view(torch.int32).long()  # + 0.0 turns -0 into 0
    rising = torch.where(bits < 0, ~bits & 0x7FFFFFFF, bits | 0x80000000)  # from 0 to 2^32 - 1, in the values' order
    chosen = torch.zeros(len(batch["loss_mask"]), dtype=torch.bool)
    falling, nothing = 2**32 - 1 - rising, torch.zeros_like(rising)
    chosen[trained] = _first_that_fit(falling, nothing, batch, trained, lambda n, _: n <= most)
    return chosen


def _first_that_fit(
    keys: Tensor, weights: Tensor, batch: TrajectoryBatch, places: Tensor, fits: Callable[[int, int], bool]
) -> Tensor:
    """Order the tokens of all replicas by ascending key, and select the longest prefix that fits: `[n]` bool.

    Of equal keys, the earlier token's comes first. A radix search finds the last selected key: each round adds up a
    histogram of 8 key bits over all replicas. Collective: every rank calls it.

    keys: `[n]` int64 from 0 to 2^32 - 1.
    weights: `[n]` int64 below 2^48, the same for equal keys. The unit is 4^(the key's highest 8 bits), so that sums of
      weights are exact in any order.
    places: `[n]`, the indices of the tokens in the batch.
    fits(count, total): whether a prefix of `count` tokens with this total weight fits. If it is False for a prefix, it
      must be False for all longer ones.
    """
    # split so that the sums fit into int64
    parts = torch.stack([torch.ones_like(keys), weights >> 24, weights & 0xFFFFFF], dim=1)
    last, count, total = 0, 0, 0
    for shift in (24, 16, 8, 0):
        inside = keys >> (shift + 8) == last
        table = torch.zeros(256, 3, dtype=torch.int64).index_add_(0, (keys[inside] >> shift) & 255, parts[inside])
        last *= 256
        for more, high, low in batch.total(table).tolist():
            added = ((high << 24) + low) << 2 * (last >> 24 - shift)
            if not fits(count + more, total + added):
                break
            last, count, total = last + 1, count + more, total + added
        else:  # only in the first round: all tokens fit
            return torch.ones(len(keys), dtype=torch.bool)
    # `more` tokens have the key `last`, and not all of them fit. All smaller keys are selected.
    share = added // max(more, 1)
    taken = bisect(range(1, more + 1), False, key=lambda n: not fits(count + n, total + n * share))
    ties = keys == last
    of_each = torch.zeros(len(batch), dtype=torch.int64)
    sequence = batch.sequence_ids[places[ties]]
    here = of_each.index_add(0, sequence, torch.ones_like(sequence))
    all_ties = batch.completed(here)
    before = (all_ties.cumsum(0) - all_ties)[sequence]  # ties in earlier trajectories
    own = torch.arange(len(sequence)) - (here.cumsum(0) - here)[sequence]
    chosen = keys < last
    chosen[ties.nonzero()[:, 0][before + own < taken]] = True
    return chosen


def keep(batch: TrajectoryBatch, kept: Tensor) -> float:
    """Set the advantages of all tokens that are not `kept` to 0. Returns the share of trained tokens that is kept."""
    batch.tokens["advantages"] = batch["advantages"].masked_fill(~kept, 0.0)
    return share_of(batch, kept)


def share_of(batch: TrajectoryBatch, chosen: Tensor) -> float:
    """Return the fraction of the step's trained tokens that is chosen. Collective: every rank calls it."""
    trained = batch["loss_mask"]
    chosen, of = batch.total(torch.stack([(chosen & trained).sum(), trained.sum()]))
    return float(chosen / of.clamp_min(1))
