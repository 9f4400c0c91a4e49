"""Scores of several replies to each prompt: mean reward, pass@k and majority vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from decimal import getcontext

from megatron_rl.rewards import find_last_number, find_tagged, last_boxed

RIGHT = 1.0
"""Minimum reward of a reply that counts as right."""


def pass_at_k(replies: int, right: int, k: int) -> float:
    """Estimate the probability that at least one of k replies is right.

    The estimate uses n = `replies` samples, of which c = `right` were right. It is 1 - C(n - c, k) / C(n, k), the
    unbiased estimate of arXiv 2107.03374, eq. 1.
    """
    if not 1 <= k <= replies:
        raise ValueError(f"pass@{k}: needs 1 <= k <= {replies} replies; sample more, or ask for a smaller k.")
    return 1.0 - math.comb(replies - right, k) / math.comb(replies, k)


def majority(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """Return the reward of the most frequent answer. If several answers tie, return the mean of their rewards.

    An answer's reward is the mean reward of the replies that give it. Blank answers do not vote; the result is 0 if all
    answers are blank.
    """
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(_mean([r for a, r in zip(answers, rewards, strict=True) if a == w]) for w in winners) / len(winners)


def final_answer(text: str) -> str:
    """Return a reply's final answer: the last <answer>, else the last \\boxed, the last number, or the whole text."""
    if found := (find_tagged(text) or last_boxed(text)).strip():
        return found
    number = find_last_number(text)
    if number is None:
        return text.strip()
    # Normalizing a longer number would round it, which merges votes, or overflow.
    return str(number.normalize() if len(number.as_tuple().digits) <= getcontext().prec else number)


def as_samples(
    samples: Sequence[int], rewards: Sequence[float], answers: Sequence[str]
) -> tuple[list[float], list[str]]:
    """Return the reward and the answer of each sample, in order of sample number, from its trajectories.

    samples: sample number of each trajectory. A sample's reward is the mean of its trajectories' rewards, so the sample
    is right only if all of its trajectories are. Its answer is the most frequent one among them, the first if tied.
    """
    rows: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        rows.setdefault(sample, []).append(row)
    votes = [Counter(answers[row] for row in rows[sample]) for sample in sorted(rows)]
    return (
        [_mean([rewards[row] for row in rows[sample]]) for sample in sorted(rows)],
        [vote.most_common(1)[0][0] for vote in votes],
    )


def summarize(rewards: Sequence[Sequence[float]], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the metrics of a data set. rewards, answers: those of each prompt's replies, `[P][n]`; n may vary.

    Metrics are `accuracy`, or `reward/mean` if rewards other than 0 and 1 occur. If every prompt has at least n >= 2
    replies, they include pass@k for k = 2, 4, 8, ... and n, and maj@n.
    """
    flat = [reward for row in rewards for reward in row]
    name = "accuracy" if set(flat) <= {0.0, 1.0} else "reward/mean"
    metrics = {name: _mean([_mean(row) for row in rewards])}
    fewest = min(map(len, rewards))
    if fewest > 1:
        for k in sorted({2**power for power in range(1, fewest.bit_length()) if 2**power <= fewest} | {fewest}):
            metrics[f"pass@{k}"] = _mean([pass_at_k(len(r), sum(x >= RIGHT for x in r), k) for r in rewards])
        # The same number for each prompt, so that maj@ means the same.
        votes = [majority(a[:fewest], r[:fewest]) for a, r in zip(answers, rewards, strict=True)]
        metrics[f"maj@{fewest}"] = _mean(votes)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
