"""Training on pairs of replies: what is checked before it, and what a step of its loop (data_run.py) does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_rl import parallel
from megatron_rl.algo.catalogue import find_pair_loss
from megatron_rl.algo.preference import PreferenceLoss, pairs_of, preference_metrics
from megatron_rl.api import TrainEngine
from megatron_rl.batch import exchange
from megatron_rl.config import TrainConfig
from megatron_rl.run.data_run import Data, DataRun, DataTraining, check_data_run
from megatron_rl.types import StepStats, TrajectoryBatch


def check_pair_training(config: TrainConfig) -> tuple[PreferenceLoss, Data]:
    """Check everything that can be checked before a process group is started: ValueError names key, value and way out.

    Returns the loss; and the order of the training pairs, these pairs, and the held-out pairs of each set.
    """
    options = config.preference
    if not options.loss:
        raise ValueError(
            "preference.loss = '': names no loss of pairs; set dpo, ipo or simpo for a policy, or bradley_terry for a "
            "reward model. RL is started by megatron-rl launch."
        )
    loss = find_pair_loss(options.loss, options.loss_args, import_from=config.run.import_from)
    return loss, check_data_run(config, head=loss.entry.head)


class PairTraining(DataTraining):
    """Trains an engine on pairs, whose prompt is computed once where `share_prompts` says so."""

    def __init__(
        self, engine: TrainEngine, groups: parallel.ParallelGroups, loss: PreferenceLoss, *, share_prompts: bool = True
    ) -> None:
        super().__init__(engine, groups, loss.for_engine(), pairs_of, share_prompts=share_prompts)
        self.entry = loss.entry

    def ref_logprobs(self, pairs: TrajectoryBatch) -> Tensor:
        """Return log p of every reply token by the engine as it is now, `[N]` float32; 0 for prompts.

        Updates and evaluations want it of their pairs where the loss needs a reference.
        """
        self.engine.eval()
        return exchange.by_token(pairs, self.groups, self.engine.forward, share_prompts=self.share_prompts)

    def _share(self, batch: TrajectoryBatch, seed: int) -> TrajectoryBatch:
        if self.entry.head == "value":  # the score is the value behind the last token
            batch = batch.with_one_more_token()[0]
        return super()._share(batch, seed)


class Reference:
    """What the model of the run's start makes of the pairs that are still to be trained, by their number.

    The engine computes it before its first update, which needs no second model. Every rank holds 4 bytes for each token
    of these pairs' replies, and nothing of their prompts.
    """

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def keep(self, numbers: list[int], pairs: TrajectoryBatch, logprobs: Tensor) -> None:
        """logprobs: `[N]` of the batch that these numbers are."""
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), pairs["loss_mask"].cumsum(0)])[pairs.cu_seqlens[::2]]
        parts = logprobs[pairs["loss_mask"]].split(ends.diff().tolist())
        self._of |= zip(numbers, parts, strict=True)

    def add_to(self, pairs: TrajectoryBatch, numbers: list[int]) -> None:
        """Give the batch that these numbers are its `ref_logprobs`."""
        known = torch.zeros(len(pairs["loss_mask"]))
        known[pairs["loss_mask"]] = torch.cat([self._of[number] for number in numbers])
        pairs.tokens["ref_logprobs"] = known


def asked_together(numbers_of: Callable[[int], list[int]], steps: int, first_step: int) -> Iterator[list[int]]:
    """Yield the pairs that the steps from `first_step` on train, parted by the step of the run in which they are new.

    numbers_of: the pairs of a step. A pair has the same company whichever step a life of the run begins with, so a
    resumed run finds the same bits.
    """
    needed = {number for step in range(first_step, steps) for number in numbers_of(step)}
    seen: set[int] = set()
    for step in range(steps):
        new = sorted(set(numbers_of(step)) - seen)
        seen.update(new)
        if not needed.isdisjoint(new):
            yield new


class PairRun(DataRun):
    """All parts of one run on pairs on this rank."""

    SECTION, WEIGHT = "preference", "pairs"
    training: PairTraining

    def _check(self) -> Data:
        self.loss, data = check_pair_training(self.config)
        self.head, self.reference = self.loss.entry.head, Reference()
        return data

    def _make_training(self) -> PairTraining:
        return PairTraining(self.engine, self.groups, self.loss, share_prompts=self.config.batch.share_prompts)

    def _metrics_of(self, stats: StepStats) -> dict[str, float]:
        """Means over pairs; `accuracy` is the share of pairs whose chosen reply is the better one by the model."""
        return {"loss": stats.loss} | preference_metrics(stats.sums, max(stats.weight, 1.0))

    def _prepare(self) -> bool:
        """Compute what the loss needs of the reference, which is the model as it is now."""
        if not self.loss.entry.needs_reference:
            return True
        for pairs in self.held_out.values():
            with self.timers("reference"):
                pairs.tokens["ref_logprobs"] = self.training.ref_logprobs(pairs)
        for numbers in asked_together(self._numbers, self.config.run.steps, self.first_step):
            if self.stop_is_near():
                return False
            with self.timers("reference"):
                pairs = self.rows.batch(numbers)
                self.reference.keep(numbers, pairs, self.training.ref_logprobs(pairs))
        return True

    def _batch(self, step: int) -> TrajectoryBatch:
        pairs = super()._batch(step)
        if self.loss.entry.needs_reference:
            self.reference.add_to(pairs, self._numbers(step))
        return pairs
