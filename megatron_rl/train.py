"""Entry point of RL training and its loop.

python -m megatron_rl.train configs/demo.yaml run.steps=20
torchrun --nproc-per-node 4 -m megatron_rl.train configs/count_grpo.yaml parallel.tensor=2 parallel.pipeline=2
"""

from __future__ import annotations

from megatron_rl.config import TrainConfig
from megatron_rl.launch import process_exit, rank


def train(config: TrainConfig, *, resume: str = "") -> bool:
    """Run the experiment, from its start or from a checkpoint. False if a notice stopped it. All ranks call it."""
    from megatron_rl.run.rl_run import RLRun

    with RLRun(config, resume=resume) as x:
        x.begin()
        for step in range(x.first_step, config.run.steps):
            batch = x.next_batch(step)
            if batch is None:
                return False
            batch = x.score(batch)
            with x.timers("advantages"):
                x.compute_advantages(batch)
                shares = x.split(batch, step)
            with x.timers("logprobs"):
                x.actor.compute_logprobs(shares)
            with x.timers("update"):
                stats = x.actor.update(shares)
            critic_stats = x.update_critic(batch, step)
            with x.timers("publish"):
                x.rollouts.publish()
            x.save(step=step + 1)
            x.log(step, batch, shares, stats, critic_stats)
            x.evaluate(step=step + 1)
            if x.checkpoint(step=step + 1):
                return False
        x.finish()
        return True


def main(argv: list[str] | None = None) -> None:
    rank.main("megatron_rl.train", "Train a policy with RL.", _load, argv)


def _load() -> tuple[rank.Check, rank.Train]:
    from megatron_rl.run.checks import dry_run

    return dry_run, train


if __name__ == "__main__":
    process_exit.run_and_end(main)
