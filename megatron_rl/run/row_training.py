"""Training on rows of data, without rollouts: checks, updates and runs. Warm starts use RowTraining as well."""

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
from megatron_rl.run.run import Run
from megatron_rl.run.step_metrics import user_metrics
from megatron_rl.types import FinetuneSpec, StepStats, TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.mapping import weight_source

if TYPE_CHECKING:
    from megatron_rl.api import LossWeightFn


@dataclass(kw_only=True)
class RowData:
    """The rows of one run, and the run's position in them."""

    order: PromptIterator
    rows: ReplyRows
    held_out: dict[str, TrajectoryBatch]
    """One batch per held-out set, with all of its rows."""
    rows_per_step: int
    first_step: int = 0
    """Number of the first step that this process takes."""
    rows_before: int = 0
    """Number of rows taken before `first_step`."""

    def resume(self, state: dict[str, Any]) -> None:
        """Continue after the rows that a checkpoint's run had taken. state: the run's state from the checkpoint."""
        self.order.load_state_dict(state["prompts"])
        self.first_step = state["step"]
        if self.order.number == 0:  # earlier versions did not count the rows
            self.order.number = self.first_step * self.rows_per_step
        self.rows_before = self.order.number

    def numbers(self, step: int) -> list[int]:
        """Return the indices of the rows of data.train that a step takes.

        Positions are counted from `rows_before`, forwards and, for steps before `first_step`, backwards. Earlier
        processes may have taken another number of rows per step.
        """
        end = self.end_of(step)
        places = range(max(0, end - self.rows_per_step), max(0, end))
        return [self.order.at(place)["prompt_index"] for place in places]

    def end_of(self, step: int) -> int:
        """Return the number of rows that the run has taken at the end of this step."""
        return self.rows_before + (step + 1 - self.first_step) * self.rows_per_step


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


class RowTraining:
    """Trains an engine with a loss on rows.

    Collective: every rank calls every method with the same whole batch, of which it takes its share.
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
        """weigh: counts the units over which the loss is averaged; None counts trained tokens.

        share_prompts: compute a prompt that several rows share only once.
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


class RowRun(Run):
    """A run that trains one model on rows. The method `_start` of a subclass calls `_start_on`."""

    def _start_on(
        self, data: RowData, *, head: str, training: Callable[[TrainEngine, parallel.ParallelGroups], RowTraining]
    ) -> None:
        """Start all parts of the run.

        head: kind of the model's output head. training: makes the RowTraining, with the run's loss, for an engine.
        """
        self.data = data
        self._join()
        self._open()
        own_gpu.stay_near()
        self.engine = MegatronEngine(self.config.actor, groups=self.groups, head=head, megatron=self.config.megatron)
        self.engine.initialize(None, FinetuneSpec(total_updates=self.config.run.steps))  # for the learning rate
        self.training = training(self.engine, self.groups)
        if left_out := data.rows.left_out:
            self.say(f"data.train: {left_out} rows are too long and left out, {len(data.order)} are left")
        if self.resumed:
            data.resume(self.resumed)

    @property
    def trained(self) -> dict[str, MegatronEngine]:
        return {"model": self.engine}

    def _state(self) -> dict[str, Any]:
        return {"prompts": self.data.order.state_dict()}

    def begin(self) -> bool:
        """Bring the model to the state of the first step. Return False if a stop signal arrived before that."""
        if self.resumed:
            self.load_checkpoint()
        else:
            self.evaluate(step=0)
        return True

    def update(self, step: int) -> None:
        """Train on the step's rows and log the metrics. Raises RuntimeError if too many updates were skipped."""
        numbers = self.data.numbers(step)
        with self.timers("update"):
            stats = self.training.update(self._batch(numbers))
        self.data.order.number = self.data.end_of(step)
        found = self.training.metrics(stats) | {"grad_norm": stats.grad_norm, "lr": stats.lr}
        found["skipped_updates"] = int(not stats.applied)
        section = self.config.chosen_data.partition(".")[0]
        metrics = {f"{section}/{name}": value for name, value in found.items()} | user_metrics(self.groups)
        if self.engine.draft is not None:
            metrics |= self.engine.draft.metrics()
        self.log_file.log_step(step, metrics | self.timers.snapshot())
        # After logging, so that the log shows the update that ends the run.
        rows = f", whose groups are the rows {', '.join(map(str, numbers))} of data.train"
        self.check_updates("model", [stats], trained_on=rows)

    def _batch(self, numbers: list[int]) -> TrajectoryBatch:
        """Return the training rows with these indices, with all columns that the loss needs."""
        return self.data.rows.batch(numbers)

    def evaluate(self, *, step: int) -> None:
        """Evaluate the held-out rows if an evaluation is due."""
        every = self.config.run.evaluate_every_steps
        if step in (0, self.config.run.steps) or (every > 0 and step % every == 0):
            for name, batch in self.data.held_out.items():
                with self.timers("evaluate"):
                    stats = self.training.evaluate(batch)
                metrics = self.training.metrics(stats) | {self.training.weight: int(stats.weight)}
                self.log_file.log_evaluation(step, name, metrics)


def check_supervised(config: TrainConfig) -> RowData:
    """Check the config before a process group is started. Return the rows. Raises ValueError."""
    if not config.supervised.answer:
        raise ValueError(
            "supervised.answer = '': names no column of the rows; set the one with the answer's text, or messages. RL "
            "is started by megatron-rl launch."
        )
    return check_rows(config, head="policy")


class SupervisedRun(RowRun):
    """A run that trains on answers."""

    def _start(self) -> None:
        self._start_on(check_supervised(self.config), head="policy", training=answer_training)
