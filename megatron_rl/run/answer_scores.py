"""The scores of several replies to each prompt: mean reward, pass@k and majority vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from decimal import getcontext

from megatron_rl.rewards import find_last_number, find_tagged, last_boxed

RIGHT = 1.0
"""Reward from which on a reply solves its prompt."""


def pass_at_k(replies: int, right: int, k: int) -> float:
    """Chance that at least one of k replies is right, drawn without repetition from `replies` of which `right` are.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of arXiv 2107.03374, eq. 1.
    """
    if not 1 <= k <= replies:
        raise ValueError(f"pass@{k}: needs 1 <= k <= {replies} replies; sample more, or ask for a smaller k.")
    return 1.0 - math.comb(replies - right, k) / math.comb(replies, k)


def majority(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """Reward of the answer that most replies give; of several as frequent, the mean. Blank answers do not vote.

    An answer's reward is the mean of those of the replies that give it. 0 where none gives any.
    """
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(_mean([r for a, r in zip(answers, rewards, strict=True) if a == w]) for w in winners) / len(winners)


def final_answer(text: str) -> str:
    """Return what a reply gives as its answer: the last <answer>, else the last \\boxed, the last number, its text."""
    if found := (find_tagged(text) or last_boxed(text)).strip():
        return found
    number = find_last_number(text)
    if number is None:
        return text.strip()
    # Longer ones would be rounded to one vote, or overflow.
    return str(number.normalize() if len(number.as_tuple().digits) <= getcontext().prec else number)


def as_samples(
    samples: Sequence[int], rewards: Sequence[float], answers: Sequence[str]
) -> tuple[list[float], list[str]]:
    """Return the reward and the answer of each sample, in their order, from those of its trajectories.

    samples: which one each trajectory is of. The reward is their mean, so that a sample is right where all of them
    are; the answer is what most of them give, and of several as frequent the first.
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
    """Return the metrics of a data set from its replies' rewards and answers, by prompt; `[P][n]`, n may differ.

    `accuracy`, or `reward/mean` where rewards are not right or wrong; with 2 replies or more for each prompt, pass@k
    for k = 2, 4, 8, ... and their number, and maj@ that number.
    """
    flat = [reward for row in rewards for reward in row]
    name = "accuracy" if set(flat) <= {0.0, 1.0} else "reward/mean"
    metrics = {name: _mean([_mean(row) for row in rewards])}
    fewest = min(map(len, rewards))
    if fewest > 1:
        for k in sorted({2**power for power in range(1, fewest.bit_length()) if 2**power <= fewest} | {fewest}):
            metrics[f"pass@{k}"] = _mean([pass_at_k(len(r), sum(x >= RIGHT for x in r), k) for r in rewards])
        # As many of each prompt, or maj@ would be of another number for some.
        votes = [majority(a[:fewest], r[:fewest]) for a, r in zip(answers, rewards, strict=True)]
        metrics[f"maj@{fewest}"] = _mean(votes)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
