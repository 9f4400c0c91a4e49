"""Finished groups that wait for a batch, and the numbers of prompts that failed or were rejected meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_rl.config import RolloutConfig
from megatron_rl.config.users_code import words_of
from megatron_rl.rollout.events import Episode
from megatron_rl.rollout.groups import join_groups, mask_older, trained_runs
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics
from megatron_rl.types import TrajectoryBatch

MOST_FAILED, MOST_REJECTED = 10, 100
"""Maximum numbers of failed and of rejected prompts, per requested group. Above them a call raises an error instead of
using up the data set. While no group has finished, the limit of failed prompts is 1 per requested group."""


@dataclass(kw_only=True)
class Finished:
    """A finished group that waits to be trained."""

    episode: Episode
    group: TrajectoryBatch
    versions: range
    """Range of the policy versions of the trained tokens, oldest to newest. Empty if no token has a version."""
    decides: float
    """The group is dropped once this policy version is too old. Infinite if the group is never dropped."""

    @classmethod
    def of(cls, episode: Episode, group: TrajectoryBatch, stale: str) -> Finished:
        """stale: value of rollout.stale, which says what happens to stale tokens."""
        versions = trained_runs(group).values.tolist()
        ends = range(min(versions), max(versions) + 1) if versions else range(0)
        # With `mask`, a group that would be masked completely is dropped as well.
        decides = {"drop": ends.start, "mask": ends.stop - 1, "keep": math.inf}[stale] if ends else math.inf
        return cls(episode=episode, group=group, versions=ends, decides=decides)


class FinishedGroups:
    """The finished groups of one executor's training prompts, and the numbers of failures since the last batch."""

    def __init__(self, config: RolloutConfig, metrics: RolloutMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._groups: list[Finished] = []
        self._failed = self._rejected = 0
        self._first_error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, episode: Episode, group: TrajectoryBatch) -> None:
        self._groups.append(Finished.of(episode, group, self._config.stale))

    def note_rejection(self) -> None:
        self._rejected += 1

    def note_failure(self, error: BaseException) -> None:
        self._failed += 1
        self._first_error = self._first_error or error

    def forget_failures(self) -> None:
        self._failed, self._rejected, self._first_error = 0, 0, None

    def drop_older(self, oldest_allowed: int) -> list[Episode]:
        """Drop the groups that are too stale to train, and return their episodes."""
        dropped = [finished.episode for finished in self._groups if finished.decides < oldest_allowed]
        if dropped:  # rarely, and this is called after every episode
            self._groups = [finished for finished in self._groups if finished.decides >= oldest_allowed]
        return dropped

    def take(self, count: int, *, in_order: bool = False) -> list[Finished]:
        """Remove `count` groups and return them. in_order: sort them by their prompts' order.

        Groups that missed an earlier batch are taken first, then those with the oldest tokens.
        """
        # First the groups that missed an earlier batch, then the oldest, which might be too old for the next batch.
        # Groups of the same age are taken in the order in which they finished.
        self._groups.sort(key=lambda finished: (-finished.episode.requeues, finished.versions.start))
        taken, self._groups = self._groups[:count], self._groups[count:]
        if in_order:
            taken.sort(key=lambda finished: finished.episode.number)
        return taken

    def joined(self, taken: list[Finished], version: int) -> TrajectoryBatch:
        """Join the groups into one batch for a trainer at policy version `version`, and count the tokens' ages."""
        if self._config.stale == "mask":
            # The version rises while a group waits, so its age is known only now.
            for finished in taken:
                masked = mask_older(finished.group, version - self._config.max_staleness)
                self._metrics.add(masked_tokens=masked)
        if all({"prompt_index", "epoch"} <= finished.episode.data.keys() for finished in taken):
            for finished in taken:
                place = finished.episode.data["prompt_index"]
                finished.group.sequences["prompt_index"] = torch.full((len(finished.group),), place)
        batch = join_groups([finished.group for finished in taken])
        runs = trained_runs(batch)
        if len(runs.values):
            ages = version - runs.values
            self._metrics.add(staleness=float((ages * runs.lengths.long()).sum()), aged_tokens=len(runs))
            self._metrics.at_least(staleness_max=float(ages.max()))
        return batch

    def raise_if_hopeless(self, count: int, *, under_way: int) -> None:
        """Raise RuntimeError if too many prompts failed or were rejected, or too few are left for `count` groups."""
        if self._failed >= count * (MOST_FAILED if self._groups else 1):
            raise RuntimeError(
                f"rollout: {self._failed} episodes failed {self._config.episode_attempts} times each and "
                f"{len(self._groups) or 'none'} succeeded"
                + (f"; the first error was {words_of(self._first_error)}" if self._first_error is not None else ".")
            ) from self._first_error
        if self._rejected >= MOST_REJECTED * count:
            raise RuntimeError(
                f"rollout: {self._rejected} prompts were rejected on the way to {count} groups, of which "
                f"{len(self._groups)} are there; let the workflow accept more, or give it other prompts."
            )
        left = len(self._groups) + under_way
        if left < count:
            raise RuntimeError(
                f"rollout: asked for {count} groups, but only {left} episodes are finished or under way "
                f"({self._failed} failed and {self._rejected} were rejected meanwhile); submit more."
            ) from self._first_error
