"""Entry point of RL training and its loop.

python -m megatron_rl.train configs/demo.yaml run.steps=20
torchrun --nproc-per-node 4 -m megatron_rl.train configs/count_grpo.yaml parallel.tensor=2 parallel.pipeline=2
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megatron_rl.config import TrainConfig, load_config
from megatron_rl.launch import watch
from megatron_rl.launch.notice import EXIT_STOPPED
from megatron_rl.launch.placement import ranks_of_step


def train(config: TrainConfig, *, resume: str = "") -> bool:
    """Run the experiment, from its start or from a checkpoint. False if a notice stopped it. All ranks call it."""
    from megatron_rl.experiment import Experiment

    with Experiment(config, resume=resume) as x:
        x.begin()
        for step in range(x.first_step, config.run.steps):
            batch = x.next_batch(step)
            if batch is None:
                return False
            x.score(batch)
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
    parser = argparse.ArgumentParser("megatron_rl.train", description="Train a policy with RL.")
    parser.add_argument("config", type=Path, help="experiment file, e.g. configs/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. optimizer.lr=1e-5")
    parser.add_argument("--dry-run", action="store_true", help="check everything that needs no server, then stop")
    parser.add_argument(
        "--resume",
        default="",
        metavar="auto|CHECKPOINT",
        help="continue a run: auto takes the newest good checkpoint in run.folder, or starts where there is none",
    )
    parser.add_argument("--exit-with", type=int, metavar="PID", help="stop when this process ends (launchers pass it)")
    args = parser.parse_intermixed_args(argv)
    os.environ |= ranks_of_step(os.environ)
    try:
        config = load_config(args.config, args.overrides)
        config.check_world_size(int(os.environ.get("WORLD_SIZE", 1)))
        if args.exit_with:
            watch.exit_with(args.exit_with, says_so=os.environ.get("RANK", "0") == "0")
        if args.dry_run:
            from megatron_rl.experiment import check

            check(config)
            print(config.to_yaml())
        else:
            if not train(config, resume=args.resume):
                sys.exit(EXIT_STOPPED)
    except ValueError as error:
        sys.exit(f"megatron_rl.train: {error}")
    except KeyboardInterrupt:
        sys.exit("megatron_rl.train: interrupted")
    except RuntimeError as error:
        if not watch.is_lost_peer(error):
            raise
        watch.wait_to_be_stopped(int(os.environ.get("RANK", 0)))


if __name__ == "__main__":
    main()
