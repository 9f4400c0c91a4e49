"""Makes records of steps without servers: made-up trajectories are trained by the loop of a run, which is recorded."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.batch import exchange
from megatron_rl.batch.step_batch import StepBatch
from megatron_rl.config import load_config
from megatron_rl.replay.replay import ReplayedRun, replay
from megatron_rl.replay.replay_file import write_replay_file
from megatron_rl.train import rl_steps
from megatron_rl.types import Trajectory, TrajectoryBatch
from tests.kit.ranks import run_ranks
from tests.kit.runs import COUNT, ROOT, UNTAUGHT

SMALL = (*UNTAUGHT, "run.steps=3", "batch.updates_per_step=2", "run.threads_per_rank=1", "run.checkpoint_every_steps=0")
VOCAB = 6
"""Token ids that made-up trajectories use; every model of the tests has more."""


def trajectories(seed: int, *, groups: int = 4, samples: int = 3) -> TrajectoryBatch:
    """Random groups of prompts with replies of different lengths, which version 0 has sampled."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(groups):
        prompt = torch.randint(VOCAB, (5,), generator=generator)
        found.append([])
        for sample in range(samples):
            reply = torch.randint(VOCAB, (2 + (number + sample) % 4,), generator=generator)
            mask = torch.cat([torch.zeros(5), torch.ones(len(reply))]).bool()
            found[-1].append(
                Trajectory(
                    input_ids=torch.cat([prompt, reply]).int(),
                    loss_mask=mask,
                    logprobs=torch.where(mask, torch.rand(len(mask), generator=generator) - 3.0, 0.0),
                    versions=torch.where(mask, 0, -1).int(),
                    reward=float(torch.rand((), generator=generator)),
                )
            )
    batch = TrajectoryBatch.from_trajectories(found)
    batch.sequences["prompt"] = 10 * seed + batch["group"]
    return batch


class MadeUpRun(ReplayedRun):
    """A run whose trajectories are made up. It writes its records into its own folder."""

    def next_batch(self, step: int) -> StepBatch:
        own = None
        if self.groups.is_rollout_rank:
            whole, size, rank = trajectories(step), self.groups.data.size, self.groups.data.rank
            own = whole.select((whole["group"] % size == rank).nonzero()[:, 0].tolist())
            own.sequences["group"] = own["group"] // size
        options = self.config.batch
        batch = exchange.share_out(own, self.groups, updates=options.updates_per_step, seed=step)
        self.records.begin(step, batch)
        return batch

    def _compare(self, step: int) -> None:
        pass


def make_records(folder: Path, *overrides: str, ranks: int = 1, config: str = COUNT) -> Path:
    """Record a run of three steps in `folder`."""
    run_ranks(ranks, _make_records, folder, overrides, config)
    return folder


def _make_records(folder: Path, overrides: tuple[str, ...], config: str) -> None:
    os.chdir(ROOT)
    options = load_config(config, [*SMALL, f"run.folder={folder}", "telemetry.record_steps=every 1", *overrides])
    place = {"first": 0, "last": options.run.steps - 1, "checkpoint": None}
    with MadeUpRun(options, folder, **place, tolerance=None, say=lambda text: None) as run:
        for _ in rl_steps(run):
            pass


def take_again(
    run: Path,
    step: int,
    *overrides: str,
    to: Path,
    ranks: int = 1,
    plant: Callable[[], None] = lambda: None,
    **options: Any,
) -> tuple[list[str], str]:
    """Replay a step on forked ranks. Returns the lines that it prints and the first difference, '' for none.

    plant: called on each rank before the replay, to make it compute something else.
    """
    return run_ranks(ranks, _take_again, run, step, overrides, to, plant, options)[0]


def _take_again(run: Path, step: int, overrides: tuple[str, ...], to: Path, plant: Any, options: dict[str, Any]) -> Any:
    os.chdir(ROOT)
    plant()
    lines: list[str] = []
    found = replay(run, step, folder=to, overrides=list(overrides), say=lines.append, **options)
    return lines, "" if found is None else str(found)


CASES = {
    "group_norm": (("optimizer.eps=1e-4",), 1, COUNT),
    "penalty": (
        ("algo.kl_coefficient=0.1", "algo.kl_in=reward", "reward_shaping.running=mean_std", "optimizer.eps=1e-4"),
        *(1, COUNT),
    ),
    "critic": (
        ("optimizer.eps=1e-4", "critic.optimizer.eps=1e-4", "critic.warmup_steps=0"),
        1,
        "configs/count_ppo_critic.yaml",
    ),
    "replicas": (("optimizer.eps=1e-4", "optimizer.distributed=true"), 2, COUNT),
    "covariance": (("optimizer.eps=1e-4", "algo.loss=kl_cov", "algo.loss_args={share: 0.2}"), 2, COUNT),
    "sequence_ratio": (("optimizer.eps=1e-4", "algo.loss=gspo", "algo.clip_low=0.01", "algo.clip_high=0.01"), 1, COUNT),
    "negative_bound": (
        ("optimizer.eps=1e-4", "correction.negative_bound=0.1", "correction.weight=clamp", "correction.level=sequence"),
        *(1, COUNT),
    ),
    "pass_at_k": (("optimizer.eps=1e-4", "algo.advantage=pass@k", "algo.advantage_args={k: 2}"), 1, COUNT),
    "stages": (
        ("optimizer.eps=1e-4", "parallel.pipeline=2", "parallel.tensor=1", "batch.share_prompts=true"),
        *(2, COUNT),
    ),
}
"""Settings, ranks and config of each case in tests/reports."""


def main(folder: Path, *names: str) -> None:
    """Record cases in `folder`, by default all, each from its run's start to its second step."""
    for name in names or CASES:
        overrides, ranks, config = CASES[name]
        with tempfile.TemporaryDirectory() as run:
            make_records(Path(run), *overrides, ranks=ranks, config=config)
            print(write_replay_file(Path(run), 1, folder / f"{name}.tar.gz", with_weights=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
