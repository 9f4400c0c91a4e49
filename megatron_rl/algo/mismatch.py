"""Statistics of the difference between the trainer's and the servers' log-probabilities, over all tokens of a step.

For a sampled token, d = log p(trainer) - log q(server), and w = p / q = exp(d), with d bounded as in the loss. Sums and
maxima are combined over the ranks; `metrics` then divides the sums by the number of tokens. Classes by age (versions
between sampling and training) separate policy drift from a server that computes differently, which shows at age 0.
Classes by position in the reply show errors that grow along a sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.ops.reference import bounded

AGES = {"0": 0, "1": 1, "2": 2, "3_to_4": 3, "5_to_8": 5, "9_on": 9}
"""Names of the classes by age, and the lowest age of each. The age counts versions between sampling and training."""
POSITIONS = {"0_on": 0, "16_on": 16, "128_on": 128, "1024_on": 1024, "8192_on": 8192}
"""Names of the classes by position, and the lowest position of each. A token's position is the number of trained tokens
before it in its sequence."""
CLASSES = ["all", *(f"age_{name}" for name in AGES), *(f"position_{name}" for name in POSITIONS)]
NEAR = 1e-6
"""A token counts as near if its log-probabilities differ, but by at most this many nats."""
COLUMNS = 9
"""Number of sums per class. They are: tokens, |d|, d, k3, w, w^2, equal tokens, near tokens, and tokens whose d is NaN
or infinite (counted only in the class "all")."""


def tally(
    logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor, versions: Tensor, lengths: Tensor, version: int
) -> tuple[Tensor, Tensor]:
    """Return the sums `[classes, COLUMNS]` and the largest |d| `[classes]` of one rank's tokens, float64.

    The first four arguments are `[N]`, and their entry t belongs to token t. lengths: `[B]`, the lengths of the
    sequences. version: the trainer's current policy version. Tokens whose difference is NaN or infinite are counted,
    and enter no other sum.
    """
    is_finite = (logprobs - behavior_logprobs).isfinite()
    kept = loss_mask.bool() & is_finite
    before = torch.cumsum(loss_mask.long(), 0) - loss_mask.long()  # [N] trained tokens of the batch before this one
    first = torch.cumsum(lengths, 0) - lengths
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    # Subtract those before the sequence's first token. An empty last sequence would start after the last token.
    position = before - before[first.clamp_max(max(len(before) - 1, 0))][sequence]
    d = (logprobs - behavior_logprobs)[kept].double()
    near = bounded(d)
    w = near.exp()
    # [kept, COLUMNS]. expm1(d) - d is k3 = w - 1 - d without the loss of digits near 0.
    is_equal, is_near = d == 0, (d != 0) & (d.abs() <= NEAR)
    columns = [torch.ones_like(d), d.abs(), d, torch.expm1(near) - near, w, w * w, is_equal, is_near]
    values = torch.stack([*(column.double() for column in columns), torch.zeros_like(d)], 1)
    sums, largest = torch.zeros(len(CLASSES), COLUMNS, dtype=torch.float64), torch.zeros(len(CLASSES)).double()
    places = (  # every token counts in three classes: all, its age, its position
        torch.zeros(len(d), dtype=torch.int64),
        1 + _class_of((version - versions[kept]).clamp_min(0), AGES),
        1 + len(AGES) + _class_of(position[kept], POSITIONS),
    )
    for place in places:
        sums.index_add_(0, place, values)
        largest.scatter_reduce_(0, place, d.abs(), "amax")
    sums[0, -1] = (loss_mask.bool() & ~is_finite).sum()
    return sums, largest


def _class_of(values: Tensor, classes: dict[str, int]) -> Tensor:
    return torch.bucketize(values, torch.tensor(list(classes.values())), right=True) - 1


def metrics(sums: Tensor, largest: Tensor) -> dict[str, float]:
    """Return means over the tokens of all ranks, from sums and maxima combined over the ranks.

    mean, max: mean and maximum of |d|, in nats.
    k1, k3: the means of -d and of w - 1 - d, which estimate KL(server || trainer).
    ess: the effective sample size, as a share of the tokens.
    chi2: the chi-squared distance.
    equal, near, beyond: the shares of tokens whose log-probabilities are equal to the bit, differ by at most NEAR, and
      differ by more.
    not_finite: the number of tokens whose difference is NaN or infinite, which no other metric includes; absent if 0.

    The classes by age and by position have only mean, max, k3 and equal.
    """
    found: dict[str, float] = {"mismatch/not_finite": sums[0, -1].item()} if sums[0, -1] > 0 else {}
    for name, row, most in zip(CLASSES, sums.tolist(), largest.tolist(), strict=True):
        count, distance, d, k3, w, w2, equal, near, _ = row
        if count == 0:
            continue
        values = {"mean": distance / count, "max": most, "k3": k3 / count, "equal": equal / count}
        if name == "all":
            values |= {"k1": -d / count, "ess": w * w / (count * w2) if w2 > 0 else 0.0, "chi2": w2 / count - 1.0}
            values |= {"near": near / count, "beyond": (count - equal - near) / count}
        end = "" if name == "all" else f"_{name}"
        found |= {f"mismatch/{key}{end}": value for key, value in values.items()}
    return found


def check_alarm(found: dict[str, float], threshold: float, *, is_skipped: bool = False) -> None:
    """Raise RuntimeError if trainer and servers differ by more than `threshold` nats. With 0, there is no threshold.

    found: the result of `metrics`. A NaN or infinite difference raises at any threshold, unless `is_skipped`: the
    update was then already skipped and counted.
    """
    # Prefer tokens of the current policy. Older ones also differ because the policy has moved.
    key = "mismatch/mean_age_0" if "mismatch/mean_age_0" in found else "mismatch/mean"
    if not is_skipped and found.get("mismatch/not_finite", 0.0) > 0:
        raise RuntimeError(
            f"mismatch/not_finite = {found['mismatch/not_finite']:.0f} tokens: the trainer or the server that sampled "
            f"them gave a log-probability that is not finite. Look for infinite weights or logits in both, and at the "
            f"learning rate."
        )
    value = found.get(key, 0.0)
    if not math.isfinite(value) or (threshold > 0 and value > threshold):
        raise RuntimeError(
            f"{key} = {value:.4g} nats: trainer and servers differ by more than correction.alarm = {threshold:g} "
            f"in the log-probability of the same tokens. Compare their dtypes, sampling options and weights (a wrong "
            f"temperature or a stale server shows like this), or raise the threshold."
        )
