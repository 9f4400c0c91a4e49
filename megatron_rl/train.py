"""Entry point of RL training and its loop.

python -m megatron_rl.train configs/demo.yaml run.steps=20
torchrun --nproc-per-node 4 -m megatron_rl.train configs/count_grpo.yaml parallel.tensor=2 parallel.pipeline=2
"""

from __future__ import annotations

from megatron_rl.config import TrainConfig
from megatron_rl.launch import process_exit, rank


def train(config: TrainConfig, *, resume: str = "") -> bool:
    """Run the experiment, from its start or from a checkpoint. False if a stop signal did. All ranks call it."""
    from megatron_rl.run.rl_run import RLRun

    with RLRun(config, resume=resume) as run:
        run.begin()
        for step in range(run.first_step, config.run.steps):
            batch = run.next_batch(step)
            if batch is None:
                return False
            batch = run.add_reward_model_scores(batch)
            with run.timers("advantages"):
                run.compute_advantages(batch)
                updates = run.split_into_updates(batch, step)
            with run.timers("logprobs"):
                run.actor.compute_logprobs(updates)
            with run.timers("update"):
                stats = run.actor.update(updates)
            critic_stats = run.update_critic(batch, step)
            with run.timers("publish"):
                run.rollouts.publish()
            run.save(step=step + 1)
            run.log(step, batch, updates, stats, critic_stats)
            run.evaluate(step=step + 1)
            if run.checkpoint(step=step + 1):
                return False
        run.finish()
        return True


def main(argv: list[str] | None = None) -> None:
    rank.main("megatron_rl.train", "Train a policy with RL.", _load, argv)


def _load() -> tuple[rank.Check, rank.Train]:
    from megatron_rl.run.checks import dry_run

    return dry_run, train


if __name__ == "__main__":
    process_exit.run_and_end(main)
