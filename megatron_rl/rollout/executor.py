"""Keeps episodes in flight: starts them as the gate admits, retries failures, and hands out finished groups.

    queued ---> running ---> finished ---> trained
      ^            |  |         |
      |            |  |         |  its tokens became too old for the trainer
      +- requeued -+--|---------+
                      |
                      +---> rejected (the workflow or a filter wants no group), or dead (every attempt raised)

A running episode is requeued if a step is full without it. A dead prompt goes to the dead letters and is counted; it is
never trained with an invented reward. Everything here runs on one event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_rl.api import RequestRefused, RolloutWorkflow, Sampler, infrastructure_in
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.config.import_path import code_of
from megatron_rl.config.users_code import PACKAGE, words_of
from megatron_rl.rollout.events import Episode, Outcome, RolloutEvents
from megatron_rl.rollout.failure_rate import FailureRate
from megatron_rl.rollout.groups import (
    as_group,
    is_uniform,
    join_groups,
    mask_cut_off,
    mask_older,
    refuse_older,
    sampled_reward,
    trained_runs,
)
from megatron_rl.rollout.journal import NO_RECORDS, Records
from megatron_rl.rollout.staleness import AdmissionGate
from megatron_rl.rollout.workflow_form import begun, check_workflow
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics, is_counted
from megatron_rl.telemetry.spans import Spans
from megatron_rl.types import Trajectory, TrajectoryBatch
from megatron_rl.workflows.episode_engine import ENDING_S, EpisodeEngine, Retries, RunBroken
from megatron_rl.workflows.scoring import RewardTimeout

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
MOST_FAILED, MOST_REJECTED = 10, 100
"""Limits of failed and of rejected prompts per requested group. At a limit the call fails instead of using up the data
set. While no group has finished, the limit of failed prompts is 1."""


@dataclass(kw_only=True)
class Finished:
    """A finished group that waits to be trained."""

    episode: Episode
    group: TrajectoryBatch
    versions: range
    """Range from the oldest trained token's policy version to the newest. Empty if no token has a version."""
    decides: float
    """The group is dropped once versions up to this one are too old. Infinite if it never is."""

    @classmethod
    def of(cls, episode: Episode, group: TrajectoryBatch, stale: str) -> Finished:
        """stale: rollout.stale."""
        versions = trained_runs(group).values.tolist()
        ends = range(min(versions), max(versions) + 1) if versions else range(0)
        # With `mask`, a group that would be masked completely is dropped as well.
        decides = {"drop": ends.start, "mask": ends.stop - 1, "keep": math.inf}[stale] if ends else math.inf
        return cls(episode=episode, group=group, versions=ends, decides=decides)


