"""PolicyActor: the backend-agnostic RL step over any TrainEngine."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algo import advantage
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss, TrainEngine, ValueLoss
from megatron_rl.config import AlgorithmConfig, CorrectionConfig
from megatron_rl.types import StepStats, TrajectoryBatch


class PolicyActor:
    """Turns a batch of trajectories into updates of `engine`.

    `reference` is a frozen engine, needed for a KL term only.
    """

    def __init__(
        self,
        engine: TrainEngine,
        options: AlgorithmConfig,
        *,
        temperature: float,
        correction: CorrectionConfig | None = None,
        reference: TrainEngine | None = None,
    ) -> None:
        if options.kl_coefficient > 0 and reference is None:
            raise ValueError(
                f"algo.kl_coefficient = {options.kl_coefficient}: the KL term needs a reference engine; pass one or "
                f"set it to 0."
            )
        self.engine, self.reference = engine, reference
        self.options, self.correction, self.temperature = options, correction or CorrectionConfig(), temperature

    def compute_advantages(self, batch: TrajectoryBatch) -> None:
        """Set `advantages`. The batch holds whole groups."""
        advantage.compute(self.options.advantage, batch, normalize_std=self.options.normalize_std)

    def compute_logprobs(self, shares: list[TrajectoryBatch]) -> None:
        """Set what the loss needs to know of other policies, before the first update.

        With one update in the step the training pass computes the proximal log-probs itself, and this pass is saved.
        """
        for number, share in enumerate(shares):
            if len(shares) > 1 and self.correction.proximal == "recompute":
                share.tokens["proximal_logprobs"] = self.engine.forward(share, temperature=self.temperature)
            if len(shares) > 1 and self.correction.proximal == "loglinear":
                age = self.engine.get_version() - share["versions"]
                share.tokens["proximal_share"] = proximal_share(age, updates_done=number)
            if self.reference is not None:
                share.tokens["ref_logprobs"] = self.reference.forward(share, temperature=self.temperature)

    def update(self, shares: list[TrajectoryBatch]) -> list[StepStats]:
        """Apply one optimizer step per share; all ranks call it with as many shares."""
        loss = PolicyLoss(self.options, self.correction)
        by_row = not loss.terms.by_sequence
        return update_each(self.engine, shares, LogprobLoss(loss, temperature=self.temperature, by_row=by_row))


def proximal_share(age: Tensor, *, updates_done: int) -> Tensor:
    """Where the proximal policy lies between the behaviour policy (0) and the trained one (1), `[N]` float32.

    age: `[N]` updates between the behaviour policy and the step's beginning, where the proximal one is; updates_done:
    those of this step before this one. The log-probability is taken to move evenly with the updates.
    """
    before = age.clamp_min(0).float()
    return torch.where(before + updates_done > 0, before / (before + updates_done), 1.0)


def update_each(engine: TrainEngine, shares: list[TrajectoryBatch], loss: LogprobLoss | ValueLoss) -> list[StepStats]:
    """Apply one optimizer step per share, each followed by one of the learning rate's schedule."""
    engine.train()
    stats = []
    for share in shares:
        stats.append(engine.train_batch(share, loss))
        engine.step_lr_scheduler()
    return stats
