"""Decides when another episode may start: the admission rule of asynchronous RL (AReaL, arXiv 2505.24298).

The policy version counts publications, so it rises by at most one per step, however many updates the step has.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AdmissionGate:
    """Counts one executor's episodes, and computes how many more may start."""

    max_concurrent: int
    max_staleness: int
    groups_per_step: int | None = None
    """Number of groups that one step consumes. If None, only concurrency is bounded."""
    surplus: int = 0
    """Number of groups that may be sampled in excess of the staleness bound (oversampling)."""
    accepted: int = 0
    """Number of groups that the run's steps have taken, or that wait to be taken."""
    running: int = 0
    """Running episodes that this gate admitted. `others` counts those that bypassed it: they only take up slots."""
    others: int = 0

    @property
    def slots(self) -> int:
        return self.max_concurrent - self.running - self.others

    def room(self, version: int) -> int:
        """Return how many more groups can be sampled so that none exceeds `max_staleness` when it is trained.

        With B = groups_per_step, step k consumes the groups [k B, (k + 1) B). A group sampled at `version` is fresh
        enough for the steps up to version + max_staleness, so at most (max_staleness + version + 1) B groups may exist.
        """
        if self.groups_per_step is None:
            return self.max_concurrent
        return (self.max_staleness + version + 1) * self.groups_per_step + self.surplus - (self.accepted + self.running)

    def capacity(self, version: int) -> int:
        """Return how many episodes may start now; 0 or less means none."""
        return min(self.slots, self.room(version))

    def begin_step(self, groups: int, version: int, waiting: int, surplus: int = 0) -> None:
        """Begin a step that takes `groups` groups.

        waiting: number of finished groups that were not yet taken. surplus: number of groups sampled beyond the bound.
        """
        self.groups_per_step, self.surplus = groups, surplus
        # All earlier steps count as taken in full. Recomputed in each step rather than summed up, so that a lost group
        # never shifts the bound permanently.
        self.accepted = version * groups + waiting

    def start(self, *, is_admitted: bool = True) -> None:
        self.running += is_admitted
        self.others += not is_admitted

    def finish(self, *, accepted: bool, is_admitted: bool = True) -> None:
        self.running -= is_admitted
        self.others -= not is_admitted
        self.accepted += accepted and is_admitted

    def take_back(self) -> None:
        """Remove a group from the count of accepted ones, because it was dropped."""
        self.accepted -= 1