class RolloutExecutor:
    """Runs the workflows of one engine. All methods must be called on the thread of one event loop."""

    def __init__(
        self,
        engine: Sampler,
        config: RolloutConfig,
        metrics: RolloutMetrics,
        events: Sequence[RolloutEvents] = (),
        spans: Spans | None = None,
        records: Records = NO_RECORDS,
        trained_as: GenerationConfig | None = None,
    ) -> None:
        """events: recorders of training prompts. records: earlier groups and replies, which are not generated again.

        trained_as: the run's sampling options, if known.
        """
        self._spans, self._records, self._trained_as = spans or Spans(), records, trained_as
        self._engine, self._config, self._metrics, self._events = engine, config, metrics, events
        self._gate = AdmissionGate(config.max_concurrent_episodes, config.max_staleness)
        # Queues of episodes to start. The gate admits those of `_queue`; a caller waits for each of the others.
        self._asked: deque[Episode] = deque()
        self._queue: deque[Episode] = deque()
        self._evaluations: deque[Episode] = deque()
        self._finished: list[Finished] = []
        self._running: dict[asyncio.Task[None], Episode] = {}
        self._resamples = 0
        self._progress = asyncio.Event()
        self._submitted = 0
        self._batches_at: tuple[int, int] = (-1, 0)
        self._failed = self._rejected = 0  # since the last batch, of admitted episodes
        self._first_error: BaseException | None = None
        self._fatal: str | None = None
        self._failure_rate = FailureRate(config.max_infrastructure_failures)
        self.failures: Counter[str] = Counter()
        """Counts by error type: failed tries of samples and episodes, and episodes given up after all tries."""

    # -- calls of the trainer

    async def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode. It starts when the AdmissionGate admits it."""
        check_workflow(workflow)
        self.raise_if_fatal()
        self._enqueue(data, workflow)
        self._start()

    async def wait(self, count: int, timeout_s: float | None = None) -> TrajectoryBatch:
        """Return the first `count` groups to finish. Among finished groups, older versions come first.

        After a TimeoutError the groups stay available. Raises RuntimeError if fewer than `count` groups can still
        finish.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._collect(count, refill=lambda: None)
        except TimeoutError as error:
            raise TimeoutError(
                f"rollout: {len(self._finished)} of {count} groups after {timeout_s:g} s; they are kept."
            ) from error

    async def prepare_batch(
        self, prompts: Iterator[dict[str, Any]], workflow: RolloutWorkflow, count: int
    ) -> TrajectoryBatch:
        """Return the next `count` groups, and leave as many more episodes in flight as the staleness bound admits.

        With max_staleness 0, exactly `count` episodes exist at a time (`count` * oversample with oversampling), and the
        batch is in prompt order.
        """
        check_workflow(workflow)
        # Extra episodes: the first `count` of all to finish make the step.
        surplus = math.ceil(count * self._config.oversample) - count
        self._gate.begin_step(count, self._engine.get_version(), waiting=len(self._finished), surplus=surplus)
        self._resamples = count * self._config.max_uniform_resamples

        is_synchronous = self._config.max_staleness == 0
        # Queue one step's prompts more than fit, so that they start as soon as the next version makes room.
        spare = 0 if is_synchronous else count
        # An asynchronous episode's step is unknown when it begins.
        step = f"version {self._engine.get_version()} " if is_synchronous else ""

        def refill() -> None:
            wanted = self._gate.room(self._engine.get_version()) + spare - len(self._queue)
            for data in itertools.islice(prompts, max(0, wanted)):
                self._enqueue(data, workflow, step=step)

        batch = await self._collect(count, refill=refill, in_order=is_synchronous)
        if surplus:
            self._recall()
        return batch

    async def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TrajectoryBatch:
        """Run one episode per prompt now, bypassing the gate, and return the groups in the order of `data`.

        Rejected and failed episodes are omitted. Raises RuntimeError, caused by the first error, if no episode
        succeeded.
        """
        return self._consume(await self._run_together("rollout_batch", self._asked, data, workflow))

    async def evaluate(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TrajectoryBatch:
        """Run one episode per prompt in slots that training leaves free. One slot is always available.

        The groups may span several versions. They are not reported to observers, counted for staleness or consumed.
        `prompt` holds each group's index in `data`, because some episodes may have failed.
        """
        finished = await self._run_together("evaluate", self._evaluations, data, workflow)
        for entry in finished:
            entry.group.sequences["prompt"] = torch.full((len(entry.group),), entry.episode.number)
        return join_groups([entry.group for entry in finished])

    async def _run_together(
        self, call: str, line: deque[Episode], data: list[dict[str, Any]], workflow: RolloutWorkflow
    ) -> list[Finished]:
        """Run one episode per prompt through the queue `line`. Return the accepted ones in the order of `data`."""
        if not data:
            raise ValueError(f"{call}: data = []; give at least one prompt.")
        check_workflow(workflow)
        self.raise_if_fatal()
        # The call's number is part of the seed's key, so that repeated prompts get new samples at the same version.
        version = self._engine.get_version()
        batch = self._batches_at[1] + 1 if self._batches_at[0] == version else 0
        self._batches_at = (version, batch)
        loop = asyncio.get_running_loop()
        episodes = [
            Episode(
                number=number,
                data={"sample_key": f"version {version} {sample_key(prompt, f'batch {batch} {number}')}"} | prompt,
                workflow=workflow,
                is_training=line is not self._evaluations,
                outcome=loop.create_future(),
            )
            for number, prompt in enumerate(data)
        ]
        for episode in episodes:
            for events in self._observers(episode):
                events.queued(episode)
        line.extend(episodes)
        self._start()
        outcomes = await asyncio.gather(*(episode.outcome for episode in episodes if episode.outcome is not None))
        pairs, stale = zip(episodes, outcomes, strict=True), self._config.stale
        accepted = [Finished.of(episode, out.group, stale) for episode, out in pairs if out.group is not None]
        if not accepted:
            errors = [outcome.error for outcome in outcomes if outcome.error is not None]
            raise RuntimeError(
                f"{call}: none of {len(data)} episodes gave trajectories ({len(errors)} failed "
                f"{self._config.episode_attempts} times, {len(data) - len(errors)} were rejected by the workflow)"
                + (f"; the first error was {words_of(errors[0])}" if errors else ".")
            ) from (errors[0] if errors else None)
        return accepted

    def notice_version(self) -> None:
        """Start the episodes that the gate admits after a rise of the policy version."""
        try:
            self._start()
        except Exception as error:  # an observer's; the trainer is not waiting here, and its next call raises
            self.fail(f"rollout: {type(error).__name__}: {error}")

    def fail(self, message: str) -> None:
        """Make every waiting and later call raise RuntimeError(message), because the rollout cannot continue."""
        self._fatal = self._fatal or message
        for task in self._running:
            task.cancel()
        for episode in [*self._asked, *self._evaluations]:
            self._abandon(episode)
        self._progress.set()

    # -- prompts

    def _enqueue(self, data: dict[str, Any], workflow: RolloutWorkflow, *, step: str = "") -> None:
        number, self._submitted = self._submitted, self._submitted + 1
        data = {"sample_key": sample_key(data, f"episode {number}", step)} | data
        episode = Episode(number=number, data=data, workflow=workflow)
        self._queue.append(episode)
        for events in self._events:
            events.queued(episode)

    @property
    def has_failed(self) -> bool:
        return self._fatal is not None

    def raise_if_fatal(self) -> None:
        """Raise RuntimeError if `fail` was called."""
        if self._fatal is not None:
            raise RuntimeError(self._fatal)

    # -- finished groups

    async def _collect(self, count: int, *, refill: Callable[[], None], in_order: bool = False) -> TrajectoryBatch:
        try:
            while True:
                self.raise_if_fatal()
                self._requeue_stale()
                refill()
                self._start()
                if len(self._finished) >= count and not self._is_due():
                    break
                self._raise_if_hopeless(count)
                # Nothing was awaited since `_finished` was checked, so no progress is missed in between.
                self._progress.clear()
                await self._progress.wait()
        finally:
            self._failed, self._rejected, self._first_error = 0, 0, None
        # First the groups that missed an earlier batch, then the oldest, which might be too old for the next batch.
        # Groups of the same age are taken in the order in which they finished.
        self._finished.sort(key=lambda finished: (-finished.episode.requeues, finished.versions.start))
        taken, self._finished = self._finished[:count], self._finished[count:]
        if in_order:
            taken.sort(key=lambda finished: finished.episode.number)
        return self._consume(taken)

    def _is_due(self) -> bool:
        """Return True while any running prompt was requeued before and would be too stale for a later batch.

        The current batch waits for such a prompt. Otherwise prompts with long replies would be sampled repeatedly and
        never trained.
        """
        oldest_allowed = self._engine.get_version() + 1 - self._config.max_staleness
        return any(episode.requeues and episode.version < oldest_allowed for episode in self._running.values())

    def _raise_if_hopeless(self, count: int) -> None:
        """Raise RuntimeError if too many prompts failed or were rejected, or too few are left for `count` groups."""
        if self._failed >= count * (MOST_FAILED if self._finished else 1):
            raise RuntimeError(
                f"rollout: {self._failed} episodes failed {self._config.episode_attempts} times each and "
                f"{len(self._finished) or 'none'} succeeded"
                + (f"; the first error was {words_of(self._first_error)}" if self._first_error is not None else ".")
            ) from self._first_error
        if self._rejected >= MOST_REJECTED * count:
            raise RuntimeError(
                f"rollout: {self._rejected} prompts were rejected on the way to {count} groups, of which "
                f"{len(self._finished)} are there; let the workflow accept more, or give it other prompts."
            )
        left = len(self._finished) + self._gate.running + len(self._queue)
        if left < count:
            raise RuntimeError(
                f"rollout: asked for {count} groups, but only {left} episodes are finished or under way "
                f"({self._failed} failed and {self._rejected} were rejected meanwhile); submit more."
            ) from self._first_error

    def _requeue_stale(self) -> None:
        """Drop the groups that are too stale to train at the current version, and requeue their prompts."""
        oldest_allowed = self._engine.get_version() - self._config.max_staleness
        dropped = [finished for finished in self._finished if finished.decides < oldest_allowed]
        if not dropped:  # this is called after every episode
            return
        self._finished = [finished for finished in self._finished if finished.decides >= oldest_allowed]
        for _ in dropped:
            self._gate.take_back()  # otherwise resampled prompts would count twice
        self._metrics.add(stale=len(dropped))
        why = f"its group holds tokens of versions before {oldest_allowed}"
        self._requeue([finished.episode for finished in dropped], why)

    def _recall(self) -> None:
        """Stop the episodes that the step did not wait for, and requeue their prompts for the next step."""
        recalled = [task for task, episode in self._running.items() if episode.outcome is None]
        for task in recalled:
            # The next start waits for this task to end: two tasks of one episode would append to the same replies.
            self._running[task].ending = task
            task.cancel()  # its result is ignored; the replies continue where they stopped
            self._gate.finish(accepted=False)
        self._requeue([self._running.pop(task) for task in recalled], "the step was full")

    def _requeue(self, episodes: list[Episode], why: str) -> None:
        """Put the episodes, in this order, at the front of the queue."""
        for episode in reversed(episodes):
            episode.queued_s, episode.requeues = time.monotonic(), episode.requeues + 1
            self._queue.appendleft(episode)
        for episode in episodes:
            for events in self._events:
                events.requeued(episode, why)

    def _consume(self, taken: list[Finished]) -> TrajectoryBatch:
        version = self._engine.get_version()
        if self._config.stale == "mask":
            # The version rises while a group waits, so its age is known only now.
            for finished in taken:
                masked = mask_older(finished.group, version - self._config.max_staleness)
                self._metrics.add(masked_tokens=masked)
        if all({"prompt_index", "epoch"} <= finished.episode.data.keys() for finished in taken):
            for finished in taken:
                place = finished.episode.data["prompt_index"]
                finished.group.sequences["prompt_index"] = torch.full((len(finished.group),), place)
        batch = join_groups([finished.group for finished in taken])
        runs = trained_runs(batch)
        if len(runs.values):
            ages = version - runs.values
            self._metrics.add(staleness=float((ages * runs.lengths.long()).sum()), aged_tokens=len(runs))
            self._metrics.at_least(staleness_max=float(ages.max()))
        for events in self._events:
            events.consumed([finished.episode for finished in taken], version)
        return batch

    # -- episodes

    @property
    def running(self) -> list[Episode]:
        """The running episodes, in the order in which they started."""
        return list(self._running.values())

    def state_counts(self) -> dict[str, int]:
        """Return the number of episodes in each state."""
        evaluations = sum(not episode.is_training for episode in self._running.values())
        return {
            "queued": len(self._queue) + len(self._asked),
            "running": len(self._running) - evaluations,
            "finished, not yet trained": len(self._finished),
            "evaluations queued": len(self._evaluations),
            "evaluations running": evaluations,
        }

    def _start(self) -> None:
        """Start as many episodes as there is room for."""
        while self._fatal is None and (episode := self._take_next()) is not None:
            self._gate.start(is_admitted=episode.outcome is None)
            episode.version, episode.started_s = self._engine.get_version(), time.monotonic()
            for events in self._observers(episode):
                events.started(episode)
            task = asyncio.get_running_loop().create_task(self._fly(episode))
            self._running[task] = episode
            task.add_done_callback(self._landed)

    def _take_next(self) -> Episode | None:
        """Return the episode to start next: first those that a caller waits for, then the queue, then evaluations."""
        if self._asked and self._gate.slots > 0:
            return self._asked.popleft()
        if self._queue and self._gate.capacity(self._engine.get_version()) > self._kept_free:
            return self._queue.popleft()
        if self._evaluations and self._gate.slots > 0:
            return self._evaluations.popleft()
        return None

    @property
    def _kept_free(self) -> int:
        """Slots that training leaves free for evaluations: 1 if evaluations wait and none is running, else 0."""
        is_waiting = bool(self._evaluations) and all(episode.is_training for episode in self._running.values())
        return int(is_waiting and self._config.max_concurrent_episodes > 1)

    def _observers(self, episode: Episode) -> Sequence[RolloutEvents]:
        return self._events if episode.is_training else ()

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved; `_fly` has reported it

    async def _fly(self, episode: Episode) -> None:
        is_counted.set(episode.is_training)  # for this task and those that it starts
        task = asyncio.current_task()
        try:
            with self._spans("episodes", str(episode.data["sample_key"]), evaluation=not episode.is_training) as span:
                outcome = await self._run(episode)
                span.args["outcome"] = outcome.word
            # `_recall` takes a task out of `_running` and requeues its prompt, so its result must not count.
            if task is None or self._running.pop(task, None) is None:
                return
            self._book(episode, outcome)
        except BaseException as error:
            if isinstance(error, Exception):  # an observer's; episodes' own errors are in the outcome
                self.fail(f"rollout: {type(error).__name__}: {error}")
            self._abandon(episode)
            raise
        if episode.outcome is not None:
            episode.outcome.set_result(outcome)
        self._progress.set()
        self._start()

    def _abandon(self, episode: Episode) -> None:
        if episode.outcome is not None and not episode.outcome.done():
            episode.outcome.set_exception(RuntimeError(self._fatal or "rollout: the episode was cancelled."))

    def _book(self, episode: Episode, outcome: Outcome) -> None:
        """Count how an episode ended, and keep the group if the gate had admitted the episode."""
        # An episode with a future has a waiting caller and did not pass the gate.
        is_admitted, group, error, why = episode.outcome is None, outcome.group, outcome.error, ""
        episode.reward = None if group is None else sampled_reward(group)
        if group is None and error is None:
            why = "the workflow returned None, or all that it returned was cut off"
        elif is_admitted and group is not None and self._resamples > 0 and is_uniform(group):
            self._resamples -= 1
            self._metrics.add(uniform=1)
            group, why = None, "all rewards are equal"
        self._gate.finish(is_admitted=is_admitted, accepted=group is not None)
        observers = self._observers(episode)
        if group is not None:
            self._metrics.add(accepted=1)
            if is_admitted:
                self._finished.append(Finished.of(episode, group, self._config.stale))
            for events in observers:
                events.accepted(episode, group)
        elif error is None:
            self._metrics.add(rejected=1)
            self._rejected += is_admitted
            for events in observers:
                events.rejected(episode, why)
        else:
            logger.warning("episode %d is given up: %s", episode.number, words_of(error))
            self._metrics.add(failed=1)
            self.failures[f"{type(error).__name__}, given up"] += 1
            if is_admitted:
                self._failed += 1
                self._first_error = self._first_error or error
            for events in observers:
                events.dead_lettered(episode, error)

    async def _run(self, episode: Episode) -> Outcome:
        """Run one episode to its end. Raises only if it is cancelled."""
        self._metrics.add(started=1, queue_wait_s=time.monotonic() - episode.queued_s)
        if episode.ending is not None and not episode.ending.done():
            await asyncio.wait([episode.ending], timeout=ENDING_S)

        async def before_retry(failures: int, error: BaseException) -> None:
            self._metrics.add(retried=1, rewards_late=isinstance(error, RewardTimeout))
            logger.info("episode %d: try %d failed (%s)", episode.number, failures, words_of(error))
            self.failures[type(error).__name__] += 1
            await asyncio.sleep(min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (failures - 1)))

        tries, version = self._config.episode_attempts, self._engine.get_version()
        if episode.is_training and (restored := self._records.group(episode.data, version)) is not None:
            return Outcome(group=restored)
        retries = Retries(most=tries, before=before_retry, after_try=self._count_try)
        record = self._records.of(episode.data) if episode.is_training else None
        for number in itertools.count(1):
            version = self._engine.get_version()
            engine = EpisodeEngine(
                self._engine,
                episode.replies,
                retries,
                record=record,
                oldest_allowed=self._oldest_kept,
                is_training=episode.is_training,
                trained_as=self._trained_as,
            )
            try:
                # Start each attempt with a copy, because a workflow may modify its data.
                data = dict(episode.data)
                try:
                    result = await engine.start(partial(begun, episode.workflow, engine, data))
                finally:
                    await engine.end()
                group = self._group_of(result, episode)
                # Replies kept from the journal or an earlier attempt may be older than this attempt.
                refuse_older(group, min(version, self._begun(episode)), self._config.max_staleness)
                engine.note(None)
                episode.replies.clear()
                return Outcome(group=group)
            # Workflows and rewards are user code and may raise anything; one episode must not end the run. A
            # CancelledError is the episode's own failure, unless this task was cancelled.
            except (Exception, asyncio.CancelledError) as raised:
                if _is_cancelled():
                    raise asyncio.CancelledError from raised
                error = first_of(raised)
            engine.note(error)
            if isinstance(error, RunBroken):
                self.fail(f"rollout: {error}")
            if number == tries or engine.is_lost or isinstance(error, RequestRefused | RunBroken):
                self._metrics.add(rewards_late=isinstance(error, RewardTimeout))
                episode.replies.clear()
                return Outcome(error=error)
            await before_retry(number, error)
        raise AssertionError("unreachable")

    def _count_try(self, error: BaseException | None) -> None:
        """Count how a try of a sample ended, and end the run if infrastructure has failed too many tries."""
        failure = infrastructure_in(error)
        if failure is not None:
            name = "rollout/infrastructure_failures"
            self._metrics.add(**{name: 1, f"{name}/{failure.kind}": 1})
        self._failure_rate.add(failure)
        if why := self._failure_rate.excess():
            self.fail(f"rollout: {why}")

    def _group_of(self, result: Any, episode: Episode) -> TrajectoryBatch | None:
        group = as_group(result, source=f"{name_of(episode.workflow)}, {episode.data['sample_key']}")
        return self._without_cut_off(group, result, episode) if isinstance(result, list) else group

    def _without_cut_off(
        self, group: TrajectoryBatch | None, result: list[Trajectory], episode: Episode
    ) -> TrajectoryBatch | None:
        """Count the trajectories that were cut off or split, and mask those cut off if rollout.cut_off is `mask`.

        Return None if nothing would then be trained.
        """
        splits = [trajectory.split for trajectory in result if trajectory.split]
        self._metrics.add(**{f"rollout/splits/{why}": splits.count(why) for why in set(splits)})
        count = sum(trajectory.is_cut_off for trajectory in result)
        masks = self._config.cut_off == "mask" and episode.is_training
        self._metrics.add(trajectories=len(result), cut_off=count, masked_cut_offs=count * masks)
        if group is None or not (masks and count):
            return group
        mask_cut_off(group, result)
        # Nothing of it would be trained, so another prompt replaces it.
        return group if bool(group["loss_mask"].any()) else None

    def _oldest_kept(self) -> int:
        """Return the oldest policy version whose tokens a reused reply may contain."""
        return self._engine.get_version() - self._config.max_staleness if self._config.stale == "drop" else 0

    def _begun(self, episode: Episode) -> int:
        """Return the policy version at which the episode's oldest kept reply began; the current one without replies."""
        return episode.replies.since if len(episode.replies) else self._engine.get_version()


def name_of(workflow: RolloutWorkflow) -> str:
    """Return the import path of a workflow's class, with file and line for user code."""
    code, path = code_of(workflow.arun_episode), f"{type(workflow).__module__}:{type(workflow).__qualname__}"
    is_theirs = code is not None and not code.co_filename.startswith(PACKAGE)
    return f"{path} at {code.co_filename}:{code.co_firstlineno}" if code is not None and is_theirs else path


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def first_of(error: BaseException) -> BaseException:
    """Unwrap exception groups, which a workflow's task groups raise, to the first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def sample_key(data: dict[str, Any], otherwise: str, step: str = "") -> str:
    """Return the name from which a prompt's sampling seeds are derived.

    If a prompt has an index in the data set, its name depends neither on the rank that runs it nor on what else that
    rank has run, such as an evaluation.
    """
    if "prompt_index" in data and "epoch" in data:
        return f"{step}prompt {data['epoch']}/{data['prompt_index']}"
    return otherwise
