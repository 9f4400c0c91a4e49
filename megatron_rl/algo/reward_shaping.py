"""Reward shaping: turns the rewards that a workflow reported into the scores that an estimator compares.

The steps run in this order: factor for cut-off replies, overlong penalty, division by written tokens, running
normalisation, clip, KL penalty. If a dialogue has rewards by turn, they are multiplied by the same factors as its
total. Any amount that is added to the total, subtracted or clipped off goes to the trajectory's last trained token.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algo.normalize import group_numbers, mean_of, shares_of
from megatron_rl.algo.turns import turns_of
from megatron_rl.config import AlgorithmConfig, RewardShapingConfig
from megatron_rl.ops.reference import KL
from megatron_rl.types import TURN_REWARDS, TrajectoryBatch


class RunningMoments:
    """Mean and standard deviation of all rewards of the run so far (Welford's algorithm, merged batch by batch)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0

    @property
    def std(self) -> float:
        return sqrt(self.squares / self.count) if self.count else 0.0

    def add(self, values: Tensor) -> None:
        values = values.double()
        count, mean = len(values), float(values.mean())
        delta, total = mean - self.mean, self.count + count
        # Sum of squares about the common mean: both parts' own sums, plus the weighted distance of their means.
        self.squares += float((values - mean).square().sum()) + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


class KLController:
    """Weight of the KL penalty in the reward: fixed, or adapted to a target KL (Ziegler, arXiv 1909.08593)."""

    def __init__(self, options: AlgorithmConfig) -> None:
        self.options, self.coefficient = options, options.kl_coefficient

    def update(self, kl: float, trajectories: int) -> None:
        """Multiply the coefficient by 1 + clip(kl / target - 1, -0.2, 0.2) min(trajectories / horizon, 1).

        kl: the mean KL per trained token. trajectories: the number of trajectories in the step. The min keeps the
        coefficient positive if a step has more trajectories than the horizon.
        """
        if self.options.kl_target > 0:
            error = min(max(kl / self.options.kl_target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * min(trajectories / self.options.kl_horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.options.kl_target > 0:  # a fixed coefficient always comes from the config, also after a resume
            self.coefficient = state["coefficient"]


class RewardShaper:
    """Computes `scores` `[B]` and `token_rewards` `[N]`, and keeps the state of the adaptive shaping steps.

    A greedy reply's reward becomes `greedy_score` `[B]` by the same shaping, without a KL penalty.

        shaper = RewardShaper(config.reward_shaping, config.algo, longest_reply=config.generation.max_new_tokens)
        shaper(batch)
        batch["scores"], shaper.last["reward/shaped"]
    """

    def __init__(self, options: RewardShapingConfig, algo: AlgorithmConfig, *, longest_reply: int) -> None:
        """Start without a history of rewards.

        longest_reply: the length in tokens at which the overlong penalty is largest.
        """
        self.options, self.algo, self.longest_reply = options, algo, longest_reply
        self.moments, self.kl = RunningMoments(), KLController(algo)
        self.last: dict[str, float] = {}  # metrics of the last batch

    def __call__(self, batch: TrajectoryBatch) -> None:
        """Shape the rewards of a batch, and update the adaptive state.

        batch: the column `rewards` is `[B]`, or `[N]` if rewards are by token. Rewards of untrained tokens are ignored.
        A KL penalty also needs the columns `proximal_logprobs` and `ref_logprobs`.
        """
        by_token = token_rewards(batch)
        raw = batch.sums_of_tokens(by_token) if "rewards" in batch.tokens else batch["rewards"].double()
        longest, total = self._lengths(batch)
        scores = self._by_length(raw, longest, total)
        if self.options.running != "none":
            self.moments.add(means_of_fresh(batch, scores))  # this batch is included in its own scaling
        scores = self._scaled(scores)
        if "greedy_reward" in batch:
            batch.sequences["greedy_score"] = self._of_greedy(batch)
        if TURN_REWARDS in batch.tokens:
            by_token = self._times(by_token, batch.spread(longest), batch.spread(total))
            raw = self._times(raw, longest, total)
        # so that a trajectory's token rewards still add up to its score
        by_token = by_token + at_the_end(scores - raw, batch)
        self.last = {"reward/shaped": float(means_of_fresh(batch, scores).mean())}
        if self.algo.penalizes_reward:
            penalty, kl = self._kl_penalty(batch)
            by_token, scores = by_token - penalty, scores - batch.sums_of_tokens(penalty)
            self.last |= {"reward/kl": kl, "reward/kl_coefficient": self.kl.coefficient}
            self.kl.update(kl, len(batch))  # takes effect in the next step
        batch.sequences["scores"] = scores
        batch.tokens["token_rewards"] = by_token.float()

    def _lengths(self, batch: TrajectoryBatch) -> tuple[Tensor, Tensor]:
        """Return two numbers of tokens for each trajectory, `[B]` each: of its longest reply, and of all its replies.

        They are zeros if no option uses them.
        """
        if not self._is_by_length:
            nothing = torch.zeros(len(batch), dtype=torch.int64)
            return nothing, nothing
        total = batch.sums_of_tokens(written_tokens(batch).long())
        return longest_replies(batch), total

    @property
    def _is_by_length(self) -> bool:
        options = self.options
        return options.overlong_buffer > 0 or options.per_token or options.cut_off_share < 1

    def _of_greedy(self, batch: TrajectoryBatch) -> Tensor:
        """Shape `greedy_reward` like the rewards of sampled replies, `[B]`, using the running moments of the latter."""
        scores = batch["greedy_reward"].double()
        if not self._is_by_length:
            return self._scaled(scores)
        if "greedy_tokens" not in batch:
            raise ValueError(
                f"reward_shaping.overlong_buffer = {self.options.overlong_buffer}, cut_off_share = "
                f"{self.options.cut_off_share}, per_token = {self.options.per_token}: the trajectories carry "
                f"{sorted(batch.sequences)} and no greedy_tokens, so the greedy reply's reward cannot be shaped by its "
                f"length; have the workflow report them, as megatron_rl.workflows:ReMaxWorkflow does."
            )
        return self._scaled(self._by_length(scores, batch["greedy_tokens"], batch["greedy_tokens"]))

    def _by_length(self, rewards: Tensor, longest: Tensor, total: Tensor, *, with_penalty: bool = True) -> Tensor:
        """Apply the options that depend on lengths to rewards `[K]`.

        longest: `[K]`, the number of tokens of the trajectory's longest reply. total: `[K]`, the number of tokens of
        all its replies. with_penalty: False to leave the overlong penalty out.
        """
        options = self.options
        if options.cut_off_share < 1:
            rewards = torch.where(longest >= self.longest_reply, options.cut_off_share * rewards, rewards)
        if options.overlong_buffer > 0 and with_penalty:
            # DAPO's penalty (arXiv 2503.14476): 0 before the buffer, whole at the longest reply, linear in between.
            over = (longest - (self.longest_reply - options.overlong_buffer)) / options.overlong_buffer
            rewards = rewards - options.overlong_penalty * over.double().clamp(0.0, 1.0)
        return rewards / total.clamp_min(1) if options.per_token else rewards

    def _times(self, rewards: Tensor, longest: Tensor, total: Tensor) -> Tensor:
        """Multiply rewards `[K]` by the factors of the shaping, without adding its penalties.

        longest, total: lengths as in `_by_length`.
        """
        rewards = self._by_length(rewards, longest, total, with_penalty=False)
        return rewards / self.moments.std if self.options.running != "none" and self.moments.std > 0 else rewards

    def _scaled(self, scores: Tensor) -> Tensor:
        options = self.options
        if options.running != "none":
            centered = scores - self.moments.mean if options.running == "mean_std" else scores
            scores = centered / self.moments.std if self.moments.std > 0 else centered
        return scores.clamp(-options.clip, options.clip) if options.clip > 0 else scores

    def _kl_penalty(self, batch: TrajectoryBatch) -> tuple[Tensor, float]:
        """Return the KL penalty of each trained token `[N]`, and the mean KL per trained token.

        The KL is KL(policy || reference), for the policy before the step's updates.
        """
        mask = batch["loss_mask"]
        divergence = KL[self.algo.kl_estimator](batch["proximal_logprobs"].double(), batch["ref_logprobs"].double())
        divergence = divergence.masked_fill(~mask, 0.0)
        count = int(batch.total(mask.sum()))
        mean = float(batch.sums_of_tokens(divergence).sum()) / max(count, 1)
        return self.kl.coefficient * divergence, mean

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments.state_dict(), "kl": self.kl.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments.load_state_dict(state["moments"])
        self.kl.load_state_dict(state["kl"])


def means_of_fresh(batch: TrajectoryBatch, scores: Tensor) -> Tensor:
    """Return the mean score of each sample, `[S]`. Reused samples, which an earlier step has counted, are left out.

    scores: `[B]`, one per trajectory.
    """
    return batch.fresh().means_of_samples(scores[~batch.is_reused])


def add_scores(batch: TrajectoryBatch, scores: Tensor, *, coefficient: float) -> None:
    """Add a reward model's `[B]` scores, times `coefficient`, to the workflow's rewards.

    The column `model_rewards` keeps the scores. If rewards are by token or by turn, a trajectory's score is added to
    its last trained token. It is dropped if the trajectory has no trained token.
    """
    batch.sequences["model_rewards"] = scores
    if TURN_REWARDS in batch.tokens:
        batch.tokens[TURN_REWARDS] = batch[TURN_REWARDS] + at_the_end(coefficient * scores, batch)
    if "rewards" in batch.tokens:
        batch.tokens["rewards"] = batch["rewards"] + at_the_end(coefficient * scores, batch)
    else:
        batch.sequences["rewards"] = batch["rewards"] + coefficient * scores


def take_out_greedy(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Return the batch without its greedy replies.

    The reward of a group's greedy reply becomes the column `greedy_reward` `[B]` of the group's other trajectories.
    """
    if "is_greedy" not in batch:
        return batch
    is_greedy = batch["is_greedy"]
    # Weights of 0 exclude the sampled replies from the group's mean.
    baseline = mean_of(batch["rewards"], group_numbers(batch["group"]), is_greedy * shares_of(batch.samples))
    sampled = batch.select((is_greedy == 0).nonzero()[:, 0].tolist())
    sampled.sequences["greedy_reward"] = baseline[is_greedy == 0]
    del sampled.sequences["is_greedy"]
    return sampled


def token_rewards(batch: TrajectoryBatch) -> Tensor:
    """Return the workflow's rewards by token, `[N]` float64, 0 on untrained tokens.

    A trajectory's single reward goes on its last trained token. The reward of a turn goes on the last trained token up
    to the end of the turn.
    """
    if "rewards" in batch.tokens:
        return batch["rewards"].double().masked_fill(~batch["loss_mask"], 0.0)
    if TURN_REWARDS in batch.tokens:
        return where_they_arose(batch[TURN_REWARDS].double(), batch)
    return at_the_end(batch["rewards"].double(), batch)


def where_they_arose(values: Tensor, batch: TrajectoryBatch) -> Tensor:
    """Move values off untrained tokens: each goes to the last trained token before it in its trajectory. Returns `[N]`.

    A value is dropped if no trained token precedes it.
    """
    trained, place = batch["loss_mask"].nonzero()[:, 0], values.nonzero()[:, 0]
    before = torch.searchsorted(trained, place, right=True) - 1  # index among the trained tokens
    has_one = before >= 0
    place, target = place[has_one], trained[before[has_one]]
    is_own = target >= batch.cu_seqlens[batch.sequence_ids[place]]
    return torch.zeros_like(values).index_add_(0, target[is_own], values[place[is_own]])


def written_tokens(batch: TrajectoryBatch) -> Tensor:
    """Return which tokens the model wrote, `[N]` bool: those with a version, and all trained tokens.

    The loss may exclude written tokens that are too old or are trained in another trajectory. A workflow without
    versions (from_padded) writes -1 for all tokens.
    """
    return batch["loss_mask"] | (batch["versions"] >= 0)


def longest_replies(batch: TrajectoryBatch) -> Tensor:
    """Return the number of tokens of each trajectory's longest reply, `[B]` int64."""
    turn, bounds = turns_of(written_tokens(batch), batch.cu_seqlens)
    lengths = torch.bincount(turn[turn >= 0], minlength=int(bounds[-1]))  # [turns]
    trajectory = torch.repeat_interleave(torch.arange(len(batch)), bounds.diff())
    return batch.completed(torch.zeros(len(batch), dtype=torch.int64).scatter_reduce(0, trajectory, lengths, "amax"))


def at_the_end(values: Tensor, batch: TrajectoryBatch) -> Tensor:
    """Put the value of each trajectory on its last trained token: `[B]` -> `[N]`. All other tokens get 0.

    The value of a trajectory without a trained token is dropped.
    """
    trained = batch["loss_mask"].nonzero()[:, 0]
    sequence = batch.sequence_ids[trained]
    is_last = torch.ones(len(trained), dtype=torch.bool)
    is_last[:-1] = sequence[1:] != sequence[:-1]  # the next trained token belongs to another trajectory
    result = torch.zeros(len(batch["loss_mask"]), dtype=values.dtype)
    result[trained[is_last]] = values[sequence[is_last]]
    return result
