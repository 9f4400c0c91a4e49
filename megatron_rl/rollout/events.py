"""The events of each training prompt, told to whoever records it: a journal, a ledger, the dead letters."""

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
from megatron_rl.types import TrajectoryBatch
from megatron_rl.workflows.episode_engine import KeptReplies


@dataclass(kw_only=True, eq=False)
class Episode:
    """One prompt on its way. `number` orders the episodes of one kind by submission."""

    number: int
    data: dict[str, Any]
    """The prompt as it came, with `prompt_number`, `prompt_index` and `epoch` where an iterator made it, and its
    `sample_key`."""
    workflow: RolloutWorkflow
    queued_s: float = field(default_factory=time.monotonic)
    is_training: bool = True
    requeues: int = 0
    """Above 0 a batch waits for it rather than pass it over again."""
    version: int = 0
    """Policy version when it was started."""
    started_s: float = 0.0
    """On the monotonic clock."""
    replies: KeptReplies = field(default_factory=KeptReplies)
    """The replies that it has so far, until it has its group."""
    ending: asyncio.Task[None] | None = None
    """The task that ran it before it was recalled, which may not have ended."""
    outcome: asyncio.Future[Outcome] | None = None
    """Set where somebody waits for this very episode."""
    reward: float | None = None
    """The mean reward of its group, once it has one, also of one that a filter leaves out."""


@dataclass(kw_only=True)
class Outcome:
    """How an episode ended: `group` if accepted, `error` if failed, neither if rejected."""

    group: TrajectoryBatch | None = None
    error: BaseException | None = None

    @property
    def word(self) -> str:
        return "accepted" if self.group is not None else "rejected" if self.error is None else "failed"


class RolloutEvents:
    """Override what you need. Evaluations are not reported.

    Calls come on the rollout's event loop, one at a time and in the order of what happened: queued, started, then
    accepted and consumed, or rejected, or dead_lettered. A requeued prompt is started again. What a method raises ends
    the run: a record with gaps is none.
    """

    def queued(self, episode: Episode) -> None:
        """A new prompt waits for its turn."""

    def started(self, episode: Episode) -> None:
        """Its episode runs."""

    def accepted(self, episode: Episode, group: TrajectoryBatch) -> None:
        """The episode gave a group, which waits to be trained."""

    def requeued(self, episode: Episode, why: str) -> None:
        """Its group, or its episode, was dropped: the prompt waits for its turn again, before new ones."""

    def consumed(self, episodes: Sequence[Episode], version: int) -> None:
        """The trainer, at this policy version, takes the groups of these episodes as one batch, in this order."""

    def rejected(self, episode: Episode, why: str) -> None:
        """The workflow or a filter wants no group of this prompt; that was its last event."""

    def dead_lettered(self, episode: Episode, error: BaseException) -> None:
        """Every attempt failed, the last one with `error`; that was the prompt's last event."""


class DeadLetters(RolloutEvents):
    """The prompts that every attempt failed for, in a file: what to look at when a run skips some of its data.

    One JSON object per prompt: `time`, `error`, `traceback` and the `prompt` itself. RuntimeError, which ends the run,
    where it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

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
