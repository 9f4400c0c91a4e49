"""PolicyActor: the backend-agnostic RL step over any TrainEngine."""

from __future__ import annotations

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

        The proximal policy is that of the first update, whose training pass computes its log-probs: it needs no more.
        """
        for number, share in enumerate(shares):
            if number > 0 and self.correction.proximal == "recompute":
                share.tokens["proximal_logprobs"] = self.engine.forward(share, temperature=self.temperature)
            if number > 0 and self.correction.proximal == "loglinear":
                age = (self.engine.get_version() - share["versions"]) * len(shares)
                share.tokens["proximal_share"] = proximal_share(age, updates_done=number)
            if self.reference is not None:
                share.tokens["ref_logprobs"] = self.reference.forward(share, temperature=self.temperature)

    def update(self, shares: list[TrajectoryBatch]) -> list[StepStats]:
        """Apply one optimizer step per share; all ranks call it with as many shares.

        However many there are, the policy that comes of them is one version, which is published once; where all were
        skipped it is the one that was. So a token's age is the number of publications since it was sampled.
        """
        loss = PolicyLoss(self.options, self.correction)
        by_row, version = not loss.terms.by_sequence, self.engine.get_version()
        stats = update_each(self.engine, shares, LogprobLoss(loss, temperature=self.temperature, by_row=by_row))
        self.engine.set_version(version + any(s.applied for s in stats))
        return stats


def proximal_share(age: Tensor, *, updates_done: int) -> Tensor:
    """Where the proximal policy lies between the behaviour policy (0) and the trained one (1), `[N]` float32.

    age: `[N]` updates between the behaviour policy and the step's beginning, where the proximal one is; updates_done:
    those of this step before this one, at least 1. The log-probability is taken to move evenly with the updates (A-3PO,
    arXiv 2512.06547, equation of alpha).
    """
    before = age.clamp_min(0).float()
    return before / (before + updates_done)


def update_each(engine: TrainEngine, shares: list[TrajectoryBatch], loss: LogprobLoss | ValueLoss) -> list[StepStats]:
    """Apply one optimizer step per share, each followed by one of the learning rate's schedule."""
    engine.train()
    stats = []
    for share in shares:
        stats.append(engine.train_batch(share, loss))
        engine.step_lr_scheduler()
    return stats
