"""Groups of trajectories: made from what workflows return, aged, and joined into batches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rl.types import Trajectory, TrajectoryBatch

ROUNDING = 1e-6
"""Of a reward in float32, or a sum of them, as a share of it."""


def as_group(result: Any) -> TrajectoryBatch | None:
    """Turn what a workflow returned into a batch of one group; None for a rejected prompt.

    ValueError where a reward is missing or no finite number, which would be in all advantages compared with it.
    """
    group = _joined(result)
    if group is not None and "rewards" not in group:
        found = sorted([*group.tokens, *group.sequences])
        raise ValueError(
            f"arun_episode returned {', '.join(found)} and no rewards; give one for each trajectory or token."
        )
    for name in ("rewards", "greedy_reward"):
        if group is not None and name in group and not bool(group[name].isfinite().all()):
            raise ValueError(
                f"arun_episode returned {name} = {group[name].tolist()}: must be finite numbers of float32."
            )
    return group


def _joined(result: Any) -> TrajectoryBatch | None:
    if result is None or isinstance(result, TrajectoryBatch):
        return result
    if isinstance(result, list):
        strangers = [type(entry).__name__ for entry in result if not isinstance(entry, Trajectory)]
        if strangers:
            raise TypeError(f"arun_episode returned a list with {strangers[0]}; every entry must be a Trajectory.")
        return TrajectoryBatch.from_trajectories([result]) if result else None
    if isinstance(result, Mapping) or is_tensordict(result):
        batch = TrajectoryBatch.from_padded(result)
        batch.sequences["group"].zero_()
        return batch
    raise TypeError(
        f"arun_episode returned {type(result).__name__}; must return a list of Trajectory, a padded TensorDict or None."
    )


def is_tensordict(result: Any) -> bool:
    """Only a workflow that uses them has loaded their package, which takes longer than all else here."""
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(result, tensordict.TensorDict)


def join_groups(groups: list[TrajectoryBatch]) -> TrajectoryBatch:
    """Join batches of one group each; `group` numbers them from 0 in the given order."""
    first = groups[0]
    for number, group in enumerate(groups):
        if group.tokens.keys() != first.tokens.keys() or group.sequences.keys() != first.sequences.keys():
            raise RuntimeError(
                f"group {number} has the keys {sorted(group.tokens)} and {sorted(group.sequences)}, group 0 "
                f"{sorted(first.tokens)} and {sorted(first.sequences)}; every episode must return the same ones."
            )
        group.sequences["group"].fill_(number)
    return TrajectoryBatch.cat(groups)


def trained_versions(group: TrajectoryBatch) -> Tensor:
    """Return the policy versions of the trained tokens that have one, int64."""
    versions: Tensor = group["versions"]
    return versions[group["loss_mask"] & (versions >= 0)]


def is_uniform(group: TrajectoryBatch) -> bool:
    """True where all samples have the same reward but for rounding, so that none is better than another."""
    rewards = group.means_of_samples(reward_of_each(group)).double()
    return bool(rewards.max() - rewards.min() <= ROUNDING * rewards.abs().max())


def reward_of_each(batch: TrajectoryBatch) -> Tensor:
    """`[B]`: each trajectory's reward, or where there is one for each token their sum, of which trained ones count."""
    rewards: Tensor = batch["rewards"]
    if "rewards" not in batch.tokens:
        return rewards
    counted = rewards.masked_fill(~batch["loss_mask"], 0.0)
    return torch.stack([part.sum() for part in counted.split(batch.lengths.tolist())])


def mask_older(group: TrajectoryBatch, oldest_allowed: int) -> int:
    """Clear the loss mask of tokens that an older version sampled; return how many there were."""
    versions, mask = group["versions"], group["loss_mask"]
    old = mask & (versions >= 0) & (versions < oldest_allowed)
    group.tokens["loss_mask"] = mask & ~old
    return int(old.sum())


def refuse_older(group: TrajectoryBatch | None, version: int, max_staleness: int) -> None:
    """Raise RuntimeError for tokens that were too old to be trained when the episode began, at `version`.

    They would be sampled again and again: no later try is younger. What is only older than `version` may come from a
    journal.
    """
    versions = trained_versions(group) if group is not None else ()
    if len(versions) and (oldest := int(versions.min())) < version - max_staleness:
        raise RuntimeError(
            f"the trajectories hold tokens of policy version {oldest}, and the episode began at version {version}: a "
            f"server did not get the weights, or the workflow writes versions of its own."
        )
