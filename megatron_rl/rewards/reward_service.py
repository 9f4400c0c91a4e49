"""Computes rewards in a bounded number of worker processes.

If a call times out, is cancelled or returns an invalid answer, its worker is killed with all processes it started.
Another worker takes its place (worker_pool.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import orjson

from megatron_rl.api import InfrastructureFailure
from megatron_rl.config.import_path import refuse_while_importing
from megatron_rl.rewards.call_queue import CallQueue
from megatron_rl.rewards.faults import as_score
from megatron_rl.rewards.worker_pool import WorkerDied, WorkerPool
from megatron_rl.telemetry import stats_tracker

SYNCHRONOUS_S = 60.0
"""Time limit of a reward that a workflow calls without awaiting it."""
WORKER_MEMORY_BYTES = 4 << 30


class RewardTimeout(InfrastructureFailure):
    """A reward exceeded its deadline."""

    KIND = "reward"


class RewardFailed(RuntimeError):
    """A reward function raised. The episode then fails; it never gets a reward of 0 for this.

    reward: the reward's name. place: file:line in its code.
    """

    def __init__(self, message: str, reward: str = "", place: str = "") -> None:
        super().__init__(message)
        self.reward, self.place = reward, place

    @staticmethod
    def by(error: str, reward: str, place: str, kind: str = "") -> RewardFailed:
        """Return the exception for an error that a reward raised. kind: kind of infrastructure failure, or empty."""
        message = f"{error} (reward {reward}{f', {place}' if place else ''})"
        if not kind:
            return RewardFailed(message, reward, place)
        lost = RewardLost(message, reward, place)
        lost.kind = kind
        return lost


class RewardLost(RewardFailed, InfrastructureFailure):
    """A reward's process died, or the reward lost the infrastructure it depends on."""

    KIND = "reward"


class WorkersTraceback(Exception):
    """A worker's traceback, set as the cause of the error raised to the caller."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Score:
    """A reward's value, or its parts' values by name, and the time that it took."""

    value: float | dict[str, float]
    seconds: float


class RewardService:
    """Worker processes that compute all rewards of a reply in one call, from any thread and event loop.

    service = RewardService([("right", "megatron_rl.rewards:exact_match", {})], workers=4)
    arguments = {"prompt": "3+4=", "completions": "7", "prompt_ids": [], "completion_ids": [], "answer": "7"}
    [score] = await service.call(arguments, timeout_s=10.0)  # score.value == 1.0
    service.close()
    """

    def __init__(
        self,
        rewards: Sequence[tuple[str, str, dict[str, Any]]],
        *,
        workers: int,
        import_from: list[str] | None = None,
        stacks: int | None = None,
    ) -> None:
        """rewards: name, import path and further arguments of each. stacks: an open file for `show_stacks`."""
        refuse_while_importing("a reward service")
        self.count, self.name = len(rewards), f"reward {', '.join(name for name, _, _ in rewards)}"
        self.pool = WorkerPool(
            "reward",
            "megatron_rl.rewards.worker:computing",
            {"rewards": list(rewards), "import_from": import_from},
            workers=workers,
            memory_bytes=WORKER_MEMORY_BYTES,
            stacks=stacks,
        )
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, CallQueue] = WeakKeyDictionary()
        self.show_stacks, self.close = self.pool.show_stacks, self.pool.close

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> list[Score]:
        """Compute the rewards of one reply. The time limit starts once a worker is free.

        RewardTimeout if the worker takes longer than `timeout_s`, RewardLost if it dies, RewardFailed if a reward
        raises an exception.
        """
        frame, loop = self.pool.frame(arguments), asyncio.get_running_loop()
        if (queue := self._queues.get(loop)) is None:
            queue = self._queues[loop] = CallQueue(self.pool)
        with self._named_errors(timeout_s):
            content = await queue.ask(frame, timeout_s)
        scores = self._scores(content)
        queue.note(sum(score.seconds for score in scores))
        return scores

    def call_now(self, arguments: dict[str, Any], timeout_s: float = SYNCHRONOUS_S) -> list[Score]:
        """Compute the rewards of one reply as `call` does, but block until they are there (see WorkerPool.ask_now)."""
        with self._named_errors(timeout_s):
            content = self.pool.ask_now(self.pool.frame(arguments), timeout_s)
        return self._scores(content)

    @contextmanager
    def _named_errors(self, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise RewardTimeout(
                f"{self.name}: no reward within {timeout_s:g} s, and its worker was killed. Make it faster, or raise "
                f"the workflow's reward_timeout_s."
            ) from error
        except WorkerDied as error:
            raise RewardLost(f"{self.name}: {error}") from error

    def _scores(self, content: bytes) -> list[Score]:
        """Parse and validate a worker's answer, whose form is not trusted."""
        try:
            answer = orjson.loads(content)
            if "error" in answer:
                name, words, where, place, kind = map(str, answer["error"])
                raise RewardFailed.by(words, name, place, kind) from WorkersTraceback(where)
            scores = [Score(as_score(value), float(seconds)) for value, seconds in answer["values"]]
            logged = {name: (float(total), float(count)) for name, (total, count) in answer["logged"].items()}
        except (AttributeError, ValueError, TypeError, KeyError) as error:
            raise RewardFailed(f"{self.name}: its worker gave no answer that can be read.") from error
        if len(scores) != self.count:
            raise RewardFailed(f"{self.name}: its worker gave {len(scores)} values.")
        stats_tracker.add(logged)
        return scores
