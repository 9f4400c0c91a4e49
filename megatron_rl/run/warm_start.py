"""Warm start: supervised training on the prompts' answers before RL. Runs with the same settings reuse its result."""

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
from megatron_rl.data.sft_rows import ReplyRows
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
) -> ReplyRows:
    """Return the training prompts with their answers. Raises ValueError if one has no answer or is too long."""
    asked = {"column": "answer", "setting": f"warm_start.updates = {options.updates}"}
    return ReplyRows("data.train", prompts, tokenizer, **asked, context=context, vocab=vocab)


class WarmStart:
    """Trains the policy on answers before RL, if `warm_start.updates` is set.

    Collective: every rank calls every method. measure: returns the mean reward of sampled replies. Once that reaches
    warm_start.stop_at_reward, the warm start stops early. check: called with the statistics of each update.
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
        """Folder of the warm-started weights, written by `run` or `save`."""

    def run(self) -> bool:
        """Train on answers, or load the result of an earlier run with the same settings.

        Return False if no warm start is configured. If the result is True, RL needs a new optimizer and learning-rate
        schedule.
        """
        if self.options.updates == 0:
            return False
        if self.is_kept():
            self.engine.load(self.folder)
            self._say(f"warm start: loaded {self.folder}, which an earlier run made with the same settings")
            return True
        self._train()
        if self.options.folder:
            self.engine.save(self.folder)
            if self.groups.is_main:  # last: a folder without this file is incomplete
                (self.folder / SETTINGS).write_text(self._settings())
        return True

    def save(self) -> None:
        """Write the engine's weights to `folder`, unless `run` has already done so."""
        if not self.options.folder:
            self.engine.save(self.folder)

    def load(self, engine: MegatronEngine) -> None:
        """Load the weights of the run's warm start. Raises ValueError if they no longer exist."""
        if self.options.folder and not self.is_kept():
            raise ValueError(
                f"warm_start.folder = {str(self.folder)!r}: no longer holds the warm start of this run, which the "
                f"resumed run's reference is; bring it back, or start a new run."
            )
        engine.load(self.folder)

    def _train(self) -> None:
        options, engine = self.options, self.engine
        engine.reset_optimizer(options.updates, lr=options.lr)  # for the warm start only; the caller resets it for RL
        rows = warm_start_rows(options, self.prompts, self.tokenizer, context=engine.arch.max_positions)
        prompts = PromptIterator(rows.rows, seed=self.config.run.seed, shuffle=True)
        training, losses = answer_training(engine, self.groups), []
        for update in range(options.updates):
            chosen = prompts.next_batch(options.prompts_per_update)
            batch = rows.batch(prompt["prompt_index"] for prompt in chosen)
            stats = training.update(batch)
            losses.append(stats.loss)
            self._check(stats)
            # Equal on all ranks: it depends on the config and on a reward broadcast to all.
            is_check = self._measure is not None and (update + 1) % options.check_every_updates == 0
            if is_check and self._measure() >= options.stop_at_reward:
                break
        self._say(f"warm start: {len(losses)} supervised updates, loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    def _settings(self) -> str:
        """Return, as text, all settings that affect a warm start's result.

        The parallel layout is left out, because it affects only rounding.
        """
        config, sections = self.config, ("model", "data", "warm_start", "optimizer", "generation")
        settings: dict[str, Any] = {name: dataclasses.asdict(getattr(config, name)) for name in sections}
        for key in ("lr", "min_lr", "schedule", "warmup_updates", "distributed"):  # only for RL, or irrelevant
            del settings["optimizer"][key]
        settings |= {"reward": config.rollout.reward, "recipe": config.rollout.recipe}
        return json.dumps(settings | {"seed": config.run.seed}, indent=2, sort_keys=True)

    def is_kept(self) -> bool:
        """Return True if warm_start.folder has the weights of a warm start with these settings. Collective."""
        kept = [False]
        if self.groups.is_main and self.options.folder:
            path = self.folder / SETTINGS
            kept = [path.is_file() and path.read_text() == self._settings()]
        # Only one rank looks, because a file may appear on some hosts later than on others.
        dist.broadcast_object_list(kept, src=0, group=self.groups.control)
        return kept[0]
