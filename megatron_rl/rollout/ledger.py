"""Which prompts a rollout rank has handed out and not heard the end of, where they are not taken strictly in order.

With it a resumed run, of any number of rollout ranks, takes up every prompt exactly once: those that were open, then
those that come next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rl.data.prompts import PromptIterator
from megatron_rl.rollout.events import Episode, RolloutEvents
from megatron_rl.rollout.journal import is_indexed


class PromptLedger(RolloutEvents, Iterator[dict[str, Any]]):
    """Iterates over one rank's prompts, every `size`-th one, and closes those that were consumed or given up.

    A prompt has a number: its place in the endless order of PromptIterator. It is open while its group waits, too.
    """

    def __init__(self, prompts: PromptIterator, *, rank: int, size: int) -> None:
        self.prompts, self.rank, self.size = prompts, rank, size
        self._lock = threading.Lock()  # prompts are taken on the rollout's thread, the state by the trainer's calls
        self._again: list[int] = []
        self._next = rank
        self._open: dict[tuple[int, int], int] = {}

    def __next__(self) -> dict[str, Any]:
        with self._lock:
            if self._again:
                number = self._again.pop(0)
            else:
                number, self._next = self._next, self._next + self.size
            prompt = self.prompts.at(number)
            self._open[prompt["epoch"], prompt["prompt_index"]] = number
            return prompt

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers that are open, and the one that is next."""
        with self._lock:
            return {"open": sorted([*self._open.values(), *self._again]), "next": self._next, "size": self.size}

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Take this rank's part of what all ranks of the earlier process left."""
        base = max(state["next"] for state in states)
        base += -base % self.size
        left = {number for state in states for number in state["open"]}
        left |= {number for state in states for number in range(state["next"], base, state["size"])}
        self._again, self._next = sorted(left)[self.rank :: self.size], base + self.rank
        self._open = {}

    def consumed(self, episodes: Sequence[Episode], version: int) -> None:
        for episode in episodes:
            self._close(episode)

    def rejected(self, episode: Episode, why: str) -> None:
        self._close(episode)

    def dead_lettered(self, episode: Episode, error: BaseException) -> None:
        self._close(episode)

    def _close(self, episode: Episode) -> None:
        if is_indexed(episode.data):
            with self._lock:
                self._open.pop((episode.data["epoch"], episode.data["prompt_index"]), None)
