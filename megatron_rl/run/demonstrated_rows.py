"""Rows of answers that are trained in an RL step beside its trajectories: which ones, and their share of the loss."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.algo.aggregation import DEMONSTRATED
from megatron_rl.algo.demonstrations import counts, scaled, with_demonstrations
from megatron_rl.batch import exchange
from megatron_rl.batch.step_batch import StepBatch
from megatron_rl.config import TrainConfig
from megatron_rl.data.prompts import PromptIterator, load_prompts
from megatron_rl.data.sft_rows import AnswerRows
from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import TrajectoryBatch


def load_demonstrations(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, *, context: int) -> AnswerRows | None:
    """Return the rows of demonstrations.source, None without any. ValueError for one without an answer, or too long."""
    options, key = config.demonstrations, "demonstrations.source"
    if not options.source:
        return None
    rows = load_prompts(options.source, options.source_args, key=key, import_from=config.run.import_from)
    asked = {"column": options.answer, "setting": f"demonstrations.answer = {options.answer!r}"}
    return AnswerRows(key, rows, tokenizer, **asked, context=context)


class Demonstrations:
    """The demonstrations of a run. Collective: every rank calls `add`, with its share of each update.

    A step's rows depend on its number and the seed alone, so that a resumed run goes on with them.

        demonstrations = Demonstrations(config, groups, tokenizer, context=8192)
        updates = demonstrations.add(batch, updates, step=0)
    """

    def __init__(
        self, config: TrainConfig, groups: ParallelGroups, tokenizer: PreTrainedTokenizerBase | None, *, context: int
    ) -> None:
        """tokenizer: None leaves marked tokens alone. context: the most tokens of a row."""
        self.options, self.algo, self.groups = config.demonstrations, config.algo, groups
        self.rows = None if tokenizer is None else load_demonstrations(config, tokenizer, context=context)
        self.order = None if self.rows is None else PromptIterator(self.rows.rows, seed=config.run.seed)

    def add(self, batch: StepBatch, updates: list[TrajectoryBatch], *, step: int) -> list[TrajectoryBatch]:
        """Return the updates with their demonstrations: marked tokens, and as many rows in each as it has its part in.

        ValueError where a workflow marks tokens that no weight is set for.
        """
        if self.options.weight == 0:
            if DEMONSTRATED in batch:
                raise ValueError(
                    f"demonstrations.weight = 0.0: the workflow's trajectories mark tokens to be imitated, in "
                    f"tokens[{DEMONSTRATED!r}]; set a weight, or leave the column out."
                )
            return updates
        mixed = [
            with_demonstrations(share, self._own_rows(step, number, len(updates)))
            for number, share in enumerate(updates)
        ]
        if not mixed:  # while the critic warms up
            return mixed
        totals = batch.total(torch.stack([counts(share, self.algo) for share in mixed]))
        return [scaled(share, self.options.weight, total) for share, total in zip(mixed, totals, strict=True)]

    def _own_rows(self, step: int, update: int, updates: int) -> TrajectoryBatch | None:
        """Return this replica's of an update's rows."""
        if self.rows is None or self.order is None:
            return None
        first = step * self.options.rows_per_step
        places = range(first + update, first + self.options.rows_per_step, updates)
        return exchange.own_share(self.rows.batch(self.order.at(it)["prompt_index"] for it in places), self.groups)
