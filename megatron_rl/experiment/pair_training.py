"""Training on pairs of replies: what is checked before it, and what its loop in preferences.py is made of."""

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
from megatron_rl.engine.model import transformer_config
from megatron_rl.experiment.run import Run
from megatron_rl.rollout.pairs import PairRows, load_pairs
from megatron_rl.rollout.prompts import PromptIterator
from megatron_rl.rollout.tokens import load_tokenizer
from megatron_rl.types import FinetuneSpec, StepStats, TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.mapping import weight_source


def check_pair_training(
    config: TrainConfig,
) -> tuple[PreferenceLoss, PromptIterator, PairRows, dict[str, TrajectoryBatch]]:
    """Check everything that can be checked before a process group is started: ValueError names key, value and way out.

    Returns the loss, the order of the training pairs, these pairs, and the held-out pairs of each set.
    """
    options = config.preference
    if not options.loss:
        raise ValueError(
            "preference.loss = '': names no loss of pairs; set dpo, ipo or simpo for a policy, or bradley_terry for a "
            "reward model. RL is started by megatron-rl launch."
        )
    if config.batch.updates_per_step != 1:
        raise ValueError(
            f"batch.updates_per_step = {config.batch.updates_per_step}: must be 1 with preference.loss; set "
            f"batch.prompts_per_step to the pairs of one update, and run.steps to the updates."
        )
    if config.warm_start.updates > 0:
        raise ValueError(
            f"warm_start.updates = {config.warm_start.updates}: must be 0 with preference.loss; run megatron-rl "
            f"sft before, and name what it writes as model.path."
        )
    loss = find_pair_loss(options.loss, options.loss_args, import_from=config.run.import_from)
    arch = read_architecture(config.model.path).with_head(loss.entry.head)
    if config.model.init == "hf":
        weight_source(config.model.path, arch)
    transformer_config(arch, config.actor, config.megatron)
    pairs, held_out = load_pairs(config, load_tokenizer(config.model.path), context=arch.max_positions)
    data, seed = config.data, config.run.seed
    return loss, PromptIterator(pairs.rows, seed=seed, shuffle=data.shuffle, weights=data.weights), pairs, held_out


class PairTraining:
    """Trains an engine on pairs. All ranks call every method, with the same whole batches."""

    def __init__(
        self, engine: TrainEngine, groups: parallel.ParallelGroups, loss: PreferenceLoss, *, share_prompts: bool = True
    ) -> None:
        """share_prompts: compute the prompt of a pair once."""
        self.engine, self.groups, self.loss, self.share_prompts = engine, groups, loss, share_prompts

    def ref_logprobs(self, pairs: TrajectoryBatch) -> Tensor:
        """Return log p of every reply token by the engine as it is now, `[N]` float32; 0 for prompts."""
        self.engine.eval()
        return exchange.by_token(pairs, self.groups, self.engine.forward, share_prompts=self.share_prompts)

    def update(self, pairs: TrajectoryBatch, step: int) -> StepStats:
        """pairs: with `ref_logprobs` where the loss needs a reference."""
        self.engine.train()
        stats = self.engine.train_batch(self._share(pairs, step), self.loss.for_engine(), pairs_of)
        self.engine.step_lr_scheduler()
        return stats

    def evaluate(self, pairs: TrajectoryBatch) -> StepStats:
        self.engine.eval()
        return self.engine.eval_batch(self._share(pairs, 0), self.loss.for_engine(), pairs_of)

    def _share(self, pairs: TrajectoryBatch, seed: int) -> TrajectoryBatch:
        if self.loss.entry.head == "value":  # the score is the value behind the last token
            pairs = pairs.with_one_more_token()[0]
        return exchange.update_shares(pairs, 1, self.groups, seed=seed, share_prompts=self.share_prompts)[0]


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


def metrics_of(stats: StepStats) -> dict[str, float]:
    """Means over pairs; `accuracy` is the share of pairs whose chosen reply is the better one by the model."""
    return {"loss": stats.loss} | preference_metrics(stats.sums, max(stats.weight, 1.0))


class PairRun(Run):
    """All parts of one run on pairs on this rank."""

    def _start(self) -> None:
        config = self.config
        self.loss, self.prompts, self.pairs, self.held_out = check_pair_training(config)
        self._join()
        self._open()
        if self.resumed:
            self.prompts.load_state_dict(self.resumed["prompts"])
        head = self.loss.entry.head
        self.engine = MegatronEngine(config.actor, groups=self.groups, head=head, megatron=config.megatron)
        self.engine.initialize(None, FinetuneSpec(total_updates=config.run.steps))
        self.training = PairTraining(self.engine, self.groups, self.loss, share_prompts=config.batch.share_prompts)
        self.reference = Reference()

    @property
    def trained(self) -> dict[str, MegatronEngine]:
        return {"model": self.engine}

    def _state(self) -> dict[str, Any]:
        return {"prompts": self.prompts.state_dict()}

    def begin(self) -> bool:
        """Bring the model to where the first step starts. False if a notice stopped the run before that."""
        if self.loss.entry.needs_reference and not self._ask_reference():
            self.stop_after(self.first_step)
            return False
        if self.resumed:
            self.load_checkpoint()
        else:
            self.evaluate(step=0)
        return True

    def _ask_reference(self) -> bool:
        """Compute what the loss needs of the model as it is now; False where a notice came meanwhile."""
        for pairs in self.held_out.values():
            with self.timers("reference"):
                pairs.tokens["ref_logprobs"] = self.training.ref_logprobs(pairs)
        for numbers in asked_together(self._numbers, self.config.run.steps, self.first_step):
            if self.stop_is_near():
                return False
            with self.timers("reference"):
                pairs = self.pairs.batch(numbers)
                self.reference.keep(numbers, pairs, self.training.ref_logprobs(pairs))
        return True

    def _numbers(self, step: int) -> list[int]:
        """Which pairs of data.train a step takes."""
        count = self.config.batch.prompts_per_step
        return [self.prompts.at(place)["prompt_index"] for place in range(step * count, (step + 1) * count)]

    def update(self, step: int) -> None:
        """Train on the step's pairs and log what came out."""
        with self.timers("update"):
            numbers = self._numbers(step)
            pairs = self.pairs.batch(numbers)
            if self.loss.entry.needs_reference:
                self.reference.add_to(pairs, numbers)
            stats = self.training.update(pairs, step)
        found = metrics_of(stats) | {"grad_norm": stats.grad_norm, "lr": stats.lr}
        metrics = {f"preference/{name}": value for name, value in found.items()}
        self.log_file.log_step(step, metrics | self.timers.snapshot())

    def evaluate(self, *, step: int) -> None:
        """Compare the held-out pairs where it is time to."""
        every = self.config.run.evaluate_every_steps
        if step in (0, self.config.run.steps) or (every > 0 and step % every == 0):
            for name, pairs in self.held_out.items():
                with self.timers("evaluate"):
                    stats = self.training.evaluate(pairs)
                self.log_file.log_evaluation(step, name, metrics_of(stats) | {"pairs": int(stats.weight)})
