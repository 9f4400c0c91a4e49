"""Evaluations on held-out prompts: mean reward, pass@k and majority vote, and replies decoded to text."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import getcontext
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.algo.reward_shaping import take_out_greedy, written_tokens
from megatron_rl.config import TrainConfig
from megatron_rl.rewards import find_last_number, find_tagged, last_boxed
from megatron_rl.rollout.groups import reward_of_each, trained_versions
from megatron_rl.telemetry.run_log import RunLog, Sample, Turn
from megatron_rl.types import TrajectoryBatch

RIGHT = 1.0
"""Minimum reward of a reply that counts as right."""


class Evaluations:
    """The evaluations of one run, begun and logged in step order. Only rank 0 begins evaluations.

    An evaluation takes place before the first step, after the last, and in between as configured. An asynchronous run
    does not wait for those in between, so their replies may come from several policy versions.
    """

    def __init__(
        self,
        config: TrainConfig,
        prompts: dict[str, list[dict[str, Any]]],
        log_file: RunLog,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """prompts: the prompts of each set. The sets are evaluated one after the other."""
        self.config, self.prompts, self.log_file, self.tokenizer = config, prompts, log_file, tokenizer
        self.scores: list[float] = []
        """Mean reward on the first set, for each logged evaluation."""
        self.are_right_or_wrong = True
        """False once a reply to the first set had a reward other than 0 or 1."""
        self._under_way: deque[tuple[int, Future[TrajectoryBatch]]] = deque()

    @property
    def change(self) -> str:
        """The first and the last score as text. Needs at least one logged evaluation."""
        name = "accuracy" if self.are_right_or_wrong else "reward"
        return f"held-out {name} {self.scores[0]:.2f} -> {self.scores[-1]:.2f}"

    def is_due(self, step: int) -> bool:
        every = self.config.run.evaluate_every_steps
        is_end = step in (0, self.config.run.steps)
        return bool(self.prompts) and (is_end or (every > 0 and step % every == 0))

    def are_waited_for(self, step: int) -> bool:
        return self.config.rollout.max_staleness == 0 or step in (0, self.config.run.steps)

    def begin(self, step: int, replies: Future[TrajectoryBatch]) -> None:
        self._under_way.append((step, replies))

    @property
    def steps_under_way(self) -> list[int]:
        return [step for step, _ in self._under_way]

    @property
    def replies_under_way(self) -> list[Future[TrajectoryBatch]]:
        return [replies for _, replies in self._under_way]

    def log_finished(self, *, is_ending: bool = False) -> None:
        """Log the finished evaluations, in step order. Raises RuntimeError if one has failed.

        is_ending: the run is about to end, so evaluations may have been cut off. A failed one is then no error, and the
        resumed run repeats it.
        """
        while self._under_way and self._under_way[0][1].done():
            step, replies = self._under_way[0]  # only the oldest, so that the log is in step order
            if is_ending and replies.exception() is not None:
                return
            self._under_way.popleft()
            batch = replies.result()
            versions = trained_versions(batch)
            ages = {}
            if self.config.rollout.max_staleness > 0 and len(versions):
                ages = {"oldest_version": int(versions.min()), "newest_version": int(versions.max())}
            scored = score_sets(self.tokenizer, batch, self.prompts)
            for name, one in scored.items():
                metrics = one.metrics | {"prompts": len(one.rewards)} | ages
                self.log_file.log_evaluation(step, name, metrics, one.samples)
            rewards = next(iter(scored.values())).rewards
            self.scores.append(sum(sum(row) / len(row) for row in rewards) / len(rewards))
            self.are_right_or_wrong &= {reward for row in rewards for reward in row} <= {0.0, 1.0}


@dataclass(kw_only=True)
class SetScores:
    """Scores of a policy's replies to one set of prompts. Prompts that failed are left out."""

    metrics: dict[str, float]
    places: list[int]
    """Indices of the prompts in the set."""
    rewards: list[list[float]]
    """Rewards of each prompt's replies, parallel to `answers`."""
    answers: list[list[str]]
    samples: list[Sample]
    """First reply to each prompt."""


