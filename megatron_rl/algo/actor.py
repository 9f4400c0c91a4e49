"""PolicyActor: the backend-agnostic RL step over any TrainEngine."""

from __future__ import annotations

from megatron_rl.algo import advantage
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss, TrainEngine, ValueLoss
from megatron_rl.config import AlgorithmConfig
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
        reference: TrainEngine | None = None,
    ) -> None:
        if options.kl_coefficient > 0 and reference is None:
            raise ValueError(
                f"algo.kl_coefficient = {options.kl_coefficient}: the KL term needs a reference engine; pass one or "
                f"set it to 0."
            )
        self.engine, self.options, self.reference, self.temperature = engine, options, reference, temperature

    def compute_advantages(self, batch: TrajectoryBatch) -> None:
        """Set `advantages`. The batch holds whole groups."""
        advantage.compute(self.options.advantage, batch, normalize_std=self.options.normalize_std)

    def compute_logprobs(self, shares: list[TrajectoryBatch]) -> None:
        """Set `proximal_logprobs` before the first update, and `ref_logprobs` where the loss has a KL term.

        With one update in the step the training pass computes the proximal log-probs itself, and this pass is saved.
        """
        for share in shares:
            if len(shares) > 1:
                share.tokens["proximal_logprobs"] = self.engine.forward(share, temperature=self.temperature)
            if self.reference is not None:
                share.tokens["ref_logprobs"] = self.reference.forward(share, temperature=self.temperature)

    def update(self, shares: list[TrajectoryBatch]) -> list[StepStats]:
        """Apply one optimizer step per share; all ranks call it with as many shares."""
        loss = LogprobLoss(PolicyLoss(self.options), temperature=self.temperature, by_row=True)
        return update_each(self.engine, shares, loss)


def update_each(engine: TrainEngine, shares: list[TrajectoryBatch], loss: LogprobLoss | ValueLoss) -> list[StepStats]:
    """Apply one optimizer step per share, each followed by one of the learning rate's schedule."""
    engine.train()
    stats = []
    for share in shares:
        stats.append(engine.train_batch(share, loss))
        engine.step_lr_scheduler()
    return stats
