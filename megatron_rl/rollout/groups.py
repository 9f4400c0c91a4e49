"""Groups of trajectories: builds them from workflow results, masks stale tokens, and joins them into batches."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.telemetry.rollout_metrics import RolloutMetrics
from megatron_rl.types import PART, TOKEN_KEYS, TURN_REWARDS, WIDE_COLUMNS, Runs, Trajectory, TrajectoryBatch

NUMBERS = ("rewards", "greedy_reward", "greedy_tokens", "is_greedy", "sample", "agent")
"""Names of numeric columns that later computations use."""
ROUNDING = 1e-6
"""Relative rounding error of a float32 reward, or of a sum of rewards."""


def as_group(result: Any, *, source: str = "") -> TrajectoryBatch | None:
    """Convert a workflow's result into a batch of one group.

    Return None if the result is None, which rejects the prompt. Raises TypeError or ValueError for a result that cannot
    be trained or compared: wrong types, shapes or lengths, NaN or infinite numbers, or no token to train. source:
    workflow and prompt, for the error message.
    """
    try:
        group = _joined(result)
        if group is None or not len(group):
            return None
        _check_group(group)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} ({source})" if source else str(error)) from error
    return group


def _joined(result: Any) -> TrajectoryBatch | None:
    if result is None:
        return None
    if isinstance(result, TrajectoryBatch):
        _check_tensors(result.tokens | result.sequences)
        _check_tokens(result.tokens)
        missing = [name for name in TOKEN_KEYS if name not in result]
        if missing:
            raise ValueError(
                f"arun_episode returned a TrajectoryBatch without {', '.join(missing)}; its tokens need "
                f"{', '.join(TOKEN_KEYS)}."
            )
        tokens = {name: column.to(TOKEN_KEYS.get(name, column.dtype)) for name, column in result.tokens.items()}
        one_group = torch.zeros(len(result), dtype=torch.int64)
        return dataclasses.replace(result, tokens=tokens, sequences=result.sequences | {"group": one_group})
    if isinstance(result, list):
        return _joined_trajectories(result) if result else None
    tensordict = sys.modules.get("tensordict")  # imported by workflows that use it; importing it here would take long
    if isinstance(result, Mapping) or (tensordict is not None and isinstance(result, tensordict.TensorDict)):
        _check_tensors(result)
        batch = TrajectoryBatch.from_padded(result)
        mask = result["attention_mask"].bool()
        _check_tokens({name: value[mask] for name, value in result.items() if value.shape == mask.shape})
        batch.sequences["group"].zero_()
        return batch
    raise TypeError(
        f"arun_episode returned {type(result).__name__}; must return a list of Trajectory, a padded TensorDict or None."
    )


def _joined_trajectories(result: list[Any]) -> TrajectoryBatch:
    """Join a group's trajectories.

    Raises TypeError or ValueError if `from_trajectories` would silently change one of them.
    """
    is_converted = False
    for number, entry in enumerate(result):
        if not isinstance(entry, Trajectory):
            raise TypeError(
                f"arun_episode returned a list with {type(entry).__name__}; every entry must be a Trajectory."
            )
        whose = f"trajectory {number} with "
        tokens = {name: getattr(entry, name) for name in TOKEN_KEYS} | entry.tokens
        _check_tensors(tokens, whose)
        for name, value in tokens.items():
            is_flat = value.dim() == 1 or name in WIDE_COLUMNS
            if value.shape[:1] != entry.input_ids.shape or not is_flat:
                raise ValueError(
                    f"arun_episode returned {whose}{name} of shape {tuple(value.shape)} for input_ids of "
                    f"{tuple(entry.input_ids.shape)}: must have one entry per token."
                )
        is_converted |= any(tokens[name].dtype != dtype for name, dtype in TOKEN_KEYS.items())
        first = result[0]
        if entry.tokens.keys() != first.tokens.keys() or entry.sequence.keys() != first.sequence.keys():
            raise ValueError(
                f"arun_episode returned {whose}{sorted([*entry.tokens, *entry.sequence])} and trajectory 0 with "
                f"{sorted([*first.tokens, *first.sequence])}; give all trajectories the same further fields."
            )
        for name, number_of in {"reward": entry.reward, **entry.sequence}.items():
            try:
                float(number_of)
            except (TypeError, ValueError) as error:
                raise ValueError(f"arun_episode returned {whose}{name} = {number_of!r}: must be a number.") from error
    group = TrajectoryBatch.from_trajectories([result])
    try:  # all at once, because checks of each alone would take longer than all other work on the group
        _check_tokens(group.tokens)
    except ValueError:
        is_converted = True
    if is_converted:  # the conversion would hide errors
        for number, entry in enumerate(result):
            _check_tokens({name: getattr(entry, name) for name in TOKEN_KEYS}, f"trajectory {number} with ")
    return group


def _check_tensors(columns: Any, whose: str = "") -> None:
    for name, value in columns.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"arun_episode returned {whose}{name} as {type(value).__name__}; must be a torch.Tensor.")
        if not value.is_cpu:
            raise ValueError(f"arun_episode returned {whose}{name} on {value.device}; must be on the CPU.")


def _check_tokens(columns: Mapping[str, Tensor], whose: str = "") -> None:
    """Check per-token columns before they are converted to their dtypes, because the conversion would hide errors.

    whose: the columns' owner, for the error message.
    """
    for name, value in columns.items():
        what = f"arun_episode returned {whose}{name}"
        is_converted = name in TOKEN_KEYS and value.dtype != TOKEN_KEYS[name]
        if is_converted and name in ("input_ids", "versions") and bool((value != value.to(TOKEN_KEYS[name])).any()):
            found = value[value != value.to(TOKEN_KEYS[name])][0].item()
            raise ValueError(f"{what} that hold {found}: must be whole numbers, {TOKEN_KEYS[name]}.")
        if name == "input_ids" and bool((value < 0).any()):
            raise ValueError(f"{what} that hold {int(value.min())}: must be ids of the vocabulary, from 0.")
        if is_converted and name == "loss_mask" and bool(((value != 0) & (value != 1)).any()):
            found = value[(value != 0) & (value != 1)][0].item()
            raise ValueError(f"{what} that holds {found}: must be True for trained tokens and False for others.")
        if name == "logprobs" and not bool(value.isfinite().all()):
            place = int((~value.isfinite()).nonzero()[0, 0])
            raise ValueError(
                f"{what} that hold {value[place].item()} at token {place}: must be finite, and 0 for tokens that the "
                f"policy did not write."
            )


def _check_group(group: TrajectoryBatch) -> None:
    if "rewards" not in group:
        found = sorted([*group.tokens, *group.sequences])
        raise ValueError(
            f"arun_episode returned {', '.join(found)} and no rewards; give one for each trajectory or token."
        )
    for name in (*NUMBERS, *(name for name in group.sequences if name.startswith(PART))):
        columns = group.tokens if name == "rewards" and name in group.tokens else group.sequences
        if name in group and name not in columns:
            raise ValueError(f"arun_episode returned {name} for each token; give one number for each trajectory.")
        if name not in columns:
            continue
        columns[name] = columns[name].float()
        if not bool(columns[name].isfinite().all()):
            raise ValueError(
                f"arun_episode returned {name} = {columns[name].tolist()}: must be finite in float32; have it "
                f"raise an error if it has no reward, or return None to skip the prompt."
            )
    if TURN_REWARDS in group:
        _check_turn_rewards(group)
    if int(group.lengths.min()) < 1:
        raise ValueError(f"arun_episode returned trajectories of {group.lengths.tolist()} tokens: each needs one.")
    if not bool(group["loss_mask"].any()):
        raise ValueError(
            f"arun_episode returned {len(group)} trajectories with a loss_mask that is False for all "
            f"{len(group['loss_mask'])} tokens: nothing would be trained; set it for the policy's tokens, or return "
            f"None to skip the prompt."
        )


def _check_turn_rewards(group: TrajectoryBatch) -> None:
    """Raise ValueError if turn rewards are on untrained tokens, or do not add up to their trajectory's reward."""
    if TURN_REWARDS not in group.tokens or "rewards" in group.tokens:
        raise ValueError(
            f"arun_episode returned {TURN_REWARDS} that are not per token, or rewards that are; give "
            f"tokens[{TURN_REWARDS!r}] and one reward per trajectory, or tokens['rewards'] alone."
        )
    column = group.tokens[TURN_REWARDS] = group[TURN_REWARDS].float()
    mask, bounds = group["loss_mask"], group.cu_seqlens.tolist()
    for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        own, trained = column[start:stop], mask[start:stop]
        what = f"arun_episode returned trajectory {number} with {TURN_REWARDS}"
        wrong = (~own.isfinite() | (~trained & (own != 0))).nonzero()
        if len(wrong):
            place = int(wrong[0, 0])
            raise ValueError(
                f"{what} that hold {float(own[place])} at token {place}: must be finite, and 0 for a token that is not "
                f"trained; put a reply's reward on its last token."
            )
        reward, total = float(group["rewards"][number]), float(own.double().sum())
        allowed = ROUNDING * (abs(reward) + float(own.double().abs().sum()))
        if bool(trained.any()) and abs(reward - total) > allowed:
            raise ValueError(
                f"{what} that add up to {total:g} and reward = {reward:g}: must be equal; a workflow that changes a "
                f"dialogue's reward must also change its turns' rewards, or remove their column."
            )


