"""Training on answers: what is checked before it, and what it and a warm start are made of."""

from __future__ import annotations

import torch

from megatron_rl import parallel
from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss, TrainEngine
from megatron_rl.config import TrainConfig
from megatron_rl.run.data_run import Data, DataRun, DataTraining, check_data_run
from megatron_rl.types import StepStats


def check_supervised_training(config: TrainConfig) -> Data:
    """Check everything that can be checked before a process group is started: ValueError names key, value and way out.

    Returns the order of the training rows, these rows, and the held-out rows of each set.
    """
    if not config.supervised.answer:
        raise ValueError(
            "supervised.answer = '': names no column of the rows; set the one with the answer's text, or messages. RL "
            "is started by megatron-rl launch."
        )
    return check_data_run(config, head="policy")


def answer_training(engine: TrainEngine, groups: parallel.ParallelGroups) -> DataTraining:
    """What trains a policy on answers: the loss is the mean of -log p over the answers' tokens."""
    return DataTraining(engine, groups, LogprobLoss(supervised, by_row=True))


class SupervisedRun(DataRun):
    """All parts of one run on answers on this rank."""

    SECTION, WEIGHT = "supervised", "tokens"

    def _check(self) -> Data:
        return check_supervised_training(self.config)

    def _make_training(self) -> DataTraining:
        return answer_training(self.engine, self.groups)

    def _metrics_of(self, stats: StepStats) -> dict[str, float]:
        return {"loss": stats.loss, "perplexity": float(torch.tensor(stats.loss).exp())}
