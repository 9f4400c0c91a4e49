"""Events of training prompts, for recorders such as the journal, the ledger and the dead letters."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_rl.api import RolloutWorkflow
from megatron_rl.config.users_code import words_of
from megatron_rl.rollout.kept_replies import KeptReplies
from megatron_rl.types import TrajectoryBatch


@dataclass(kw_only=True, eq=False)
class Episode:
    """One prompt in progress.

    number: the prompt's index among all queued training prompts, or in the list that was passed to rollout_batch or
    evaluate.
    """

    number: int
    data: dict[str, Any]
    """The prompt's data with its `sample_key`. PromptIterator also adds `prompt_number`, `prompt_index` and `epoch`."""
    workflow: RolloutWorkflow
    queued_s: float = field(default_factory=time.monotonic)
    is_training: bool = True
    requeues: int = 0
    """Number of times that the prompt was requeued. If this is above 0, the next batch waits for the episode instead of
    skipping it again."""
    version: int = 0  # at the start
    started_s: float = 0.0  # monotonic
    replies: KeptReplies = field(default_factory=KeptReplies)
    """The episode's replies so far. They are cleared when the episode ends."""
    ending: asyncio.Task[None] | None = None
    """Task of the episode's previous start, if that was recalled (stopped and requeued). It may not have ended yet."""
    outcome: asyncio.Future[Outcome] | None = None
    """Future of the outcome, if a caller waits for this episode; otherwise None."""
    reward: float | None = None
    """Mean reward of the episode's group once it exists, even if a filter then discards the group."""


@dataclass(kw_only=True)
class Outcome:
    """How an episode ended. `group` is set if it was accepted, `error` if it failed, and neither if it was rejected."""

    group: TrajectoryBatch | None = None
    error: BaseException | None = None

    @property
    def word(self) -> str:
        return "accepted" if self.group is not None else "rejected" if self.error is None else "failed"


class RolloutEvents:
    """Base class of recorders, which override the methods of the events that they need. Evaluations are not reported.

    The methods are called on the rollout's event loop, one at a time and in order. A prompt is first queued and
    started. Then it is either accepted and consumed, or rejected, or dead_lettered. A requeued prompt is started again.
    An exception in a method ends the run, because a record with gaps is useless.
    """

    def queued(self, episode: Episode) -> None:
        """Note a new prompt that waits for its start."""

    def started(self, episode: Episode) -> None:
        """Note the start of an episode."""

    def accepted(self, episode: Episode, group: TrajectoryBatch) -> None:
        """Note that an episode gave a group, which now waits to be trained."""

    def requeued(self, episode: Episode, why: str) -> None:
        """Note that the group or the running episode was dropped. The prompt returns to the front of the queue."""

    def consumed(self, episodes: Sequence[Episode], version: int) -> None:
        """Note that the trainer, at this policy version, takes these episodes' groups as one batch, in this order."""

    def rejected(self, episode: Episode, why: str) -> None:
        """Note that the workflow or a filter discards the prompt. This is its last event."""

    def dead_lettered(self, episode: Episode, error: BaseException) -> None:
        """Note that every attempt at the episode failed, the last one with `error`. This is the prompt's last event."""


class DeadLetters(RolloutEvents):
    """Writes the prompts that failed in every attempt to a file. Raises RuntimeError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def dead_lettered(self, episode: Episode, error: BaseException) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "error": words_of(error),
            "traceback": "".join(traceback.format_exception(error)),
            "prompt": episode.data,
        }
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        except OSError as fault:
            raise RuntimeError(f"dead letters {self.path}: {fault}; make room on the disk and resume.") from fault
