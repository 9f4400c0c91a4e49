"""Status of a rollout process for viewers such as `megatron-rl watch`: status/rollout-N.json in the run's folder.

The file is replaced every few seconds. It counts the episodes in flight and shows only the slowest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.rollout.events import Episode
from megatron_rl.rollout.executor import RolloutExecutor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FOLDER = "status"
EVERY_S = 2.0
SLOWEST, TURNS, KINDS = 12, 2, 20
"""Maximum numbers of episodes shown, of replies shown per episode, and of kinds of failures shown."""
LETTERS, TOKENS = 300, 100
"""Maximum number of characters shown of a prompt or reply, and of tokens decoded for that."""


class StatusFile:
    """Writes the status file of one rollout process while its event loop runs."""

    def __init__(
        self,
        path: Path,
        executor: Callable[[], RolloutExecutor],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        version: Callable[[], int],
        servers: Callable[[], list[dict[str, Any]]],
    ) -> None:
        self.path, self._executor, self._tokenizer = path, executor, tokenizer
        self._version, self._servers = version, servers
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def begin(self) -> None:
        """Start writing. Does nothing if already started."""
        if self._task is None:
            self._closing.clear()
            self._task = asyncio.get_running_loop().create_task(self._write_on())

    async def close(self) -> None:
        """Stop writing, and record that the process has ended. May be called twice."""
        if self._task is not None:
            self._closing.set()
            await self._task  # not cancelled, as a write still running in a thread would overwrite the final status
            self._task = None
            self._write(self.status() | {"ended": True})

    def status(self) -> dict[str, Any]:
        """Return the status as JSON-compatible data. Call this on the event loop."""
        executor, now = self._executor(), time.monotonic()
        return {
            "time": time.time(),
            "pid": os.getpid(),
            "version": self._version(),
            "episodes": executor.state_counts(),
            "slowest": [self._episode(episode, now) for episode in executor.running[:SLOWEST]],
            "failures": dict(executor.failures.most_common(KINDS)),
            "servers": self._servers(),
            "ended": False,
        }

    def _episode(self, episode: Episode, now: float) -> dict[str, Any]:
        turns = episode.replies.newest(TURNS)
        return {
            "prompt": str(episode.data["sample_key"])[:LETTERS],
            "seconds": round(now - episode.started_s, 1),
            "version": episode.version,
            "replies": len(episode.replies),
            "turns": [{"tokens": reply.output_len, "text": self._text(reply.output_tokens)} for reply in turns],
        }

    def _text(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(tokens[-TOKENS:], skip_special_tokens=True))[-LETTERS:]

    async def _write_on(self) -> None:
        while not self._closing.is_set():
            # In a thread, so that a slow disk does not block the event loop.
            await asyncio.to_thread(self._write, self.status())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), EVERY_S)

    def _write(self, status: dict[str, Any]) -> None:
        unfinished = self.path.with_suffix(".unfinished")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(status), encoding="utf-8")
            os.replace(unfinished, self.path)
        except OSError as error:  # nothing depends on this file
            logger.warning("%s: %s; the run goes on without this file.", self.path, error)
