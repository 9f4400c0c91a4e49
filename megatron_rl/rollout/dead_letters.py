"""The prompts that every attempt failed for, in a file: what to look at when a run skips some of its data."""

from __future__ import annotations

import json
import traceback
from datetime import UTC, datetime
from pathlib import Path

from megatron_rl.rollout.events import Episode, RolloutEvents


class DeadLetters(RolloutEvents):
    """Appends one JSON object per prompt: `time`, `error`, `traceback` and the `prompt` itself.

    RuntimeError, which ends the run, where it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def dead_lettered(self, episode: Episode, error: BaseException) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "error": f"{type(error).__name__}: {error}",
            "traceback": "".join(traceback.format_exception(error)),
            "prompt": episode.data,
        }
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        except OSError as fault:
            raise RuntimeError(f"dead letters {self.path}: {fault}; make room on the disk and resume.") from fault
