"""Supervised training on the prompts' own answers before RL, kept in a folder for runs with the same settings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_rl.algo.reward_shaping import take_out_greedy
from megatron_rl.config import WarmStartConfig
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.data.sft_rows import AnswerRows
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.rollout.groups import reward_of_each
from megatron_rl.run.supervised_training import answer_training

if TYPE_CHECKING:
    from megatron_rl.run.rl_run import RLRun

SETTINGS = "warm_start.json"


def warm_start_rows(
    options: WarmStartConfig, prompts: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, *, context: int
) -> AnswerRows:
    """Return the training prompts with their answers. ValueError names the first without one, or that is too long."""
    asked = {"column": "answer", "setting": f"warm_start.updates = {options.updates}"}
    return AnswerRows("data.train", prompts, tokenizer, **asked, context=context)


class WarmStart:
    """That of one experiment, whose engines it trains. All ranks call every method."""

    def __init__(self, experiment: RLRun) -> None:
        self.x = experiment

    def run(self) -> None:
        """Train where the config asks for it, or load what an earlier run made, and start RL's optimizer afresh."""
        x, options = self.x, self.x.config.warm_start
        if options.updates == 0:
            return
        if self._is_kept():
            x.engine.load(options.folder)
            x.say(f"warm start: loaded {options.folder}, which an earlier run made with the same settings")
        else:
            self._train()
            if options.folder:
                x.engine.save(options.folder)
                if x.groups.is_main:
                    (Path(options.folder) / SETTINGS).write_text(self._settings())
        x.engine.reset_optimizer(x.policy_updates)
        x.engine.set_version(0)
        if x.reference is not None:
            x.reference.copy_weights(x.engine)
        takes_over = x.critic is not None and not x.config.critic.model
        is_needed_later = x.reference is not None and x.config.run.checkpoint_every_steps > 0
        if not options.folder and (takes_over or is_needed_later):
            x.engine.save(self._folder)
        if takes_over:
            x.critic.engine.load(self._folder)  # through files: the layouts may differ

    def load(self, engine: MegatronEngine) -> None:
        """Load what the run's warm start had made; ValueError where it is not there any more."""
        if self.x.config.warm_start.folder and not self._is_kept():
            raise ValueError(
                f"warm_start.folder = {str(self._folder)!r}: no longer holds the warm start of this run, which the "
                f"resumed run's reference is; bring it back, or start a new run."
            )
        engine.load(self._folder)

    @property
    def _folder(self) -> Path:
        return Path(self.x.config.warm_start.folder or self.x.folder / "warm_start")

    def _train(self) -> None:
        x, options = self.x, self.x.config.warm_start
        x.engine.reset_optimizer(options.updates, lr=options.lr)
        rows = warm_start_rows(options, x.prompts.prompts, x.tokenizer, context=x.engine.arch.max_positions)
        prompts = PromptIterator(rows.rows, seed=x.config.run.seed, shuffle=True)
        training, losses = answer_training(x.engine, x.groups), []
        for update in range(options.updates):
            chosen = prompts.next_batch(options.prompts_per_update)
            batch = rows.batch(prompt["prompt_index"] for prompt in chosen)
            stats = training.update(batch, update)
            losses.append(stats.loss)
            x.check_updates("policy", [stats])
            is_check = bool(x.held_out) and (update + 1) % options.check_every_updates == 0
            if is_check and self._sampled_reward() >= options.stop_at_reward:
                break
        x.say(f"warm start: {len(losses)} supervised updates, loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    def _settings(self) -> str:
        """Everything a warm start's result depends on but the layout, which changes no more than rounding."""
        config = self.x.config
        parts = {"model": config.model, "data": config.data, "warm_start": config.warm_start}
        parts |= {"optimizer": config.optimizer, "generation": config.generation}
        settings: dict[str, Any] = {key: dataclasses.asdict(part) for key, part in parts.items()}
        for key in ("lr", "min_lr", "schedule", "warmup_updates", "distributed"):  # RL's alone, or no matter
            del settings["optimizer"][key]
        settings |= {"reward": config.rollout.reward, "recipe": config.rollout.recipe}
        return json.dumps(settings | {"seed": config.run.seed}, indent=2, sort_keys=True)

    def _is_kept(self) -> bool:
        kept = [False]
        if self.x.groups.is_main and self.x.config.warm_start.folder:
            path = Path(self.x.config.warm_start.folder) / SETTINGS
            kept = [path.is_file() and path.read_text() == self._settings()]
        dist.broadcast_object_list(kept, src=0, group=self.x.groups.control)
        return kept[0]

    def _sampled_reward(self) -> float:
        """Mean reward of sampled replies to the held-out prompts, the same on every rank."""
        x = self.x
        x.rollouts.publish()
        sampled = x.rollouts.evaluate(x.config.generation.new(n_samples=2))
        x.rollouts.wait_for(sampled)
        reward = [0.0]
        for found in sampled:
            # Cut short, it says nothing: the warm start goes on, and the run stops behind it.
            if found.exception() is None or not x.is_ending:
                replies = take_out_greedy(found.result())
                reward = [float(replies.means_of_samples(reward_of_each(replies)).mean())]
        dist.broadcast_object_list(reward, src=0, group=x.groups.control)
        return reward[0]
