"""The ledger of prompts that a rollout rank has handed out and whose outcome is open.

With it, a resumed run takes every prompt exactly once, even with another number of rollout ranks. It takes the open
prompts first, then new ones. A prompt that is skipped because of its success rate counts as taken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.data.curriculum import Outcome, SuccessRates
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.rollout.events import Episode, RolloutEvents
from megatron_rl.rollout.journal import is_numbered


@dataclass(frozen=True)
class Share:
    """A rollout rank's part of the endless sequence of prompt numbers.

    A number n belongs to it if n modulo `period` is in range(first, end). A period is as long as a step has prompts, so
    that a rank's part of a step does not depend on how far ahead the rank samples.
    """

    period: int
    first: int
    end: int

    @classmethod
    def of_rank(cls, rank: int, ranks: int, *, per_step: int) -> Share:
        return cls(per_step, rank * per_step // ranks, (rank + 1) * per_step // ranks)

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Share:
        """Return the share that is stored in a ledger's state. In earlier versions, it was every `size`-th prompt."""
        if "size" in state:
            rank = state["next"] % state["size"]
            return cls(state["size"], rank, rank + 1)
        return cls(state["period"], state["first"], state["end"])

    def __len__(self) -> int:
        return self.end - self.first

    def __contains__(self, number: int) -> bool:
        return self.first <= number % self.period < self.end

    def following(self, number: int) -> int:
        """Return the number of this share that follows `number`, which must itself belong to the share."""
        return number + 1 if number + 1 in self else number + 1 + self.period - len(self)


class PromptLedger(RolloutEvents, Iterator[dict[str, Any]]):
    """Iterates over one rank's prompts, and notes which of them are open. An event closes a prompt.

    A prompt is identified by its number. It is open from when it is handed out until its group is consumed, or it is
    rejected or dead-lettered. With `rates`, prompts are skipped according to their success rates.
    """

    def __init__(self, prompts: PromptIterator, share: Share, rates: SuccessRates | None = None) -> None:
        self.prompts, self.share, self.rates = prompts, share, rates
        self.outcomes: list[Outcome] = []
        """Outcomes of closed prompts that were not yet added to `rates`."""
        self.passed_over = 0
        """Number of prompts skipped since the process started."""
        self._lock = threading.Lock()  # prompts are taken on the rollout's thread, the state by the trainer's calls
        self._again: list[int] = []
        self._undecided: set[int] = set()
        """Those numbers in `_again` that no earlier process has reached. This process decides whether to skip them."""
        self._next = share.first
        self._open: set[int] = set()

    def __next__(self) -> dict[str, Any]:
        with self._lock:
            while True:
                if self._again:  # an earlier process has already taken or skipped all but the undecided ones
                    number = self._again.pop(0)
                    is_decided = number not in self._undecided
                    self._undecided.discard(number)
                else:
                    number, is_decided = self._next, False
                    self._next = self.share.following(number)
                prompt = self.prompts.at(number)
                if is_decided or self.rates is None or self.rates.takes(prompt):
                    self._open.add(number)
                    return prompt
                self.passed_over += 1

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            numbers = {"open": sorted([*self._open, *self._again]), "undecided": sorted(self._undecided)}
            return numbers | {"next": self._next, "outcomes": list(self.outcomes)} | asdict(self.share)

    def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Add the outcomes of all ranks' prompts to the success rates, and remove them from `self.outcomes`."""
        assert self.rates is not None, "a run without rates has no outcomes"
        with self._lock:
            added = {number for number, *_ in outcomes}
            self.outcomes = [outcome for outcome in self.outcomes if outcome[0] not in added]
            self.rates.add(outcomes)

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Take over this rank's part of the prompts that the earlier run left open.

        states: the saved states of the ledgers of all that run's ranks.
        """
        # No rank has handed out a number from `base` on. Below it, each rank's share and `next` tell which ones.
        base = max(state["next"] for state in states)
        base += -base % self.share.period
        left = {number for state in states for number in state["open"]}
        undecided = {number for state in states for number in state.get("undecided", [])}
        for state in states:
            share = Share.of_state(state)
            undecided |= {number for number in range(state["next"], base) if number in share}
        self._again = sorted(number for number in left | undecided if number in self.share)
        self._undecided = undecided & set(self._again)
        self._next = base + self.share.first
        self._open = set()

    def consumed(self, episodes: Sequence[Episode], version: int) -> None:
        self._close(episodes)

    def rejected(self, episode: Episode, why: str) -> None:
        self._close([episode])

    def dead_lettered(self, episode: Episode, error: BaseException) -> None:
        self._close([episode])

    def _close(self, episodes: Sequence[Episode]) -> None:
        with self._lock:
            for episode in episodes:
                if is_numbered(episode.data):
                    number = episode.data["prompt_number"]
                    self._open.discard(number)
                    if self.rates is not None and episode.reward is not None:
                        self.outcomes.append((number, episode.data["prompt_index"], episode.reward))
