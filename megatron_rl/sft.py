"""Supervised training on prompts and their answers, with the same engine as RL.

megatron-rl sft configs/count_grpo.yaml warm_start.updates=60     # writes run.folder/warm_start
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss, TrainEngine
from megatron_rl.config import WarmStartConfig, load_config
from megatron_rl.rollout.prompts import PromptIterator
from megatron_rl.types import StepStats, TrajectoryBatch


def supervised_batch(examples: list[tuple[list[int], list[int]]]) -> TrajectoryBatch:
    """Pack (prompt ids, answer ids) pairs; the answers are trained."""
    lengths = torch.tensor([0] + [len(prompt) + len(answer) for prompt, answer in examples])
    tokens = {
        "input_ids": torch.tensor([token for prompt, answer in examples for token in [*prompt, *answer]]),
        "loss_mask": torch.tensor([trained for p, a in examples for trained in [False] * len(p) + [True] * len(a)]),
    }
    return TrajectoryBatch(tokens, {"group": torch.arange(len(examples))}, lengths.cumsum(0))


def train_on_answers(
    engine: TrainEngine,
    prompts: PromptIterator,
    encode: Callable[[dict[str, Any]], tuple[list[int], list[int]]],
    options: WarmStartConfig,
    share: Callable[[TrajectoryBatch, int], TrajectoryBatch],
    *,
    on_update: Callable[[int, StepStats], None] = lambda update, stats: None,
    sampled_reward: Callable[[], float] | None = None,
) -> int:
    """Run up to `options.updates` supervised updates and return how many were run. All ranks call it.

    encode: prompt -> (prompt ids, answer ids). share: cuts this data-parallel rank's part out of the global batch.
    sampled_reward: mean reward of sampled replies, the same on every rank; training ends once it reaches
    `options.stop_at_reward`.
    """
    engine.train()
    for update in range(options.updates):
        batch = supervised_batch([encode(prompt) for prompt in prompts.next_batch(options.prompts_per_update)])
        stats = engine.train_batch(share(batch, update), LogprobLoss(supervised, by_row=True))
        on_update(update, stats)
        is_check = (update + 1) % options.check_every_updates == 0
        if sampled_reward is not None and is_check and sampled_reward() >= options.stop_at_reward:
            return update + 1
    return options.updates


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("megatron_rl.sft", description="Train a policy on the prompts' own answers.")
    parser.add_argument("config", type=Path, help="experiment file with a warm_start section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. warm_start.updates=200")
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        if config.warm_start.updates == 0:
            raise ValueError("warm_start.updates = 0: nothing to train; set it to the number of supervised updates.")
        from megatron_rl.experiment import Experiment

        with Experiment(config, needs_servers=False) as experiment:
            experiment.warm_start.run()
            target = Path(config.run.folder) / "warm_start"
            experiment.engine.save(target)
            experiment.say(f"wrote {target}")
    except ValueError as error:
        sys.exit(f"megatron_rl.sft: {error}")


if __name__ == "__main__":
    main()
