"""Training on rows of data, without rollouts: checks, updates and steps of supervised and preference runs.

Warm starts use RowTraining, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl import parallel, platform
from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss, TrainEngine, ValueLoss
from megatron_rl.batch import exchange
from megatron_rl.config import TrainConfig
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.data.sft_rows import ReplyRows, load_replies
from megatron_rl.data.tokens import load_tokenizer
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.model import transformer_config
from megatron_rl.launch import own_gpu
from megatron_rl.ops import library
from megatron_rl.run.step_metrics import user_metrics
from megatron_rl.telemetry.run_log import RunLog
from megatron_rl.telemetry.timers import PhaseTimers
from megatron_rl.types import FinetuneSpec, StepStats, TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.mapping import weight_source

if TYPE_CHECKING:
    from megatron_rl.api import LossWeightFn


@dataclass(frozen=True, kw_only=True)
class RowData:
    """The rows of one run."""

    order: PromptIterator
    """Iterates over the training rows in training order."""
    rows: ReplyRows
    held_out: dict[str, TrajectoryBatch]
    """One batch per held-out set, with all of its rows."""
    rows_per_step: int


def check_rows(config: TrainConfig, *, head: str) -> RowData:
    """Run the checks common to all runs on rows, and return the rows. Raises ValueError."""
    if platform.has_cuda():
        library.check_cuda()
    setting = config.chosen_data.partition(" ")[0]
    if config.batch.updates_per_step != 1:
        raise ValueError(
            f"batch.updates_per_step = {config.batch.updates_per_step}: must be 1 with {setting}; set "
            f"batch.prompts_per_step to the rows of one update, and run.steps to the updates."
        )
    if config.warm_start.updates > 0:
        raise ValueError(
            f"warm_start.updates = {config.warm_start.updates}: must be 0 with {setting}; run megatron-rl sft before, "
            f"and name what it writes as model.path."
        )
    # Called for their errors, minutes before an engine would raise them.
    arch = read_architecture(config.model.path).with_head(head)
    if config.model.init == "hf":
        weight_source(config.model.path, arch)
    transformer_config(arch, config.actor, config.megatron)
    tokenizer = load_tokenizer(config.model.path, config.data.template_args)
    rows, held_out = load_replies(config, tokenizer, context=arch.max_positions, vocab=arch.vocab)
    data, seed = config.data, config.run.seed
    order = PromptIterator(rows.rows, seed=seed, shuffle=data.shuffle, weights=data.weights)
    return RowData(order=order, rows=rows, held_out=held_out, rows_per_step=config.batch.prompts_per_step)


def start_engine(config: TrainConfig, groups: parallel.ParallelGroups, *, head: str) -> MegatronEngine:
    """Create the engine to train, with its weights loaded. Collective: every rank calls it."""
    own_gpu.stay_near()
    engine = MegatronEngine(config.actor, groups=groups, head=head, megatron=config.megatron)
    engine.initialize(None, FinetuneSpec(total_updates=config.run.steps))  # sets the learning-rate schedule
    return engine


class RowTraining:
    """Trains an engine with a loss on rows. Collective: every rank calls every method, with the same whole batches.

    For example:

        training = answer_training(engine, groups)
        for batch in batches:
            print(training.metrics(training.update(batch)))  # {"loss": ..., "perplexity": ...}
    """

    weight = "tokens"
    """Unit over which the loss is averaged."""

    def __init__(
        self,
        engine: TrainEngine,
        groups: parallel.ParallelGroups,
        loss: LogprobLoss | ValueLoss,
        weigh: LossWeightFn | None = None,
        *,
        share_prompts: bool = False,
    ) -> None:
        """weigh: counts the units over which the loss is averaged; by default it counts trained tokens.

        share_prompts: compute a row's prompt only once, for all of its replies.
        """
        self.engine, self.groups, self.share_prompts = engine, groups, share_prompts
        self.loss, self.weigh = loss, weigh

    def update(self, batch: TrajectoryBatch) -> StepStats:
        self.engine.train()
        stats = self.engine.train_batch(self._share(batch), self.loss, self.weigh)
        self.engine.step_lr_scheduler()
        return stats

    def evaluate(self, batch: TrajectoryBatch) -> StepStats:
        self.engine.eval()
        return self.engine.eval_batch(self._share(batch), self.loss, self.weigh)

    def metrics(self, stats: StepStats) -> dict[str, float]:
        # As a tensor, because exp of a large loss is infinite there but an OverflowError in math.
        return {"loss": stats.loss, "perplexity": float(torch.tensor(stats.loss).exp())}

    def _share(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        return exchange.own_share(batch, self.groups, share_prompts=self.share_prompts)


def answer_training(engine: TrainEngine, groups: parallel.ParallelGroups) -> RowTraining:
    """Return a RowTraining for supervised learning: the loss is the mean of -log p over the answers' tokens."""
    return RowTraining(engine, groups, LogprobLoss(supervised, by_row=True))