def score_sets(
    tokenizer: PreTrainedTokenizerBase, batch: TrajectoryBatch, prompts: dict[str, list[dict[str, Any]]]
) -> dict[str, SetScores]:
    """Return the scores of each set that has replies.

    The batch's column `prompt` is an index into all sets, concatenated in their order. Trajectories of a prompt with
    the same `sample`, such as those of a debate's agents, count as one reply.
    """
    batch = take_out_greedy(batch)  # ReMax's baselines do not count as replies
    rows: dict[int, list[int]] = {}
    for number, prompt in enumerate(batch["prompt"].tolist()):
        rows.setdefault(prompt, []).append(number)
    rewards = reward_of_each(batch)
    found, first = {}, 0
    for name, members in prompts.items():
        places = [place for place in range(len(members)) if first + place in rows]
        replies = [rows[first + place] for place in places]
        first += len(members)
        if not places:  # all prompts of the set failed
            continue
        decoded = [
            [decode(tokenizer, batch, row, members[place].get("answer", "")) for row in numbers]
            for place, numbers in zip(places, replies, strict=True)
        ]
        values = [[float(rewards[row]) for row in numbers] for numbers in replies]
        answers = [[final_answer(sample.said) for sample in samples] for samples in decoded]
        if "sample" in batch:
            tries = [[int(batch["sample"][row]) for row in numbers] for numbers in replies]
            pairs = [as_samples(*columns) for columns in zip(tries, values, answers, strict=True)]
            values, answers = [value for value, _ in pairs], [answer for _, answer in pairs]
        found[name] = SetScores(
            metrics=summarize(values, answers),
            places=places,
            rewards=values,
            answers=answers,
            samples=[samples[0] for samples in decoded],
        )
    return found


def pass_at_k(replies: int, right: int, k: int) -> float:
    """Estimate the probability that at least one of k replies is right, if `right` of `replies` replies were.

    Source: arXiv 2107.03374, eq. 1.
    """
    if not 1 <= k <= replies:
        raise ValueError(f"pass@{k}: needs 1 <= k <= {replies} replies; sample more, or ask for a smaller k.")
    return 1.0 - math.comb(replies - right, k) / math.comb(replies, k)


def majority(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """Return the reward of the most frequent answer. If several answers tie, return the mean of their rewards.

    An answer's reward is the mean reward of its replies. Blank answers do not vote; if all are blank, return 0.
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
    """Combine trajectories into samples. Return each sample's reward and answer, in order of sample number.

    samples: sample number of each trajectory. A sample's reward is the mean of its trajectories' rewards. Its answer is
    their most frequent one, or the first of those if several tie.
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
    """Return the metrics of a set of P prompts.

    rewards, answers: one list per prompt, with an entry for each of its replies. The metrics are `accuracy`, or
    `reward/mean` if rewards other than 0 and 1 occur. If every prompt has at least n >= 2 replies, they also include
    pass@k for k = 2, 4, 8, ... and n, and maj@n.
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


def draw(batch: TrajectoryBatch, count: int, *, seed: int = 0) -> list[int]:
    """Draw `count` random trajectories: first one of each prompt, then a second one of each, and so on."""
    waiting: dict[int, list[int]] = {}
    # A separate generator, so that logging samples does not change other draws.
    for row in random.Random(seed).sample(range(len(batch)), len(batch)):
        waiting.setdefault(int(batch["group"][row]), []).append(row)
    rounds = itertools.zip_longest(*waiting.values())
    return [row for rows in rounds for row in rows if row is not None][:count]


def decode_samples(
    tokenizer: PreTrainedTokenizerBase, batch: TrajectoryBatch, *, prompts: list[dict[str, Any]] | None = None
) -> list[Sample]:
    """Decode all trajectories of a batch.

    prompts: the rows to which `prompt_index` refers, for the samples' answers.
    """
    answers = [""] * len(batch)
    if prompts is not None and "prompt_index" in batch:
        answers = [prompts[int(place)].get("answer", "") for place in batch["prompt_index"]]
    return [decode(tokenizer, batch, row, answer) for row, answer in enumerate(answers)]


def decode(tokenizer: PreTrainedTokenizerBase, batch: TrajectoryBatch, row: int, answer: Any = "") -> Sample:
    first, end = int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])
    ids, mask = batch["input_ids"][first:end], batch["loss_mask"][first:end]
    written = written_tokens(batch)[first:end]
    reward = batch["rewards"][first:end][mask].sum() if "rewards" in batch.tokens else batch["rewards"][row]
    # A turn begins wherever the author of the tokens changes.
    bounds = [0, *((written[1:] != written[:-1]).nonzero()[:, 0] + 1).tolist(), len(ids)]
    turns = [
        Turn(by="policy" if written[a] else "others", text=tokenizer.decode(ids[a:b]))
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    replies = [turn.text for turn in turns if turn.by == "policy"]
    return Sample(
        prompt=turns[0].text if turns[0].by == "others" else "",
        reply=replies[-1] if replies else "",
        reward=float(reward),
        answer=str(answer),
        turns=turns if len(replies) > 1 else [],
    )
