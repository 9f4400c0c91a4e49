"""Critic: the backend-agnostic side of PPO that estimates values, over any TrainEngine with a value head."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algo.actor import update_each
from megatron_rl.algo.loss import ValueClipLoss
from megatron_rl.api import TrainEngine, ValueLoss
from megatron_rl.config import CriticConfig
from megatron_rl.types import StepStats, TrajectoryBatch


class Critic:
    """Estimates values, and turns returns into updates of `engine`."""

    def __init__(self, engine: TrainEngine, options: CriticConfig) -> None:
        self.engine, self.options = engine, options

    def values(self, share: TrajectoryBatch) -> Tensor:
        """Return `[N]` float32: the value of the state in which each trained token was chosen. All ranks call it."""
        return self.engine.forward(share)

    def update(self, shares: list[TrajectoryBatch]) -> list[StepStats]:
        """Apply one optimizer step per share; all ranks call it with as many shares."""
        return update_each(self.engine, shares, ValueLoss(ValueClipLoss(self.options.value_clip)))