class RowSteps:
    """The steps and evaluations of a run on rows, with their metrics. Collective, like RowTraining.

    For example:

        steps = RowSteps(config, data, training, run.log_file, run.timers, resumed=None, check=check)
        steps.update(0, data.rows.batch)  # logs supervised/loss
    """

    def __init__(
        self,
        config: TrainConfig,
        data: RowData,
        training: RowTraining,
        log_file: RunLog,
        timers: PhaseTimers,
        *,
        resumed: dict[str, Any] | None,
        check: Callable[[StepStats, str], None],
    ) -> None:
        """resumed: a checkpoint's state, whose rows are skipped; None or empty to start with the first row.

        check: called with the statistics of each update and a description of its rows.
        """
        self.config, self.data, self.training = config.run, data, training
        self.log_file, self.timers, self._check = log_file, timers, check
        self.section = config.chosen_data.partition(".")[0]
        if data.rows.left_out:
            left_out, left = data.rows.left_out, len(data.order)
            log_file.say(f"data.train: {left_out} rows are too long and left out, {left} are left")
        self._first_step = 0
        if resumed:
            data.order.load_state_dict(resumed["prompts"])
            self._first_step = resumed["step"]
            if data.order.number == 0:  # earlier versions did not count the rows
                data.order.number = self._first_step * data.rows_per_step
        self._rows_before = data.order.number
        """Rows taken before this process's first step."""

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self.data.order.state_dict()}

    def numbers(self, step: int) -> list[int]:
        """Return the indices of the rows of data.train that a step takes.

        This process's steps continue after the rows taken so far, whatever number of rows per step earlier processes
        used. For a step before this process's first step, rows are counted back from the same position.
        """
        end = self._end_of(step)
        places = range(max(0, end - self.data.rows_per_step), max(0, end))
        return [self.data.order.at(place)["prompt_index"] for place in places]

    def _end_of(self, step: int) -> int:
        return self._rows_before + (step + 1 - self._first_step) * self.data.rows_per_step

    def update(self, step: int, batch_of: Callable[[list[int]], TrajectoryBatch]) -> None:
        """Train on the step's rows and log the metrics. batch_of: makes a batch from row indices.

        Raises RuntimeError if too many consecutive updates were skipped.
        """
        numbers = self.numbers(step)
        with self.timers("update"):
            stats = self.training.update(batch_of(numbers))
        self.data.order.number = self._end_of(step)
        found = self.training.metrics(stats) | {"grad_norm": stats.grad_norm, "lr": stats.lr}
        found["skipped_updates"] = int(not stats.applied)
        metrics = {f"{self.section}/{name}": value for name, value in found.items()}
        metrics |= user_metrics(self.training.groups)
        if isinstance(engine := self.training.engine, MegatronEngine) and engine.draft is not None:
            metrics |= engine.draft.metrics()
        self.log_file.log_step(step, metrics | self.timers.snapshot())
        # After logging, so that the log shows the update that ends the run.
        self._check(stats, f", whose groups are the rows {', '.join(map(str, numbers))} of data.train")

    def evaluate(self, *, step: int) -> None:
        """Evaluate the held-out rows if an evaluation is due."""
        every = self.config.evaluate_every_steps
        if step in (0, self.config.steps) or (every > 0 and step % every == 0):
            for name, batch in self.data.held_out.items():
                with self.timers("evaluate"):
                    stats = self.training.evaluate(batch)
                metrics = self.training.metrics(stats) | {self.training.weight: int(stats.weight)}
                self.log_file.log_evaluation(step, name, metrics)
