"""The one entry of training and its two loops: RL, and supervised or preference training on rows of data.

python -m megatron_rl.train configs/demo.yaml run.steps=20
torchrun --nproc-per-node 4 -m megatron_rl.train configs/count_grpo.yaml parallel.tensor=2 parallel.pipeline=2
python -m megatron_rl.train configs/count_sft.yaml              # supervised.answer is set: trains on answers
python -m megatron_rl.train configs/count_dpo.yaml              # preference.loss is set: trains on pairs of replies
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_rl.config import TrainConfig
from megatron_rl.launch import process_exit, rank

if TYPE_CHECKING:
    from megatron_rl.run.preference_run import PreferenceRun
    from megatron_rl.run.supervised_run import SupervisedRun

    RowRun = type[SupervisedRun] | type[PreferenceRun]


def train(config: TrainConfig, *, resume: str = "") -> bool:
    """Run what the config describes, from its start or from a checkpoint. Collective: every rank calls it.

    False if a stop signal ended the run early.
    """
    _, train_it = _check_and_train(config)
    return train_it(config, resume=resume)


def train_by_rl(config: TrainConfig, *, resume: str = "") -> bool:
    from megatron_rl.run.rl_run import RLRun

    with RLRun(config, resume=resume) as run:
        run.begin()
        for step in range(run.first_step, config.run.steps):
            batch = run.next_batch(step)
            if batch is None:  # on all ranks
                return False
            batch = run.add_reward_model_scores(batch)
            with run.timers("advantages"):
                run.compute_advantages(batch)
                updates = run.split_into_updates(batch, step)  # this rank's share of each optimizer step
            with run.timers("logprobs"):
                run.actor.compute_logprobs(updates)
                targets = run.teacher_targets(updates)
                updates = run.add_demonstrations(batch, updates)
            with run.timers("update"):
                stats = run.actor.update(updates, targets)
            critic_stats = run.update_critic(batch, step)  # while it warms up, it gives the publication its version
            with run.timers("publish"):
                run.rollouts.publish()
            run.save(step=step + 1)
            run.log(step, batch, updates, stats, critic_stats)
            run.evaluate(step=step + 1)  # by the weights just published, whose scores the checkpoint keeps
            if run.checkpoint(step=step + 1):
                return False
        run.finish()
        return True


def _train_on_rows(kind: RowRun, config: TrainConfig, *, resume: str = "") -> bool:
    with kind(config, resume=resume) as run:
        if not run.begin():
            return False
        for step in range(run.first_step, config.run.steps):
            run.update(step)
            run.evaluate(step=step + 1)
            run.save(step=step + 1)
            if run.checkpoint(step=step + 1):
                return False
        run.finish()
        return True


def _check_and_train(config: TrainConfig, *, kind: str = "") -> tuple[rank.Check, rank.Train]:
    """Return what checks and what trains a config of this kind: rl, supervised or preference; the config's own for ''.

    A check refuses a config of another kind.
    """
    if not kind:
        kind = "supervised" if config.supervised.answer else "preference" if config.preference.loss else "rl"
    # Imports take seconds, and each kind needs its own.
    if kind == "supervised":
        from megatron_rl.run.supervised_run import SupervisedRun, check_supervised

        return check_supervised, functools.partial(_train_on_rows, SupervisedRun)
    if kind == "preference":
        from megatron_rl.run.preference_run import PreferenceRun, check_preference

        return check_preference, functools.partial(_train_on_rows, PreferenceRun)
    from megatron_rl.run.checks import dry_run

    return dry_run, train_by_rl


def main(argv: list[str] | None = None, *, kind: str = "") -> None:
    """Train what the arguments name; `megatron-rl sft` and `megatron-rl preferences` name the kind as well."""
    load: Callable[[TrainConfig], tuple[rank.Check, rank.Train]] = functools.partial(_check_and_train, kind=kind)
    rank.main("Train a policy with RL, or a model on answers or on pairs of replies.", load, argv)


if __name__ == "__main__":
    process_exit.run_and_end(main)
