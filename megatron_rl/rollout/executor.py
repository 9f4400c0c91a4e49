"""Keeps episodes in flight: starts them as the admission gate allows, retries what fails, hands out finished groups.

Episodes run on the engine's event loop; the public methods are for the trainer's thread. An episode ends accepted (a
group of trajectories), rejected (its workflow returned None) or failed (every attempt raised); failed prompts are given
up and counted, never trained with a made-up reward.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from megatron_rl.api import InferenceEngine, RolloutWorkflow
from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.event_loop import EventLoopThread
from megatron_rl.rollout.server_client import RequestRefused
from megatron_rl.rollout.staleness import AdmissionGate
from megatron_rl.rollout.tally import Tally
from megatron_rl.types import Trajectory, TrajectoryBatch

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0


@dataclass(kw_only=True)
class Episode:
    """One prompt on its way. `number` orders the episodes by submission."""

    number: int
    data: dict[str, Any]
    workflow: RolloutWorkflow
    created_s: float


@dataclass(kw_only=True)
class Outcome:
    """How an episode ended: `group` if accepted, `error` if failed, neither if rejected."""

    number: int
    group: TrajectoryBatch | None = None
    error: BaseException | None = None


class RolloutExecutor:
    """Runs the workflows of one engine. `_changed` guards everything that both threads touch."""

    def __init__(self, engine: InferenceEngine, thread: EventLoopThread, config: RolloutConfig, tally: Tally) -> None:
        self._engine, self._thread, self._config, self._tally = engine, thread, config, tally
        self._changed = threading.Condition()
        self._gate = AdmissionGate(config.max_concurrent_episodes, config.max_staleness)
        self._slots = asyncio.Semaphore(config.max_concurrent_episodes)
        self._queue: deque[Episode] = deque()
        self._finished: deque[Outcome] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submitted = 0
        self._batches_at: tuple[int, int] = (-1, 0)
        self._failed = self._rejected = 0
        self._first_error: BaseException | None = None
        self._fatal: str | None = None

    # -- the trainer's thread

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode; it starts when the gate admits it."""
        with self._changed:
            self._raise_if_fatal()
            self._enqueue(data, workflow)
        self._thread.loop.call_soon_threadsafe(self._start_admitted)

    def wait(self, count: int, timeout_s: float | None = None) -> TrajectoryBatch:
        """Return the first `count` groups to finish, in that order.

        TimeoutError leaves them where they are. RuntimeError if so few episodes remain that `count` cannot be reached.
        """
        return self._collect(count, timeout_s, refill=lambda: None)

    def prepare_batch(
        self, prompts: Iterator[dict[str, Any]], workflow: RolloutWorkflow, count: int
    ) -> TrajectoryBatch:
        """Return the next `count` groups, and leave in flight as many more as the staleness bound admits.

        With max_staleness 0 exactly `count` episodes exist at a time, and the batch is in the order of the prompts.
        """
        with self._changed:
            self._gate.begin_steps(count, self._engine.get_version())

        def refill() -> None:
            for _ in range(self._gate.room(self._engine.get_version()) - len(self._queue)):
                self._enqueue(next(prompts), workflow)
            self._thread.loop.call_soon_threadsafe(self._start_admitted)

        return self._collect(count, None, refill=refill, in_order=self._config.max_staleness == 0)

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TrajectoryBatch:
        """Run one episode per prompt now, whatever the gate says, and return the groups in the order of `data`.

        Rejected and failed episodes are left out. RuntimeError if all failed, from the first cause.
        """
        if not data:
            raise ValueError("rollout_batch: data = []; give at least one prompt.")
        version = self._engine.get_version()
        with self._changed:
            self._raise_if_fatal()
            batch = self._batches_at[1] + 1 if self._batches_at[0] == version else 0
            self._batches_at = (version, batch)
        now = time.monotonic()
        episodes = [
            Episode(
                number=number,
                data={"sample_key": f"version {version} {sample_key(prompt, f'batch {batch} {number}')}"} | prompt,
                workflow=workflow,
                created_s=now,
            )
            for number, prompt in enumerate(data)
        ]
        try:
            outcomes = self._thread.run(self._run_all(episodes))
        except CancelledError:
            raise RuntimeError(self._fatal or "rollout_batch: the engine was destroyed while it ran.") from None
        groups = [outcome.group for outcome in outcomes if outcome.group is not None]
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if not groups:
            raise RuntimeError(
                f"rollout_batch: none of {len(data)} episodes gave trajectories ({len(errors)} failed "
                f"{self._config.episode_attempts} times, {len(data) - len(errors)} were rejected by the workflow)"
                + (f"; the first error was {type(errors[0]).__name__}: {errors[0]}" if errors else ".")
            ) from (errors[0] if errors else None)
        return self._consume(groups)

    def notice_version(self) -> None:
        """The policy version rose: start what the gate admits now."""
        self._thread.loop.call_soon_threadsafe(self._start_admitted)

    def fail(self, message: str) -> None:
        """Make every waiting and later call raise RuntimeError(message): the world cannot go on. From any thread."""
        with self._changed:
            self._fatal = self._fatal or message
            self._changed.notify_all()
        self._thread.loop.call_soon_threadsafe(self._cancel_all)

    # -- shared

    def _enqueue(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        number, self._submitted = self._submitted, self._submitted + 1
        data = {"sample_key": sample_key(data, f"episode {number}")} | data
        self._queue.append(Episode(number=number, data=data, workflow=workflow, created_s=time.monotonic()))

    def _raise_if_fatal(self) -> None:
        if self._fatal is not None:
            raise RuntimeError(self._fatal)

    def _collect(self, count: int, timeout_s: float | None, *, refill: Any, in_order: bool = False) -> TrajectoryBatch:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            failed, rejected = self._failed, self._rejected
            self._first_error = None
            while True:
                self._raise_if_fatal()
                if len(self._finished) >= count:
                    break
                failures = self._failed - failed
                if failures >= count and not self._finished:
                    # Without this, a broken reward function would burn the whole data set.
                    raise RuntimeError(
                        f"rollout: {failures} episodes failed {self._config.episode_attempts} times each and none "
                        f"succeeded; the first error was {type(self._first_error).__name__}: {self._first_error}"
                    ) from self._first_error
                refill()
                left = len(self._finished) + self._gate.running + len(self._queue)
                if left < count:
                    raise RuntimeError(
                        f"rollout: asked for {count} groups, but only {left} episodes are finished or under way "
                        f"({failures} failed and {self._rejected - rejected} were rejected meanwhile); submit more."
                    ) from self._first_error
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise TimeoutError(
                        f"rollout: {len(self._finished)} of {count} groups after {timeout_s:g} s; they are kept."
                    )
                self._changed.wait(remaining)
            taken = [self._finished.popleft() for _ in range(count)]
        if in_order:
            taken.sort(key=lambda outcome: outcome.number)
        return self._consume([outcome.group for outcome in taken if outcome.group is not None])

    def _consume(self, groups: list[TrajectoryBatch]) -> TrajectoryBatch:
        batch = join_groups(groups)
        ages = self._engine.get_version() - batch["versions"][batch["loss_mask"] & (batch["versions"] >= 0)]
        if len(ages):
            self._tally.add(staleness=float(ages.sum()), aged_tokens=len(ages))
            self._tally.at_least(staleness_max=float(ages.max()))
        return batch

    # -- the event loop's thread

    def _start_admitted(self) -> None:
        with self._changed:
            while self._queue and self._fatal is None and self._gate.capacity(self._engine.get_version()) > 0:
                self._gate.start()
                self._spawn(self._run_gated(self._queue.popleft()))

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run_gated(self, episode: Episode) -> None:
        outcome = await self._run(episode)
        with self._changed:
            self._gate.finish(accepted=outcome.group is not None)
            if outcome.group is not None:
                self._finished.append(outcome)
            elif outcome.error is None:
                self._rejected += 1
            else:
                self._failed += 1
                self._first_error = self._first_error or outcome.error
            self._changed.notify_all()
        self._start_admitted()

    async def _run_all(self, episodes: list[Episode]) -> list[Outcome]:
        return await asyncio.gather(*(self._spawn(self._run(episode)) for episode in episodes))

    async def _run(self, episode: Episode) -> Outcome:
        """Run one episode to its end; never raises but when cancelled."""
        async with self._slots:
            self._tally.add(started=1, queue_wait_s=time.monotonic() - episode.created_s)
            for attempt in range(1, self._config.episode_attempts + 1):
                try:
                    group = as_group(await episode.workflow.arun_episode(self._engine, dict(episode.data)))
                except RequestRefused as refusal:
                    error: BaseException = refusal
                    break
                # Workflows and rewards are the user's code and may raise anything; one episode must not end the run.
                except Exception as raised:
                    error = raised
                    if attempt < self._config.episode_attempts:
                        self._tally.add(retried=1)
                        delay_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (attempt - 1))
                        what = f"{type(raised).__name__}: {raised}"
                        logger.info("episode %d: attempt %d failed (%s)", episode.number, attempt, what)
                        await asyncio.sleep(delay_s)
                else:
                    self._tally.add(accepted=group is not None, rejected=group is None)
                    return Outcome(number=episode.number, group=group)
            self._tally.add(failed=1)
            logger.warning("episode %d is given up: %s: %s", episode.number, type(error).__name__, error)
            return Outcome(number=episode.number, error=error)


