"""Training on pairs of replies, one of which was preferred: a policy, or a reward model, on the same engine as RL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rl import parallel
from megatron_rl.algo.catalogue import find_pair_loss
from megatron_rl.algo.preference import PreferenceLoss, pairs_of, preference_metrics
from megatron_rl.api import TrainEngine
from megatron_rl.batch import exchange
from megatron_rl.config import TrainConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.run.row_training import RowData, RowSteps, RowTraining, check_rows, start_engine
from megatron_rl.run.run import Run
from megatron_rl.types import StepStats, TrajectoryBatch


def check_preference(config: TrainConfig) -> tuple[PreferenceLoss, RowData]:
    """Return the loss and the pairs, checked before a process group is started. ValueError."""
    options = config.preference
    if not options.loss:
        raise ValueError(
            "preference.loss = '': names no loss of pairs; set dpo, ipo or simpo for a policy, or bradley_terry for a "
            "reward model. RL is started by megatron-rl launch."
        )
    loss = find_pair_loss(options.loss, options.loss_args, import_from=config.run.import_from)
    return loss, check_rows(config, head=loss.entry.head)


class PairTraining(RowTraining):
    """Trains an engine on pairs, whose prompt is computed once where `share_prompts` says so."""

    weight = "pairs"

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

    def metrics(self, stats: StepStats) -> dict[str, float]:
        """Return means over pairs; `accuracy` is the share of pairs whose chosen reply the model finds better."""
        return {"loss": stats.loss} | preference_metrics(stats.sums, max(stats.weight, 1.0))

    def _share(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        if self.entry.head == "value":  # the score is the value behind the last token, which needs a row of its own
            batch = batch.with_one_more_token()[0]
        return super()._share(batch)


class Reference:
    """The log-probabilities that the model of the run's start gives the pairs still to be trained, by their number.

    The engine computes it before its first update, which needs no second model. Every rank holds 4 bytes for each token
    of these pairs' replies, and nothing of their prompts.
    """

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def keep(self, numbers: list[int], pairs: TrajectoryBatch, logprobs: Tensor) -> None:
        """logprobs: `[N]` of the batch that these numbers are."""
        # Each pair is two sequences: every second bound parts two pairs.
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

    numbers_of: the pairs of a step. A pair has the same company whichever step the run was resumed at, so a
    resumed run finds the same bits.
    """
    # By all steps of the run, also those that are done: who shares a batch decides how sums are rounded.
    needed = {number for step in range(first_step, steps) for number in numbers_of(step)}
    seen: set[int] = set()
    for step in range(steps):
        new = sorted(set(numbers_of(step)) - seen)
        seen.update(new)
        if not needed.isdisjoint(new):
            yield new


class PreferenceRun(Run):
    """All parts of one run on pairs on this rank.

    with PreferenceRun(load_config("configs/count_dpo.yaml", [])) as run:
        if run.begin():
            run.update(0)  # logs preference/loss, preference/accuracy, ...
        run.finish()
    """

    def _start(self) -> None:
        self.loss, self.data = check_preference(self.config)
        self.reference = Reference()
        self._join()
        self._open()
        self.engine = start_engine(self.config, self.groups, head=self.loss.entry.head)
        shared = self.config.batch.share_prompts
        self.training = PairTraining(self.engine, self.groups, self.loss, share_prompts=shared)
        self.steps = RowSteps(
            *(self.config, self.data, self.training, self.log_file, self.timers),
            resumed=self.resumed,
            check=lambda stats, rows: self.check_updates("model", [stats], trained_on=rows),
        )

    @property
    def trained(self) -> dict[str, MegatronEngine]:
        return {"model": self.engine}

    def _state(self) -> dict[str, Any]:
        return self.steps.state_dict()

    def begin(self) -> bool:
        """Bring model and reference to where the first step starts. False if a stop signal came before that."""
        if self.loss.entry.needs_reference and not self._ask_reference():
            self.stop_after(self.first_step)  # of nothing new: a resumed run keeps the checkpoint that it came from
            return False
        if self.resumed:  # after the reference, which is the model of the run's start
            self.load_checkpoint()
        else:
            self.evaluate(step=0)
        return True

    def _ask_reference(self) -> bool:
        """Compute what the loss needs of the reference, which is the model as it is now; False if told to stop."""
        for pairs in self.data.held_out.values():
            with self.timers("reference"):
                pairs.tokens["ref_logprobs"] = self.training.ref_logprobs(pairs)
        for numbers in asked_together(self.steps.numbers, self.config.run.steps, self.first_step):
            if self.stop_is_near():  # it may take as long as the training itself
                return False
            with self.timers("reference"):
                pairs = self.data.rows.batch(numbers)
                self.reference.keep(numbers, pairs, self.training.ref_logprobs(pairs))
        return True

    def update(self, step: int) -> None:
        self.steps.update(step, self._pairs)

    def _pairs(self, numbers: list[int]) -> TrajectoryBatch:
        pairs = self.data.rows.batch(numbers)
        if self.loss.entry.needs_reference:
            self.reference.add_to(pairs, numbers)
        return pairs

    def evaluate(self, *, step: int) -> None:
        self.steps.evaluate(step=step)
