"""Supervised training on the prompts' own answers before RL, kept in a folder for runs with the same settings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import TrainConfig, WarmStartConfig
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.data.sft_rows import AnswerRows
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.parallel import ParallelGroups
from megatron_rl.run.row_training import answer_training
from megatron_rl.types import StepStats

SETTINGS = "warm_start.json"


def warm_start_rows(
    options: WarmStartConfig,
    prompts: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    vocab: int | None = None,
) -> AnswerRows:
    """Return the training prompts with their answers. ValueError names the first without one, or that is too long."""
    asked = {"column": "answer", "setting": f"warm_start.updates = {options.updates}"}
    return AnswerRows("data.train", prompts, tokenizer, **asked, context=context, vocab=vocab)


class WarmStart:
    """Trains the policy on answers before RL where `warm_start.updates` asks for it.

        warm_start = WarmStart(config, groups, engine, train_prompts, tokenizer, measure=None, say=print, check=check)
        if warm_start.run():
            engine.reset_optimizer(total_updates)  # RL has an optimizer and a schedule of its own

    measure: returns the mean reward of sampled replies, at which the warm start may stop early; None samples nothing.
    check: is given the statistics of each update. Collective: every rank calls every method.
    """

    def __init__(
        self,
        config: TrainConfig,
        groups: ParallelGroups,
        engine: MegatronEngine,
        prompts: list[dict[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        measure: Callable[[], float] | None,
        say: Callable[[str], None],
        check: Callable[[StepStats], None],
    ) -> None:
        self.config, self.options = config, config.warm_start
        self.groups, self.engine, self.prompts, self.tokenizer = groups, engine, prompts, tokenizer
        self._measure, self._say, self._check = measure, say, check
        self.folder = Path(self.options.folder or Path(config.run.folder) / "warm_start")
        """Holds its weights, where `run` or `save` has written them."""

    def run(self) -> bool:
        """Train, or load what an earlier run with the same settings made. False where the config asks for neither."""
        if self.options.updates == 0:
            return False
        if self._is_kept():
            self.engine.load(self.folder)
            self._say(f"warm start: loaded {self.folder}, which an earlier run made with the same settings")
            return True
        self._train()
        if self.options.folder:
            self.engine.save(self.folder)
            if self.groups.is_main:  # last: only a folder that has it counts as whole
                (self.folder / SETTINGS).write_text(self._settings())
        return True

    def save(self) -> None:
        """Write the engine's weights to `folder`, unless `run` has left them there."""
        if not self.options.folder:
            self.engine.save(self.folder)

    def load(self, engine: MegatronEngine) -> None:
        """Load what the run's warm start had made; ValueError where it is not there any more."""
        if self.options.folder and not self._is_kept():
            raise ValueError(
                f"warm_start.folder = {str(self.folder)!r}: no longer holds the warm start of this run, which the "
                f"resumed run's reference is; bring it back, or start a new run."
            )
        engine.load(self.folder)

    def _train(self) -> None:
        options, engine = self.options, self.engine
        engine.reset_optimizer(options.updates, lr=options.lr)  # of its own; the caller makes RL's afterwards
        rows = warm_start_rows(options, self.prompts, self.tokenizer, context=engine.arch.max_positions)
        prompts = PromptIterator(rows.rows, seed=self.config.run.seed, shuffle=True)
        training, losses = answer_training(engine, self.groups), []
        for update in range(options.updates):
            chosen = prompts.next_batch(options.prompts_per_update)
            batch = rows.batch(prompt["prompt_index"] for prompt in chosen)
            stats = training.update(batch)
            losses.append(stats.loss)
            self._check(stats)
            # The same on all ranks: it depends on the config and on a reward that they all have been told.
            is_check = self._measure is not None and (update + 1) % options.check_every_updates == 0
            if is_check and self._measure() >= options.stop_at_reward:
                break
        self._say(f"warm start: {len(losses)} supervised updates, loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    def _settings(self) -> str:
        """Return everything that a warm start's result depends on but the layout, which changes but rounding."""
        config = self.config
        parts = {"model": config.model, "data": config.data, "warm_start": config.warm_start}
        parts |= {"optimizer": config.optimizer, "generation": config.generation}
        settings: dict[str, Any] = {key: dataclasses.asdict(part) for key, part in parts.items()}
        for key in ("lr", "min_lr", "schedule", "warmup_updates", "distributed"):  # RL's alone, or no matter
            del settings["optimizer"][key]
        settings |= {"reward": config.rollout.reward, "recipe": config.rollout.recipe}
        return json.dumps(settings | {"seed": config.run.seed}, indent=2, sort_keys=True)

    def _is_kept(self) -> bool:
        kept = [False]
        if self.groups.is_main and self.options.folder:
            path = self.folder / SETTINGS
            kept = [path.is_file() and path.read_text() == self._settings()]
        # Asked of one rank alone: a file may show itself on some hosts later than on others.
        dist.broadcast_object_list(kept, src=0, group=self.groups.control)
        return kept[0]
