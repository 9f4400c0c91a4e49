from __future__ import annotations

import torch

from megatron_rl.experiment.metrics import batch_metrics, counts_by_doubling, counts_by_number
from megatron_rl.types import Trajectory, TrajectoryBatch


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


def test_a_step_counts_trained_tokens_of_replies_and_their_ages():
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
