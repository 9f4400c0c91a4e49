"""Supervised training on the answers that rows bring, with the same engine as RL.

megatron-rl sft configs/count_sft.yaml                             # writes run.folder/final
megatron-rl launch configs/count_sft.yaml parallel.tensor=2        # the same on several ranks
"""

from __future__ import annotations

from megatron_rl.config import TrainConfig
from megatron_rl.launch import process_exit, rank


def train(config: TrainConfig, *, resume: str = "") -> bool:
    """Run the experiment, from its start or from a checkpoint. False if a notice stopped it. All ranks call it."""
    from megatron_rl.run.supervised_training import SupervisedRun

    with SupervisedRun(config, resume=resume) as x:
        return x.train()


def main(argv: list[str] | None = None) -> None:
    rank.main("megatron_rl.run.sft", "Train a policy on answers.", _load, argv)


def _load() -> tuple[rank.Check, rank.Train]:
    from megatron_rl.run.supervised_training import check_supervised_training

    return check_supervised_training, train


if __name__ == "__main__":
    process_exit.run_and_end(main)
