"""When another episode may start: the admission rule of asynchronous RL (AReaL, arXiv 2505.24298), as arithmetic.

Owns counts only. A version is a publication: it rises by one per step at most, however many updates a step has.
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
    surplus: int = 0
    """Groups that may be sampled beyond the bound; a step that is full does without the last ones."""
    accepted: int = 0
    """Groups of this run, taken or waiting to be."""
    running: int = 0
    """Episodes that were admitted; `others` run beside them and count for concurrency only."""
    others: int = 0

    @property
    def slots(self) -> int:
        return self.max_concurrent - self.running - self.others

    def room(self, version: int) -> int:
        """Return how many more groups can be sampled so that none is older than `max_staleness` when it is trained.

        Step k consumes groups [k B, (k + 1) B). A group sampled at `version` is young enough for the steps up to
        version + max_staleness, so at most (max_staleness + version + 1) B groups may exist.
        """
        if self.groups_per_step is None:
            return self.max_concurrent
        return (self.max_staleness + version + 1) * self.groups_per_step + self.surplus - (self.accepted + self.running)

    def capacity(self, version: int) -> int:
        """Return how many episodes may start now; 0 or less is none."""
        return min(self.slots, self.room(version))

    def begin_step(self, groups: int, version: int, waiting: int, surplus: int = 0) -> None:
        """A step will take so many groups; `waiting` are finished and not taken, `surplus` more may run beside them.

        All earlier steps count as taken in full: of a resumed run, and where an update was skipped and left the version
        as it was.
        """
        self.groups_per_step, self.surplus = groups, surplus
        # Counted anew in each step rather than added up, so that no lost or dropped group shifts the bound for good.
        self.accepted = version * groups + waiting

    def start(self, *, is_admitted: bool = True) -> None:
        self.running += is_admitted
        self.others += not is_admitted

    def finish(self, *, accepted: bool, is_admitted: bool = True) -> None:
        self.running -= is_admitted
        self.others -= not is_admitted
        self.accepted += accepted and is_admitted

    def take_back(self) -> None:
        """A group that was accepted is dropped after all."""
        self.accepted -= 1
