"""Demonstrations: rows with answers, on which an RL step trains in addition to its trajectories."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.algo.aggregation import DEMONSTRATED
from megatron_rl.algo.demonstrations import counts, scaled, with_demonstrations
from megatron_rl.batch import exchange
from megatron_rl.batch.step_batch import StepBatch
from megatron_rl.config import TrainConfig
from megatron_rl.data.prompts import PromptIterator, load_prompts
from megatron_rl.data.sft_rows import ReplyRows
from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import TrajectoryBatch


def load_demonstrations(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, *, context: int, vocab: int | None = None
) -> ReplyRows | None:
    """Return the rows of demonstrations.source; None if the option is not set.

    context: maximum tokens of a row. Raises ValueError if a row has no answer or is too long.
    """
    options, key = config.demonstrations, "demonstrations.source"
    if not options.source:
        return None
    rows = load_prompts(options.source, options.source_args, key=key, import_from=config.run.import_from)
    asked = {"column": options.answer, "setting": f"demonstrations.answer = {options.answer!r}"}
    return ReplyRows(key, rows, tokenizer, **asked, context=context, vocab=vocab)


class Demonstrations:
    """The demonstrations of a run. Collective: every rank calls `add`, with its share of each update.

    The order of the rows depends only on the seed. A resumed run continues after the rows that were already taken.
    """

    def __init__(
        self, config: TrainConfig, groups: ParallelGroups, tokenizer: PreTrainedTokenizerBase | None, *, context: int
    ) -> None:
        """tokenizer: if None, no rows are loaded. context: maximum tokens of a row."""
        self.options, self.algo, self.groups = config.demonstrations, config.algo, groups
        self.rows = None if tokenizer is None else load_demonstrations(config, tokenizer, context=context)
        self.order: PromptIterator | None = None
        if self.rows is not None:
            self.order = PromptIterator(self.rows.rows, seed=config.run.seed, key="demonstrations.source")

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order of the rows, for a checkpoint; {} if the run has no rows."""
        return {} if self.order is None else {"demonstrations": self.order.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the rows that the checkpoint's run had taken. Raises ValueError if that run had other rows."""
        if self.order is None:
            return
        if "demonstrations" in state:
            self.order.load_state_dict(state["demonstrations"])
        else:  # the run had no rows, or an earlier version, which did not count them, wrote the checkpoint
            self.order.number = state["step"] * self.options.rows_per_step

    def add(self, batch: StepBatch, updates: list[TrajectoryBatch]) -> list[TrajectoryBatch]:
        """Return the updates with demonstrations added.

        Demonstrations are the tokens that a workflow has marked, and rows of demonstrations.source, which are divided
        among the updates. Raises ValueError if a workflow marks tokens although demonstrations.weight is 0.
        """
        if self.options.weight == 0:
            if DEMONSTRATED in batch:
                raise ValueError(
                    f"demonstrations.weight = 0.0: the workflow's trajectories mark tokens to be imitated, in "
                    f"tokens[{DEMONSTRATED!r}]; set a weight, or leave the column out."
                )
            return updates
        mixed = [
            with_demonstrations(share, self._own_rows(number, len(updates))) for number, share in enumerate(updates)
        ]
        if not mixed:  # while the critic warms up
            return mixed
        if self.order is not None:
            self.order.number += self.options.rows_per_step
        totals = batch.total(torch.stack([counts(share, self.algo) for share in mixed]))
        return [scaled(share, self.options.weight, total) for share, total in zip(mixed, totals, strict=True)]

    def _own_rows(self, update: int, updates: int) -> TrajectoryBatch | None:
        """Return those rows of an update on which this replica trains; None for a run without rows."""
        if self.rows is None or self.order is None:
            return None
        first = self.order.number
        places = range(first + update, first + self.options.rows_per_step, updates)
        return exchange.own_share(self.rows.batch(self.order.at(it)["prompt_index"] for it in places), self.groups)