def join_groups(groups: list[TrajectoryBatch]) -> TrajectoryBatch:
    """Join batches that have one group each. The column `group` numbers the groups from 0 in the given order."""
    first = groups[0]
    for number, group in enumerate(groups):
        if group.tokens.keys() != first.tokens.keys() or group.sequences.keys() != first.sequences.keys():
            raise RuntimeError(
                f"group {number} has the keys {sorted(group.tokens)} and {sorted(group.sequences)}, group 0 "
                f"{sorted(first.tokens)} and {sorted(first.sequences)}; every episode must return the same ones."
            )
        # A new column, because the journal may still be writing the old one.
        group.sequences["group"] = torch.full_like(group.sequences["group"], number)
    return TrajectoryBatch.cat(groups)


def trained_runs(group: TrajectoryBatch) -> Runs:
    """Return the policy versions, run-length encoded, of those trained tokens that have a version."""
    runs = group.versions
    assert runs is not None, "a group has versions"
    # By NumPy, which takes a fifth of torch's time: a group has few runs.
    values, lengths, mask = runs.values.numpy(), runs.lengths.numpy(), group["loss_mask"].numpy()
    starts = lengths.cumsum() - lengths
    counts = np.add.reduceat(mask, starts, dtype=np.int32) if len(starts) else lengths  # [R]: each run's trained tokens
    kept = (values >= 0) & (counts > 0)
    return Runs(torch.from_numpy(values[kept]), torch.from_numpy(counts[kept]))


