"""The reuse buffer: solved groups that were trained, and that a rank may hand out again in addition to fresh ones.

Their tokens stay in the journal, and the buffer holds only their locations. Fresh groups are admitted, aged and counted
as they are without a buffer. Reused groups are appended to them and marked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import ReuseConfig
from megatron_rl.rollout.events import Episode, RolloutEvents
from megatron_rl.rollout.groups import is_uniform, reward_of_each
from megatron_rl.rollout.journal import Record, RolloutJournal, is_numbered
from megatron_rl.types import REUSED, TrajectoryBatch


@dataclass(frozen=True)
class Entry:
    """A group in the buffer: its prompt, the step that first trained it, and its location in the journal."""

    place: int
    """Index in the list of prompts."""
    step: int
    file: str
    start: int
    size: int


class ReuseBuffer(RolloutEvents):
    """One rollout rank's part of the run's reuse buffer. It must receive each event before its journal does.

    A group is solved if the best sample's reward is at least `solved_reward` and not all rewards are equal. Only the
    newest solved group of each prompt is kept. Groups older than `max_age_steps` are dropped, and if there are too
    many, the oldest.
    """

    def __init__(
        self, options: ReuseConfig, journal: RolloutJournal, folder: Path, *, seed: int, rank: int, ranks: int
    ) -> None:
        self.options, self.journal, self.folder = options, journal, folder
        self.seed, self.rank, self.ranks = seed, rank, ranks
        self.step = 0
        """Number of times that `draw` was called, which is the number of steps begun."""
        self.entries: list[Entry] = []  # oldest first
        self._solved: set[int] = set()  # numbers of prompts whose groups wait to be trained

    def draw(self) -> list[Entry]:
        """Begin a step and return the entries that it reuses. Call this before the step's own groups are consumed."""
        self.step += 1
        self.entries = [entry for entry in self.entries if self.step - entry.step <= self.options.max_age_steps]
        count = self.options.groups_per_step  # divided among all ranks
        own = (self.rank + 1) * count // self.ranks - self.rank * count // self.ranks
        drawn = random.Random(f"{self.seed} reuse {self.step} {self.rank}")
        return drawn.sample(self.entries, min(own, len(self.entries)))

    def read(self, entry: Entry) -> TrajectoryBatch:
        """Return the group as it was first trained. Raises RuntimeError if the journal no longer has it."""
        record = Record(event={}, path=self.folder / entry.file, start=entry.start, size=entry.size)
        if fault := record.fault():
            raise RuntimeError(
                f"reuse: {fault}, and the buffer has a group there; restore the file, or resume with "
                f"reuse.groups_per_step=0."
            )
        group = record.group()
        group.sequences["prompt_index"] = torch.full((len(group),), entry.place)
        return group

    def accepted(self, episode: Episode, group: TrajectoryBatch) -> None:
        if is_numbered(episode.data) and is_solved(group, self.options.solved_reward):
            self._solved.add(episode.data["prompt_number"])

    def consumed(self, episodes: Sequence[Episode], version: int) -> None:
        for episode in episodes:
            number = episode.data.get("prompt_number", -1)
            if number in self._solved:
                self._solved.remove(number)
                record, place = self.journal.record_of(number), episode.data["prompt_index"]
                self.entries = [entry for entry in self.entries if entry.place != place]
                self.entries.append(Entry(place, self.step, record.path.name, record.start, record.size))
        # Each rank's part is rounded up, so the total may exceed buffer_groups by up to one per rank.
        self.entries = self.entries[-max(1, -(-self.options.buffer_groups // self.ranks)) :]

    def requeued(self, episode: Episode, why: str) -> None:
        self._solved.discard(episode.data.get("prompt_number", -1))

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "step": self.step, "entries": [asdict(entry) for entry in self.entries]}

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Take over this rank's part of all ranks' entries.

        If the number of ranks has not changed, these are its own.
        """
        self.step = max((state["step"] for state in states), default=0)
        if sorted(state["rank"] for state in states) == list(range(self.ranks)):
            (own,) = (state["entries"] for state in states if state["rank"] == self.rank)
        else:
            together = [entry for state in states for entry in state["entries"]]
            own = sorted(together, key=lambda entry: (entry["step"], entry["place"]))[self.rank :: self.ranks]
        self.entries = [Entry(**entry) for entry in own]


def is_solved(group: TrajectoryBatch, solved_reward: float) -> bool:
    """Return True if the best sample has at least `solved_reward` and not all rewards are equal."""
    best = float(group.means_of_samples(reward_of_each(group)).max())
    return best >= solved_reward and not is_uniform(group)


def with_reused(batch: TrajectoryBatch, groups: Sequence[TrajectoryBatch]) -> TrajectoryBatch:
    """Append groups that an earlier step has trained to the batch.

    The column `is_reused` (int64) is 1 for them, else 0.
    """
    parts, fresh = [batch, *groups], int(batch["group"].max()) + 1
    batch.sequences[REUSED] = torch.zeros(len(batch), dtype=torch.int64)
    for number, group in enumerate(groups):
        group.sequences["group"] = torch.full((len(group),), fresh + number)
        group.sequences[REUSED] = torch.ones(len(group), dtype=torch.int64)
        if group.tokens.keys() != batch.tokens.keys() or group.sequences.keys() != batch.sequences.keys():
            raise RuntimeError(
                f"reuse: a group of the buffer has the keys {sorted(group.tokens)} and {sorted(group.sequences)}, and "
                f"those of now {sorted(batch.tokens)} and {sorted(batch.sequences)}; resume with "
                f"reuse.groups_per_step=0, or with the workflow as it was."
            )
    return TrajectoryBatch.cat(parts)


def is_buffer(state: Any) -> bool:
    """Return whether `state` has the form of a result of ReuseBuffer.state_dict."""
    if not (isinstance(state, dict) and isinstance(state.get("entries"), list)):
        return False
    types = {"place": int, "step": int, "file": str, "start": int, "size": int}
    for entry in state["entries"]:
        if not isinstance(entry, dict) or {key: type(value) for key, value in entry.items()} != types:
            return False
    return all(type(state.get(name)) is int for name in ("rank", "step"))
