"""Training on pairs of replies, one of which was preferred, with the same engine as RL: a policy, or a reward model.

megatron-rl preferences configs/count_dpo.yaml                             # writes run.folder/final
megatron-rl launch configs/count_reward_model.yaml parallel.tensor=2       # the same on several ranks
"""

from __future__ import annotations

from megatron_rl.config import TrainConfig
from megatron_rl.launch import process_exit, rank


def train(config: TrainConfig, *, resume: str = "") -> bool:
    """Run the experiment, from its start or from a checkpoint. False if a notice stopped it. All ranks call it."""
    from megatron_rl.run.preference_training import PairRun

    with PairRun(config, resume=resume) as x:
        return x.train()


def main(argv: list[str] | None = None) -> None:
    rank.main("megatron_rl.run.preferences", "Train on pairs of replies.", _load, argv)


def _load() -> tuple[rank.Check, rank.Train]:
    from megatron_rl.run.preference_training import check_pair_training

    return check_pair_training, train


if __name__ == "__main__":
    process_exit.run_and_end(main)
