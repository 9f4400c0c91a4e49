"""When another episode may start: the admission rule of asynchronous RL (AReaL, arXiv 2505.24298), as arithmetic.

Owns counts only. The version must rise by one per step of `groups_per_step` groups, or the bound means something else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AdmissionGate:
    """Counts of the episodes of one executor, and how many more the bounds admit."""

    max_concurrent: int
    max_staleness: int
    groups_per_step: int | None = None
    """Groups that one step consumes; None bounds concurrency only."""
    accepted: int = 0
    """Episodes that gave a group, since step 0."""
    running: int = 0

    def room(self, version: int) -> int:
        """Return how many more groups can be sampled so that none is older than `max_staleness` when it is trained.

        Step k consumes groups [k B, (k + 1) B). A group sampled at `version` is young enough for the steps up to
        version + max_staleness, so at most (max_staleness + version + 1) B groups may exist.
        """
        if self.groups_per_step is None:
            return self.max_concurrent
        return (self.max_staleness + version + 1) * self.groups_per_step - (self.accepted + self.running)

    def capacity(self, version: int) -> int:
        """Return how many episodes may start now; 0 or less is none."""
        return min(self.max_concurrent - self.running, self.room(version))

    def begin_steps(self, groups_per_step: int, version: int) -> None:
        """Set the size of a step. A gate that has accepted nothing takes the groups of earlier steps as accepted."""
        if self.groups_per_step is None:
            self.accepted = max(self.accepted, version * groups_per_step)
        self.groups_per_step = groups_per_step

    def start(self) -> None:
        self.running += 1

    def finish(self, *, accepted: bool) -> None:
        self.running -= 1
        self.accepted += accepted