def sample_key(data: dict[str, Any], otherwise: str) -> str:
    """Name a prompt for the derivation of its sampling seeds.

    A prompt that knows its place in the data set has a name that does not depend on which rank runs it, nor on what
    else that rank has run, such as an evaluation.
    """
    if "prompt_index" in data and "epoch" in data:
        return f"prompt {data['epoch']}/{data['prompt_index']}"
    return otherwise


def as_group(result: Any) -> TrajectoryBatch | None:
    """Turn what a workflow returned into a batch of one group; None for a rejected prompt."""
    if result is None:
        return None
    if isinstance(result, list):
        strangers = [type(entry).__name__ for entry in result if not isinstance(entry, Trajectory)]
        if strangers:
            raise TypeError(f"arun_episode returned a list with {strangers[0]}; every entry must be a Trajectory.")
        return TrajectoryBatch.from_trajectories([result]) if result else None
    if isinstance(result, (Mapping, TensorDict)):
        batch = TrajectoryBatch.from_padded(result)
        batch.sequences["group"].zero_()
        return batch
    raise TypeError(
        f"arun_episode returned {type(result).__name__}; must return a list of Trajectory, a padded TensorDict or None."
    )


def join_groups(groups: list[TrajectoryBatch]) -> TrajectoryBatch:
    """Join batches of one group each; `group` numbers them from 0 in the given order."""
    first = groups[0]
    for number, group in enumerate(groups):
        if group.tokens.keys() != first.tokens.keys() or group.sequences.keys() != first.sequences.keys():
            raise RuntimeError(
                f"group {number} has the keys {sorted(group.tokens)} and {sorted(group.sequences)}, group 0 "
                f"{sorted(first.tokens)} and {sorted(first.sequences)}; every episode must return the same ones."
            )
        group.sequences["group"].fill_(number)
    return TrajectoryBatch.cat(groups)
