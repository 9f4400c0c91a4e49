"""Runs that learn from rows of data and need no rollouts: what supervised and pair training share, loop and all."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_rl import parallel
from megatron_rl.api import LogprobLoss, TrainEngine, ValueLoss
from megatron_rl.batch import exchange
from megatron_rl.config import TrainConfig
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.data.sft_rows import ReplyRows, load_replies
from megatron_rl.data.tokens import load_tokenizer
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.model import transformer_config
from megatron_rl.run.run import Run
from megatron_rl.types import FinetuneSpec, StepStats, TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.mapping import weight_source

if TYPE_CHECKING:
    from megatron_rl.api import LossWeightFn

Data = tuple[PromptIterator, ReplyRows, dict[str, TrajectoryBatch]]
"""The order of the training rows, these rows, and the held-out ones of each set."""


def check_data_run(config: TrainConfig, *, head: str) -> Data:
    """Check everything that such runs have in common, before a process group is started. ValueError."""
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
    arch = read_architecture(config.model.path).with_head(head)
    if config.model.init == "hf":
        weight_source(config.model.path, arch)
    transformer_config(arch, config.actor, config.megatron)
    rows, held_out = load_replies(config, load_tokenizer(config.model.path), context=arch.max_positions)
    data, seed = config.data, config.run.seed
    return PromptIterator(rows.rows, seed=seed, shuffle=data.shuffle, weights=data.weights), rows, held_out


class DataTraining:
    """Trains an engine by a loss of rows. All ranks call every method, with the same whole batches."""

    def __init__(
        self,
        engine: TrainEngine,
        groups: parallel.ParallelGroups,
        loss: LogprobLoss | ValueLoss,
        weigh: LossWeightFn | None = None,
        *,
        share_prompts: bool = False,
    ) -> None:
        """weigh: counts what the loss is a mean over; trained tokens unless it is given. share_prompts: compute the
        common prompt of a row's replies once."""
        self.engine, self.groups, self.share_prompts = engine, groups, share_prompts
        self.loss, self.weigh = loss, weigh

    def update(self, batch: TrajectoryBatch, step: int) -> StepStats:
        self.engine.train()
        stats = self.engine.train_batch(self._share(batch, step), self.loss, self.weigh)
        self.engine.step_lr_scheduler()
        return stats

    def evaluate(self, batch: TrajectoryBatch) -> StepStats:
        self.engine.eval()
        return self.engine.eval_batch(self._share(batch, 0), self.loss, self.weigh)

    def _share(self, batch: TrajectoryBatch, seed: int) -> TrajectoryBatch:
        return exchange.update_shares(batch, 1, self.groups, seed=seed, share_prompts=self.share_prompts)[0]


class DataRun(Run):
    """All parts of one run on rows of data on this rank. A kind of it says what it makes of them."""

    SECTION: ClassVar[str]
    """Of the config, by which its metrics are called."""
    WEIGHT: ClassVar[str]
    """What its loss is a mean over."""
    head = "policy"

    @abstractmethod
    def _check(self) -> Data:
        """Check everything that can be checked before a process group is started. ValueError."""

    @abstractmethod
    def _make_training(self) -> DataTraining:
        """Return what trains `engine`."""

    @abstractmethod
    def _metrics_of(self, stats: StepStats) -> dict[str, float]:
        """Return what a step and an evaluation say of the rows."""

    def _prepare(self) -> bool:
        """Compute what the run needs of the model as it starts; False where a notice came meanwhile."""
        return True

    def _batch(self, step: int) -> TrajectoryBatch:
        """Return the rows of a step."""
        return self.rows.batch(self._numbers(step))

    def _start(self) -> None:
        config = self.config
        self.prompts, self.rows, self.held_out = self._check()
        self._join()
        self._open()
        if self.rows.left_out:
            self.say(f"data.train: {self.rows.left_out} rows are too long and left out, {len(self.prompts)} are left")
        if self.resumed:
            self.prompts.load_state_dict(self.resumed["prompts"])
        self.engine = MegatronEngine(config.actor, groups=self.groups, head=self.head, megatron=config.megatron)
        self.engine.initialize(None, FinetuneSpec(total_updates=config.run.steps))
        self.training = self._make_training()

    @property
    def trained(self) -> dict[str, MegatronEngine]:
        return {"model": self.engine}

    def _state(self) -> dict[str, Any]:
        return {"prompts": self.prompts.state_dict()}

    def train(self) -> bool:
        """Train from the run's start, or from its checkpoint, to its last step. False if a notice stopped it."""
        if not self.begin():
            return False
        for step in range(self.first_step, self.config.run.steps):
            self.update(step)
            self.evaluate(step=step + 1)
            self.save(step=step + 1)
            if self.checkpoint(step=step + 1):
                return False
        self.finish()
        return True

    def begin(self) -> bool:
        """Bring the model to where the first step starts. False if a notice stopped the run before that."""
        if not self._prepare():
            self.stop_after(self.first_step)
            return False
        if self.resumed:
            self.load_checkpoint()
        else:
            self.evaluate(step=0)
        return True

    def _numbers(self, step: int) -> list[int]:
        """Which rows of data.train a step takes."""
        count = self.config.batch.prompts_per_step
        return [self.prompts.at(place)["prompt_index"] for place in range(step * count, (step + 1) * count)]

    def update(self, step: int) -> None:
        """Train on the step's rows and log what came out. RuntimeError where too many updates in a row were skipped."""
        with self.timers("update"):
            stats = self.training.update(self._batch(step), step)
        found = self._metrics_of(stats) | {"grad_norm": stats.grad_norm, "lr": stats.lr}
        found["skipped_updates"] = int(not stats.applied)
        metrics = {f"{self.SECTION}/{name}": value for name, value in found.items()}
        self.log_file.log_step(step, metrics | self.timers.snapshot())
        rows = ", ".join(map(str, self._numbers(step)))
        self.check_updates("model", [stats], trained_on=f", whose groups are the rows {rows} of data.train")

    def evaluate(self, *, step: int) -> None:
        """Measure the held-out rows where it is time to."""
        every = self.config.run.evaluate_every_steps
        if step in (0, self.config.run.steps) or (every > 0 and step % every == 0):
            for name, batch in self.held_out.items():
                with self.timers("evaluate"):
                    stats = self.training.evaluate(batch)
                self.log_file.log_evaluation(step, name, self._metrics_of(stats) | {self.WEIGHT: int(stats.weight)})