def trained_versions(group: TrajectoryBatch) -> Tensor:
    """Return the policy versions, as int32, of those trained tokens that have a version."""
    return trained_runs(group).each()


def is_uniform(group: TrajectoryBatch) -> bool:
    """Return True if all rewards are equal up to rounding, so that no trajectory is better than another."""
    rewards = reward_of_each(group).double()
    return bool(rewards.max() - rewards.min() <= ROUNDING * rewards.abs().max())


def reward_of_each(batch: TrajectoryBatch) -> Tensor:
    """Return each trajectory's reward `[B]`. For per-token rewards, it is their sum over trained tokens."""
    rewards: Tensor = batch["rewards"]
    if "rewards" not in batch.tokens:
        return rewards
    counted = rewards.masked_fill(~batch["loss_mask"], 0.0)
    return torch.stack([part.sum() for part in torch.split(counted, batch.lengths.tolist())])


def mean_reward(batch: TrajectoryBatch) -> float:
    """Return the mean reward of all samples.

    Trajectories of one sample, such as those of a debate's agents, count as one.
    """
    return float(batch.means_of_samples(reward_of_each(batch)).mean())


def sampled_reward(group: TrajectoryBatch) -> float:
    """Return the mean reward of a group's samples.

    Greedy replies are left out, because they serve only as baselines.
    """
    if "is_greedy" not in group:
        return mean_reward(group)
    rewards, counted = reward_of_each(group).double(), group["is_greedy"] == 0
    return float(rewards[counted].mean()) if bool(counted.any()) else float(rewards.mean())


def mask_older(group: TrajectoryBatch, oldest_allowed: int) -> int:
    """Clear the loss mask of tokens that versions before `oldest_allowed` have sampled.

    Return the number of these tokens.
    """
    versions, mask = group["versions"], group["loss_mask"]
    old = mask & (versions >= 0) & (versions < oldest_allowed)
    group.tokens["loss_mask"] = mask & ~old
    return int(old.sum())


def without_cut_off(
    group: TrajectoryBatch | None, result: list[Trajectory], metrics: RolloutMetrics, *, masks: bool
) -> TrajectoryBatch | None:
    """Count the trajectories that were cut off at a length limit or split.

    If `masks`, clear the loss mask of those cut off. Their rewards still count in comparisons. Return None if no token
    is left to train.
    """
    splits = [trajectory.split for trajectory in result if trajectory.split]
    metrics.add(**{f"rollout/splits/{why}": splits.count(why) for why in set(splits)})
    cut_off = torch.tensor([trajectory.is_cut_off for trajectory in result], dtype=torch.bool)
    count = int(cut_off.sum())
    metrics.add(trajectories=len(result), cut_off=count, masked_cut_offs=count * masks)
    if group is None or not (masks and count):
        return group
    group.tokens["loss_mask"] = group["loss_mask"] & ~cut_off.repeat_interleave(group.lengths)
    return group if bool(group["loss_mask"].any()) else None


def refuse_older(group: TrajectoryBatch | None, version: int, max_staleness: int) -> None:
    """Raise RuntimeError if a group has trained tokens of versions below `version` - `max_staleness`.

    version: policy version at the episode's start. A retry would fail in the same way.
    """
    versions = trained_runs(group).values if group is not None else torch.empty(0)
    if len(versions) and (oldest := int(versions.min())) < version - max_staleness:
        raise RuntimeError(
            f"the trajectories have tokens of policy version {oldest}, but the episode began at version {version}: a "
            f"server did not receive the weights, or the workflow writes wrong versions."
        )
