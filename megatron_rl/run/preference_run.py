"""Preference training of a policy or a reward model on pairs of replies, with the same engine as RL."""

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
from megatron_rl.run.row_training import RowData, RowRun, RowTraining, check_rows
from megatron_rl.types import StepStats, TrajectoryBatch


def check_preference(config: TrainConfig) -> tuple[PreferenceLoss, RowData]:
    """Check the config before a process group is started. Return the loss and the pairs. Raises ValueError."""
    options = config.preference
    if not options.loss:
        raise ValueError(
            "preference.loss = '': names no loss of pairs; set dpo, ipo or simpo for a policy, or bradley_terry for a "
            "reward model. RL is started by megatron-rl launch."
        )
    loss = find_pair_loss(options.loss, options.loss_args, import_from=config.run.import_from)
    return loss, check_rows(config, head=loss.entry.head)


class PairTraining(RowTraining):
    """Trains an engine on pairs. With `share_prompts`, a pair's prompt is computed once."""

    weight = "pairs"

    def __init__(
        self, engine: TrainEngine, groups: parallel.ParallelGroups, loss: PreferenceLoss, *, share_prompts: bool = True
    ) -> None:
        super().__init__(engine, groups, loss.for_engine(), pairs_of, share_prompts=share_prompts)
        self.entry = loss.entry

    def ref_logprobs(self, pairs: TrajectoryBatch) -> Tensor:
        """Return the log-probability of every reply token under the current weights, `[N]` float32; 0 in prompts.

        A loss with a reference model takes this result, computed with the initial weights, as the column
        `ref_logprobs`.
        """
        self.engine.eval()
        return exchange.by_token(pairs, self.groups, self.engine.forward, share_prompts=self.share_prompts)

    def metrics(self, stats: StepStats) -> dict[str, float]:
        """Return the update's metrics as means over pairs.

        `accuracy` is the share of pairs in which the model prefers the chosen reply.
        """
        return {"loss": stats.loss} | preference_metrics(stats.sums, max(stats.weight, 1.0))

    def _share(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        if self.entry.head == "value":  # the score is the value after the last token, which needs an additional row
            batch = batch.with_one_more_token()[0]
        return super()._share(batch)


class Reference:
    """The reply tokens' log-probabilities under the run's initial model, for all pairs that remain to be trained.

    The engine computes them before its first update, so that no second model is needed. Every rank holds 4 bytes for
    each reply token of these pairs.
    """

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def keep(self, numbers: list[int], pairs: TrajectoryBatch, logprobs: Tensor) -> None:
        """Store the log-probabilities of some pairs.

        numbers: the pairs' indices. logprobs: `[N]`, one per token of `pairs`.
        """
        # Each pair is two sequences, so every second bound separates pairs.
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), pairs["loss_mask"].cumsum(0)])[pairs.cu_seqlens[::2]]
        parts = logprobs[pairs["loss_mask"]].split(ends.diff().tolist())
        self._of |= zip(numbers, parts, strict=True)

    def add_to(self, pairs: TrajectoryBatch, numbers: list[int]) -> None:
        """Set the column `ref_logprobs` of a batch from what `keep` has stored.

        numbers: indices of the batch's pairs.
        """
        known = torch.zeros(len(pairs["loss_mask"]))
        known[pairs["loss_mask"]] = torch.cat([self._of[number] for number in numbers])
        pairs.tokens["ref_logprobs"] = known


def asked_together(numbers_of: Callable[[int], list[int]], steps: int, first_step: int) -> Iterator[list[int]]:
    """Yield lists of the pairs that the steps from `first_step` on need. A list has the pairs first used in one step.

    numbers_of: returns the indices of a step's pairs. The lists do not depend on `first_step`, except that unneeded
    ones are left out. So a resumed run computes bit-identical values.
    """
    # Group by all steps, including finished ones, because the composition of a batch affects rounding.
    needed = {number for step in range(first_step, steps) for number in numbers_of(step)}
    seen: set[int] = set()
    for step in range(steps):
        new = sorted(set(numbers_of(step)) - seen)
        seen.update(new)
        if not needed.isdisjoint(new):
            yield new


class PreferenceRun(RowRun):
    """A run that trains on pairs of replies."""

    training: PairTraining

    def _start(self) -> None:
        self.loss, data = check_preference(self.config)
        self.reference = Reference()
        share_prompts = self.config.batch.share_prompts
        self._start_on(
            data,
            head=self.loss.entry.head,
            training=lambda engine, groups: PairTraining(engine, groups, self.loss, share_prompts=share_prompts),
        )

    def begin(self) -> bool:
        # Before a checkpoint is loaded, because the reference is the run's initial model.
        if self.loss.entry.needs_reference and not self._ask_reference():
            self.stop_after(self.first_step)  # nothing new to save: a resumed run keeps its checkpoint
            return False
        return super().begin()

    def _ask_reference(self) -> bool:
        """Compute the reference log-probabilities with the current weights. Return False if told to stop."""
        for pairs in self.data.held_out.values():
            with self.timers("reference"):
                pairs.tokens["ref_logprobs"] = self.training.ref_logprobs(pairs)
        for numbers in asked_together(self.data.numbers, self.config.run.steps, self.first_step):
            if self.stop_is_near():  # the loop may take as long as the training
                return False
            with self.timers("reference"):
                pairs = self.data.rows.batch(numbers)
                self.reference.keep(numbers, pairs, self.training.ref_logprobs(pairs))
        return True

    def _batch(self, numbers: list[int]) -> TrajectoryBatch:
        pairs = super()._batch(numbers)
        if self.loss.entry.needs_reference:
            self.reference.add_to(pairs, numbers)
        return pairs
