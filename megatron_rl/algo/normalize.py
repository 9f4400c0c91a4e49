"""Means and standard deviations over groups of trajectories and over whole batches, in float64.

A batch covers all data-parallel ranks. A sum over tokens adds per-trajectory sums in the trajectories' order, so it is
bitwise the same, whichever ranks hold the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.types import TrajectoryBatch

EPS = 1e-6
"""Number that is added to standard deviations. A deviation below this fraction of the largest absolute value is
rounding error, and counts as 0."""


def group_numbers(*columns: Tensor) -> Tensor:
    """Return the number of each entry's group, `[K]` int64. Groups are numbered from 0 without gaps.

    Two entries are in one group if they are equal in every column.
    """
    if not len(columns[0]):
        return torch.zeros(0, dtype=torch.int64)
    numbers: Tensor = torch.unique(torch.stack(columns, dim=1), dim=0, return_inverse=True)[1]
    return numbers


def mean_of(values: Tensor, member: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return for each entry the mean over its group, `[K]` float64.

    member: the number of each entry's group. weights: weights of the entries; where they sum to 0, and by default, the
    mean is unweighted.
    """
    values, size = values.double(), int(member.max()) + 1 if len(member) else 0
    ones = torch.ones_like(values)
    weights = ones if weights is None else weights.double()
    total = torch.zeros(size, dtype=torch.float64).index_add_(0, member, weights)
    # in a group of total weight 0 every entry now weighs 1, so the total is computed again
    weights = torch.where(total[member] > 0, weights, ones)
    total = torch.zeros(size, dtype=torch.float64).index_add_(0, member, weights)
    return (torch.zeros(size, dtype=torch.float64).index_add_(0, member, weights * values) / total)[member]


def shares_of(sample: Tensor) -> Tensor:
    """Return for each entry 1 / (number of entries of its sample), `[K]` float64.

    With these weights, a sample counts once in a mean, however many entries it has.
    """
    return 1.0 / torch.bincount(sample).double()[sample]


def count_of(member: Tensor, shares: Tensor | None = None) -> Tensor:
    """Return for each entry the size of its group, `[K]` float64.

    shares: the result of `shares_of`; if given, the size is the number of samples, not of entries.
    """
    return torch.bincount(member, shares).double().round()[member]  # six sixths add up to a little less than 1


def deviation_of(values: Tensor, member: Tensor, *, correction: int, shares: Tensor | None = None) -> Tensor:
    """Return for each entry its group's standard deviation, `[K]` float64; 0 if the values differ only by rounding.

    correction: 1 divides the sum of squares by n - 1, and 0 divides it by n. shares: the result of `shares_of`; if
    given, n is the number of samples, not of entries.
    """
    values = values.double()
    squares = (values - mean_of(values, member, shares)).square()
    count = count_of(member, shares)
    # A sample of several trajectories counts once, by the mean of their squares. A group of one has squares of 0.
    variance = mean_of(squares, member, shares) * count / (count - correction).clamp_min(1.0)
    largest = torch.zeros(int(member.max()) + 1 if len(member) else 0, dtype=torch.float64)
    largest.scatter_reduce_(0, member, values.abs(), "amax")
    deviation = variance.sqrt()
    return deviation.masked_fill(deviation <= EPS * largest[member], 0.0)


def normalize(values: Tensor, group: Tensor, *, mean: str, std: str, shares: Tensor | None = None) -> Tensor:
    """Return (v - mean) / (std + eps): `[K]` -> `[K]` float64.

    mean, std: over what each of the two is computed. `group`: the entry's group. `batch`: the whole batch. `none`: the
      mean is not subtracted, or the std does not divide.
    shares: the result of `shares_of`; if given, each sample counts once in both.

    A group's deviation is about the group's mean and divides by n - 1. A batch's is about the batch's mean and divides
    by n. Division by a deviation of 0 results in 0.
    """
    result, everything = values.double(), torch.zeros_like(group)
    places = {"group": group_numbers(group), "batch": everything}
    if mean != "none":
        result = result - mean_of(values, places[mean], shares)
    if std != "none":
        deviation = deviation_of(values, places[std], correction=1 if std == "group" else 0, shares=shares)
        result = torch.where(deviation > 0, result / (deviation + EPS), 0.0)
    return result


def normalize_tokens(values: Tensor, batch: TrajectoryBatch, *, mean: str, std: str) -> Tensor:
    """Normalise values of tokens as `normalize` does. The statistics are over trained tokens.

    The result is `[N]` float64, 0 for untrained tokens.
    """
    mask = batch["loss_mask"].bool()
    values = values.double().masked_fill(~mask, 0.0)
    counts = batch.sums_of_tokens(mask.double())
    places = {"group": group_numbers(batch["group"]), "batch": torch.zeros_like(batch["group"])}
    result = values
    if mean != "none":
        result = result - batch.spread(_mean_of_tokens(values, batch, counts, places[mean]))
    if std != "none":
        deviation = _deviation_of_tokens(values, batch, counts, places[std], correction=1 if std == "group" else 0)
        result = torch.where(batch.spread(deviation > 0), result / (batch.spread(deviation) + EPS), 0.0)
    return result.masked_fill(~mask, 0.0)


def _mean_of_tokens(values: Tensor, batch: TrajectoryBatch, counts: Tensor, member: Tensor) -> Tensor:
    """Return for each trajectory the mean over the trained tokens of its group: `[N]` -> `[B]`.

    counts: `[B]`, the number of trained tokens. member: `[B]`, the number of each trajectory's group.
    """
    return _sum_of(batch.sums_of_tokens(values), member) / _sum_of(counts, member).clamp_min(1.0)


def _deviation_of_tokens(
    values: Tensor, batch: TrajectoryBatch, counts: Tensor, member: Tensor, *, correction: int
) -> Tensor:
    """Return for each trajectory the standard deviation over the trained tokens of its group: `[N]` -> `[B]`.

    The arguments are as in `_mean_of_tokens` and `deviation_of`.
    """
    mask = batch["loss_mask"].bool()
    centered = (values - batch.spread(_mean_of_tokens(values, batch, counts, member))).masked_fill(~mask, 0.0)
    squares, count = _sum_of(batch.sums_of_tokens(centered.square()), member), _sum_of(counts, member)
    deviation = (squares / (count - correction).clamp_min(1.0)).sqrt()
    of_each = torch.zeros(len(batch), dtype=torch.float64).scatter_reduce(0, batch.sequence_ids, values.abs(), "amax")
    largest = torch.zeros(len(batch), dtype=torch.float64)
    largest.scatter_reduce_(0, member, batch.completed(of_each), "amax")
    return deviation.masked_fill(deviation <= EPS * largest[member], 0.0)


def _sum_of(values: Tensor, member: Tensor) -> Tensor:
    return torch.zeros(len(values), dtype=torch.float64).index_add_(0, member, values)[member]  # [B] -> [B]
