"""Entry point of training, with its two loops: RL, and supervised or preference training on rows of data.

python -m megatron_rl.train configs/demo.yaml run.steps=20
torchrun --nproc-per-node 4 -m megatron_rl.train configs/count_grpo.yaml parallel.tensor=2 parallel.pipeline=2
python -m megatron_rl.train configs/count_sft.yaml              # supervised.answer is set: trains on answers
python -m megatron_rl.train configs/count_dpo.yaml              # preference.loss is set: trains on pairs of replies
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rl.config import TrainConfig
from megatron_rl.launch import rank
from megatron_rl.life import process_exit

if TYPE_CHECKING:
    from megatron_rl.run.rl_run import RLRun
    from megatron_rl.run.row_training import RowRun


def train(config: TrainConfig, *, resume: str = "", kind: str = "") -> bool:
    """Run the training that the config describes. Return False if a stop signal ended it early.

    resume: `auto`, or a checkpoint's folder, to resume a run. kind: see `parts_of`. Collective: every rank calls it.
    """
    parts = parts_of(config, kind=kind)
    with parts.run(config, resume=resume) as run:
        for _ in parts.steps(run):
            pass
        return not run.is_stopped


def rl_steps(run: RLRun) -> Iterator[int]:
    """Run the RL steps. After each, yield the number of completed steps. Returns early after a stop signal."""
    run.begin()
    for step in range(run.first_step, run.config.run.steps):
        batch = run.next_batch(step)
        if batch is None:  # on all ranks
            return
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
        critic_stats = run.update_critic(batch, step)  # during its warm-up, also raises the policy version
        with run.timers("publish"):
            run.rollouts.publish()
        run.save(step=step + 1)
        run.log(step, batch, updates, stats, critic_stats)
        run.evaluate(step=step + 1)  # uses the weights just published; the checkpoint keeps the scores
        if run.checkpoint(step=step + 1):
            return
        yield step + 1
    run.finish()


def row_steps(run: RowRun) -> Iterator[int]:
    """Run the steps of supervised or preference training. After each, yield the number of completed steps.

    Returns early after a stop signal.
    """
    if not run.begin():
        return
    for step in range(run.first_step, run.config.run.steps):
        run.update(step)
        run.evaluate(step=step + 1)
        run.save(step=step + 1)
        if run.checkpoint(step=step + 1):
            return
        yield step + 1
    run.finish()


class Parts(NamedTuple):
    """The parts of one kind of run: its config check, its run class and its step loop."""

    check: rank.Check
    run: Callable[..., Any]
    steps: Callable[[Any], Iterator[int]]


def parts_of(config: TrainConfig, *, kind: str = "") -> Parts:
    """Return the config check, run class and step loop of one kind of run.

    kind: rl, supervised, preference, or '' for the kind that the config implies. The returned check rejects a config of
    another kind.
    """
    if not kind:
        kind = "supervised" if config.supervised.answer else "preference" if config.preference.loss else "rl"
    # Imported here because imports take seconds and each kind needs only its own.
    from megatron_rl import platform

    platform.prepare(may_use_transformer_engine=config.may_use_transformer_engine)
    if kind == "supervised":
        from megatron_rl.run.row_training import SupervisedRun, check_supervised

        return Parts(check_supervised, SupervisedRun, row_steps)
    if kind == "preference":
        from megatron_rl.run.preference_run import PreferenceRun, check_preference

        return Parts(check_preference, PreferenceRun, row_steps)
    from megatron_rl.run.checks import dry_run
    from megatron_rl.run.rl_run import RLRun

    return Parts(dry_run, RLRun, rl_steps)


def main(argv: list[str] | None = None, *, kind: str = "") -> None:
    """Run training from the command line. `megatron-rl sft` and `megatron-rl preferences` pass `kind`."""

    def load(config: TrainConfig) -> tuple[rank.Check, rank.Train]:
        return parts_of(config, kind=kind).check, functools.partial(train, kind=kind)

    rank.main("Train a policy with RL, or a model on answers or on pairs of replies.", load, argv)


if __name__ == "__main__":
    process_exit.run_and_end(main)
