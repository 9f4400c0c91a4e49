from __future__ import annotations

from itertools import permutations

import pytest
import torch

from megatron_rl.rollout.groups import is_uniform, mask_older
from megatron_rl.rollout.reuse_buffer import with_reused
from megatron_rl.run.step_metrics import (
    batch_metrics,
    counts_by_doubling,
    counts_by_number,
    critic_metrics,
    policy_metrics,
)
from megatron_rl.types import StepStats, Trajectory, TrajectoryBatch


def test_whole_numbers_are_counted_by_doubling_classes():
    values = torch.tensor([0, 1, 2, 3, 4, 7, 8, 2**20 - 1, 2**20])
    counts = counts_by_doubling(values)
    assert counts["0 to 1"] == 2 and counts["2 to 3"] == 2 and counts["4 to 7"] == 2 and counts["8 to 15"] == 1
    assert counts["524288 to 1048575"] == 1 and counts["1048576 to 2097151"] == 1
    assert sum(counts.values()) == len(values) and list(counts)[0] == "0 to 1"
    assert counts_by_doubling(torch.tensor([5, 6])) == {"4 to 7": 2}
    assert counts_by_doubling(torch.tensor([], dtype=torch.int64)) == {}


def test_ages_are_counted_by_number():
    assert counts_by_number(torch.tensor([0, 2, 2])) == {"0": 1, "1": 0, "2": 2}


def test_a_step_counts_tokens_of_replies_and_the_ages_of_the_trained_ones():
    def trajectory(reply: int, version: int) -> Trajectory:
        return Trajectory(
            input_ids=torch.ones(3 + reply, dtype=torch.int64),
            loss_mask=torch.arange(3 + reply) >= 3,
            logprobs=torch.zeros(3 + reply),
            versions=torch.tensor([-1] * 3 + [version] * reply),
            reward=1.0,
        )

    batch = TrajectoryBatch.from_trajectories([[trajectory(1, 4), trajectory(6, 4)], [trajectory(5, 2)]])
    metrics = batch_metrics(batch, version=5)
    assert metrics["histogram/reply_tokens"] == {"0 to 1": 1, "2 to 3": 0, "4 to 7": 2}
    assert metrics["histogram/token_age"] == {"0": 0, "1": 7, "2": 0, "3": 5}
    mask_older(batch, 4)  # the third reply is as long as before
    metrics = batch_metrics(batch, version=5)
    assert metrics["histogram/reply_tokens"] == {"0 to 1": 1, "2 to 3": 0, "4 to 7": 2}
    assert metrics["histogram/token_age"] == {"0": 0, "1": 7}


def test_numbers_of_trajectories_are_means_over_samples():
    def trajectory(turns: float, sample: int) -> Trajectory:
        ones = torch.ones(3, dtype=torch.int64)
        numbers = {"turns": turns, "sample": sample, "part/right": 1.0}
        return Trajectory(
            input_ids=ones, loss_mask=ones > 0, logprobs=-ones.float(), versions=ones, reward=1.0, sequence=numbers
        )

    batch = TrajectoryBatch.from_trajectories([[trajectory(1, 0), trajectory(3, 0), trajectory(5, 1)]])
    metrics = batch_metrics(batch, version=1)
    own = {name: value for name, value in metrics.items() if name.startswith("trajectory/")}
    assert own == {"trajectory/turns": (2.0 + 5.0) / 2}


def test_what_is_reused_is_reported_apart_and_in_nothing_else():
    def trajectory(version: int, reward: float) -> Trajectory:
        ones = torch.ones(3, dtype=torch.int64)
        return Trajectory(
            input_ids=ones, loss_mask=ones > 0, logprobs=-ones.float(), versions=ones * version, reward=reward
        )

    fresh = TrajectoryBatch.from_trajectories([[trajectory(8, 0.0), trajectory(9, 0.5)]])
    again = TrajectoryBatch.from_trajectories([[trajectory(2, 1.0), trajectory(3, 0.0), trajectory(4, 0.2)]])
    expected = batch_metrics(fresh, version=9)
    found = batch_metrics(with_reused(fresh, [again]), version=9)
    apart = {key: found.pop(key) for key in list(found) if key.startswith("reuse/")}
    assert found == expected
    assert apart == {"reuse/trajectories": 3, "reuse/reward": pytest.approx(0.4), "reuse/staleness": 6.0}
    assert batch_metrics(with_reused(fresh, []), version=9) == expected | {"reuse/trajectories": 0}


def test_groups_of_equal_rewards_have_no_variance_whatever_the_rewards():
    def trajectory(reward: float) -> Trajectory:
        ones = torch.ones(2, dtype=torch.int64)
        return Trajectory(input_ids=ones, loss_mask=ones > 0, logprobs=-ones, versions=ones, reward=reward)

    equal = [[trajectory(0.1 * n)] * (n + 2) for n in range(30)]
    batch = TrajectoryBatch.from_trajectories([*equal, [trajectory(0.1), trajectory(0.2)], [trajectory(3.0)]])
    metrics = batch_metrics(batch, version=1)
    assert metrics["reward/groups_without_variance"] == 31 / 32
    totals = torch.tensor([0.1, 0.2, 0.3, 0.0, 0.3, 0.2, 0.1])
    one = TrajectoryBatch.from_trajectories([[trajectory(0.0)] * 2])
    for order in permutations(range(4)):  # of one sum, which is rounded in the order of its terms
        tokens = torch.cat([totals[:4], totals[list(order)]])
        split = TrajectoryBatch({"rewards": tokens, "loss_mask": tokens >= 0}, {}, torch.tensor([0, 4, 8]))
        assert is_uniform(split)
    assert is_uniform(one) and is_uniform(batch.select([0, 1])) and not is_uniform(batch.select([0, 5]))


def test_means_of_a_step_are_those_of_its_applied_updates_and_what_was_bounded_counts_in_all():
    def update(loss, *, applied, bounded):
        sums = {"entropy": loss, "tokens": 4.0, "bounded_tokens": bounded, "not_finite": float(not applied)}
        return StepStats(loss=loss, weight=4.0, grad_norm=loss, applied=applied, lr=1e-3, sums=sums)

    skipped, applied = update(float("nan"), applied=False, bounded=3.0), update(2.0, applied=True, bounded=1.0)
    metrics = policy_metrics([skipped, applied])
    assert metrics["policy/loss"] == metrics["policy/grad_norm"] == 2.0 and metrics["policy/entropy"] == 0.5
    assert metrics["policy/bounded_tokens"] == 0.5 and metrics["policy/not_finite"] == 1 / 8
    assert metrics["policy/skipped_updates"] == 1 and "policy/tokens" not in metrics
    assert policy_metrics([skipped])["policy/skipped_updates"] == 1


def test_a_step_without_a_trained_token_has_metrics_too():
    sums = dict.fromkeys(("tokens", "entropy", "returns", "squared_returns", "errors", "squared_errors"), 0.0)
    nothing = StepStats(loss=0.0, weight=0.0, grad_norm=0.0, applied=True, lr=1e-3, sums=sums)
    assert policy_metrics([nothing])["policy/loss"] == 0.0
    assert critic_metrics([nothing])["critic/mean_return"] == 0.0
