"""Keeps episodes in flight: starts them as the gate admits, retries failures, and hands out finished groups.

    queued ---> running ---> finished ---> trained
      ^            |  |         |
      |            |  |         |  its tokens became too old for the trainer
      +- requeued -+--|---------+
                      |
                      +---> rejected (the workflow or a filter wants no group), or dead (every attempt raised)

A running episode is requeued if a step is complete without it. A dead prompt goes to the dead letters and is counted;
it is never trained with an invented reward. Everything here runs on one event loop, so nothing needs a lock.

This table shows who retries, and what is kept:

    what fails                  who tries again                     at most                     kept
    a request to a server       SamplingClient, another server      4 times                     tokens so far
    one sample of an episode    EpisodeEngine, this sample alone    rollout.episode_attempts    replies
    all else in a workflow      RolloutExecutor, the episode        rollout.episode_attempts    replies
    the process                 the next process, from its journal  rollout.journal_replies     whole replies, steps
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Concatenate

import torch

from megatron_rl.api import P, RequestRefused, RolloutWorkflow, Sampler, T, infrastructure_in
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.config.users_code import words_of
from megatron_rl.rollout.events import Episode, Outcome, RolloutEvents
from megatron_rl.rollout.failure_rate import FailureRate
from megatron_rl.rollout.finished import Finished, FinishedGroups
from megatron_rl.rollout.groups import (
    as_group,
    is_uniform,
    join_groups,
    refuse_older,
    sampled_reward,
    without_cut_off,
)
from megatron_rl.rollout.journal import NO_RECORDS, JournaledEpisode, Records
from megatron_rl.rollout.kept_replies import check_sampling, continuing, request_name
from megatron_rl.rollout.staleness import AdmissionGate
from megatron_rl.rollout.workflow_form import begun, check_workflow, name_of
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics, is_counted
from megatron_rl.telemetry.spans import Spans
from megatron_rl.types import LLMRequest, LLMResponse, TrajectoryBatch
from megatron_rl.workflows.attempt import ENDING_S, Attempt, AttemptOver, RunBroken, current_attempt
from megatron_rl.workflows.scoring import RewardTimeout

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0


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
        """events: recorders that are told what happens to each training prompt.

        records: groups and replies of earlier processes, which are not generated again.

        trained_as: the run's sampling options, if known.
        """
        self._spans, self._records, self.trained_as = spans or Spans(), records, trained_as
        self.engine, self.config, self._metrics, self._events = engine, config, metrics, events
        self._gate = AdmissionGate(config.max_concurrent_episodes, config.max_staleness)
        # Queues of episodes to start. The gate admits those of `_queue`; a caller waits for each of the others.
        self._asked: deque[Episode] = deque()
        self._queue: deque[Episode] = deque()
        self._evaluations: deque[Episode] = deque()
        self._finished = FinishedGroups(config, metrics)
        self._running: dict[asyncio.Task[None], Episode] = {}
        self._resamples = 0
        self._progress = asyncio.Event()
        self._submitted = 0
        self._batches_at: tuple[int, int] = (-1, 0)
        self._fatal: str | None = None
        self._failure_rate = FailureRate(config.max_infrastructure_failures)
        self.failures: Counter[str] = Counter()
        """Counts of failures by error type: failed tries of samples and episodes, and episodes given up after their
        last try."""

    # -- calls of the trainer

    async def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode. It starts once the AdmissionGate admits it."""
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
                while True:
                    self._requeue_stale()
                    self._start()
                    if self._is_complete(count):
                        break
                    await self._progress.wait()
        except TimeoutError as error:
            raise TimeoutError(
                f"rollout: {len(self._finished)} of {count} groups after {timeout_s:g} s; they are kept."
            ) from error
        finally:
            self._finished.forget_failures()
        return self._consume(self._finished.take(count))

    async def prepare_batch(
        self, prompts: Iterator[dict[str, Any]], workflow: RolloutWorkflow, count: int
    ) -> TrajectoryBatch:
        """Return the next `count` groups. More episodes stay in flight, as many as the staleness bound admits.

        If max_staleness is 0, exactly `count` episodes exist at a time (with oversampling, `count` *
        rollout.oversample), and the batch is in prompt order.
        """
        check_workflow(workflow)
        # Extra episodes: the first `count` of all to finish make the step.
        surplus = math.ceil(count * self.config.oversample) - count
        self._gate.begin_step(count, self.engine.get_version(), waiting=len(self._finished), surplus=surplus)
        self._resamples = count * self.config.max_uniform_resamples

        is_synchronous = self.config.max_staleness == 0
        # Queue `count` more prompts than fit, so that they start as soon as the next version makes room.
        spare = 0 if is_synchronous else count
        # An asynchronous episode's step is unknown when it begins.
        step = f"version {self.engine.get_version()} " if is_synchronous else ""

        try:
            while True:
                self._requeue_stale()
                wanted = self._gate.room(self.engine.get_version()) + spare - len(self._queue)
                for data in itertools.islice(prompts, max(0, wanted)):
                    self._enqueue(data, workflow, step=step)
                self._start()
                if self._is_complete(count):
                    break
                await self._progress.wait()
        finally:
            self._finished.forget_failures()
        batch = self._consume(self._finished.take(count, in_order=is_synchronous))
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
        The column `prompt` holds each group's index in `data`, because some episodes may have failed.
        """
        finished = await self._run_together("evaluate", self._evaluations, data, workflow)
        for entry in finished:
            entry.group.sequences["prompt"] = torch.full((len(entry.group),), entry.episode.number)
        return join_groups([entry.group for entry in finished])

    async def _run_together(
        self, call: str, line: deque[Episode], data: list[dict[str, Any]], workflow: RolloutWorkflow
    ) -> list[Finished]:
        """Run one episode per prompt through the queue `line`. Return those that gave a group, in the order of `data`.

        call: the caller's name for error messages. Raises RuntimeError if no episode gave a group.
        """
        if not data:
            raise ValueError(f"{call}: data = []; give at least one prompt.")
        check_workflow(workflow)
        self.raise_if_fatal()
        # The call's number is part of the seed's key, so that repeated prompts get new samples at the same version.
        version = self.engine.get_version()
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
        pairs, stale = zip(episodes, outcomes, strict=True), self.config.stale
        accepted = [Finished.of(episode, out.group, stale) for episode, out in pairs if out.group is not None]
        if not accepted:
            errors = [outcome.error for outcome in outcomes if outcome.error is not None]
            raise RuntimeError(
                f"{call}: none of {len(data)} episodes gave trajectories ({len(errors)} failed "
                f"{self.config.episode_attempts} times, {len(data) - len(errors)} were rejected by the workflow)"
                + (f"; the first error was {words_of(errors[0])}" if errors else ".")
            ) from (errors[0] if errors else None)
        return accepted

    def notice_version(self) -> None:
        """Start the episodes that the gate admits at the new, higher policy version."""
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

    def _is_complete(self, count: int) -> bool:
        """Return True if a batch of `count` groups can be taken now.

        If not, the event `_progress` is cleared and will be set by the next progress. Raises RuntimeError if too many
        prompts failed or were rejected, or if too few are left for `count` groups.
        """
        if len(self._finished) >= count and not self._is_due():
            return True
        self._finished.raise_if_hopeless(count, under_way=self._gate.running + len(self._queue))
        self._progress.clear()  # the caller waits next, and awaits nothing before, so it misses no progress
        return False

    def _is_due(self) -> bool:
        """Return True if a running prompt has to be in this batch.

        That is the case if it was requeued before and would be too stale for a later batch. The batch waits for such a
        prompt. Otherwise prompts with long replies would be sampled repeatedly and never trained.
        """
        oldest_allowed = self.engine.get_version() + 1 - self.config.max_staleness
        return any(episode.requeues and episode.version < oldest_allowed for episode in self._running.values())

    def _requeue_stale(self) -> None:
        """Drop the finished groups that are too stale to train at the current version, and requeue their prompts.

        Raises RuntimeError if `fail` was called.
        """
        self.raise_if_fatal()
        oldest_allowed = self.engine.get_version() - self.config.max_staleness
        dropped = self._finished.drop_older(oldest_allowed)
        if not dropped:  # this is called after every episode
            return
        for _ in dropped:
            self._gate.take_back()  # otherwise resampled prompts would count twice
        self._metrics.add(stale=len(dropped))
        why = f"its group holds tokens of versions before {oldest_allowed}"
        self._requeue(dropped, why)

    def _recall(self) -> None:
        """Stop the running episodes, which the step did not wait for, and requeue their prompts for the next step."""
        recalled = [task for task, episode in self._running.items() if episode.outcome is None]
        for task in recalled:
            # The next start waits for this task to end: two tasks of one episode would append to the same replies.
            self._running[task].ending = task
            task.cancel()  # its result is ignored; the replies continue where they stopped
            self._gate.finish(accepted=False)
        self._requeue([self._running.pop(task) for task in recalled], "the step was full")

    def _requeue(self, episodes: list[Episode], why: str) -> None:
        """Put the episodes at the front of the queue, in the given order. why: reason, for the recorders."""
        for episode in reversed(episodes):
            episode.queued_s, episode.requeues = time.monotonic(), episode.requeues + 1
            self._queue.appendleft(episode)
        for episode in episodes:
            for events in self._events:
                events.requeued(episode, why)

    def _consume(self, taken: list[Finished]) -> TrajectoryBatch:
        version = self.engine.get_version()
        batch = self._finished.joined(taken, version)
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
        """Start as many queued episodes as the gate and the free slots admit."""
        while self._fatal is None and (episode := self._take_next()) is not None:
            self._gate.start(is_admitted=episode.outcome is None)
            episode.version, episode.started_s = self.engine.get_version(), time.monotonic()
            for events in self._observers(episode):
                events.started(episode)
            task = asyncio.get_running_loop().create_task(self._run(episode))
            self._running[task] = episode
            task.add_done_callback(self._landed)

    def _take_next(self) -> Episode | None:
        """Remove and return the episode to start next; None if none may start.

        Episodes for which a caller waits come first, then the queue, then evaluations.
        """
        if self._asked and self._gate.slots > 0:
            return self._asked.popleft()
        if self._queue and self._gate.capacity(self.engine.get_version()) > self._kept_free:
            return self._queue.popleft()
        if self._evaluations and self._gate.slots > 0:
            return self._evaluations.popleft()
        return None

    @property
    def _kept_free(self) -> int:
        """Number of slots that training leaves free: 1 if evaluations wait and none is running, else 0."""
        is_waiting = bool(self._evaluations) and all(episode.is_training for episode in self._running.values())
        return int(is_waiting and self.config.max_concurrent_episodes > 1)

    def _observers(self, episode: Episode) -> Sequence[RolloutEvents]:
        return self._events if episode.is_training else ()

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved; `_run` has reported it

    async def _run(self, episode: Episode) -> None:
        """Run one episode to its end: attempt it until it gives a group or is given up. Record its outcome."""
        is_counted.set(episode.is_training)  # for this task and those that it starts
        task = asyncio.current_task()
        assert task is not None
        try:
            with self._spans("episodes", str(episode.data["sample_key"]), evaluation=not episode.is_training) as span:
                outcome = await self._restored(episode)
                record = self._records.of(episode.data) if episode.is_training and outcome is None else None
                failures = 0
                while outcome is None:
                    version, engine = self.engine.get_version(), EpisodeEngine(self, episode, record)
                    try:
                        async with engine:
                            # In a task of its own, because a workflow may leave its task marked as cancelled. With a
                            # copy, because a workflow may modify its data.
                            found = await asyncio.ensure_future(begun(episode.workflow, engine, dict(episode.data)))
                        group = self._group_of(found, episode)
                        # Replies kept from the journal or an earlier attempt may be older than this attempt.
                        refuse_older(group, min(version, self._begun(episode)), self.config.max_staleness)
                        engine.note(None)
                        outcome = Outcome(group=group)
                    # Workflows and rewards are user code and may raise anything; one episode must not end the run. A
                    # CancelledError is the episode's own failure, unless this task was cancelled.
                    except (Exception, asyncio.CancelledError) as raised:
                        if task.cancelling():
                            raise asyncio.CancelledError from raised
                        failure, failures = first_of(raised), failures + 1
                    if outcome is None and (outcome := self._given_up(engine, failure, failures)) is None:
                        await self.before_retry(episode, failures, failure)
                episode.replies.clear()
                span.args["outcome"] = outcome.word
            # `_recall` takes a task out of `_running` and requeues its prompt, so its result must not count.
            if self._running.pop(task, None) is None:
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

    async def _restored(self, episode: Episode) -> Outcome | None:
        """Wait until the episode's previous task, if it was recalled, has ended.

        Return the episode's outcome if an earlier process has journaled its group, else None.
        """
        self._metrics.add(started=1, queue_wait_s=time.monotonic() - episode.queued_s)
        if episode.ending is not None and not episode.ending.done():
            await asyncio.wait([episode.ending], timeout=ENDING_S)
        group = self._records.group(episode.data, self.engine.get_version()) if episode.is_training else None
        return None if group is None else Outcome(group=group)

    async def before_retry(self, episode: Episode, failures: int, error: BaseException) -> None:
        """Wait before a sample or a whole episode is tried again. failures: number of its failed tries so far."""
        self._metrics.add(retried=1, rewards_late=isinstance(error, RewardTimeout))
        logger.info("episode %d: try %d failed (%s)", episode.number, failures, words_of(error))
        self.failures[type(error).__name__] += 1
        await asyncio.sleep(min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (failures - 1)))

    def _given_up(self, engine: EpisodeEngine, error: BaseException, failures: int) -> Outcome | None:
        """Note that an attempt failed.

        Return the outcome of the episode if it must not be attempted again, else None.
        """
        engine.note(error)
        if isinstance(error, RunBroken):
            self.fail(f"rollout: {error}")
        is_last = failures == self.config.episode_attempts or engine.is_lost
        if not is_last and not isinstance(error, RequestRefused | RunBroken):
            return None
        self._metrics.add(rewards_late=isinstance(error, RewardTimeout))
        return Outcome(error=error)

    def _abandon(self, episode: Episode) -> None:
        if episode.outcome is not None and not episode.outcome.done():
            episode.outcome.set_exception(RuntimeError(self._fatal or "rollout: the episode was cancelled."))

    def _book(self, episode: Episode, outcome: Outcome) -> None:
        """Count how an episode ended. Keep its group for a batch, unless a caller waits for this episode."""
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
                self._finished.add(episode, group)
            for events in observers:
                events.accepted(episode, group)
        elif error is None:
            self._metrics.add(rejected=1)
            if is_admitted:
                self._finished.note_rejection()
            for events in observers:
                events.rejected(episode, why)
        else:
            logger.warning("episode %d is given up: %s", episode.number, words_of(error))
            self._metrics.add(failed=1)
            self.failures[f"{type(error).__name__}, given up"] += 1
            if is_admitted:
                self._finished.note_failure(error)
            for events in observers:
                events.dead_lettered(episode, error)

    def count_try(self, error: BaseException | None) -> None:
        """Count how a try of a sample ended. End the run if too many tries failed because of infrastructure."""
        failure = infrastructure_in(error)
        if failure is not None:
            name = "rollout/infrastructure_failures"
            self._metrics.add(**{name: 1, f"{name}/{failure.kind}": 1})
        self._failure_rate.add(failure)
        if why := self._failure_rate.excess():
            self.fail(f"rollout: {why}")

    def _group_of(self, result: Any, episode: Episode) -> TrajectoryBatch | None:
        group = as_group(result, source=f"{name_of(episode.workflow)}, {episode.data['sample_key']}")
        if not isinstance(result, list):
            return group
        return without_cut_off(
            group, result, self._metrics, masks=self.config.cut_off == "mask" and episode.is_training
        )

    @property
    def oldest_kept(self) -> int:
        """Oldest policy version that may have sampled the tokens of a reply that is reused."""
        return self.engine.get_version() - self.config.max_staleness if self.config.stale == "drop" else 0

    def _begun(self, episode: Episode) -> int:
        """Return the policy version at the episode's first kept reply, or the current version if it has no replies."""
        return episode.replies.since if len(episode.replies) else self.engine.get_version()


class EpisodeEngine(Sampler):
    """The engine that a workflow receives. Its `async with` block is one attempt at an episode.

        async with EpisodeEngine(executor, episode, record) as engine:
            group = await workflow.arun_episode(engine, episode.data)

    At the end of the block, calls of the attempt that are still in flight are cancelled. The block waits at most
    ENDING_S for them. Later calls are refused.

    Identical requests are distinguished by a running count. Every try of a sample starts its own count, so that a retry
    gets the replies of the previous try.
    """

    def __init__(self, executor: RolloutExecutor, episode: Episode, record: JournaledEpisode | None) -> None:
        """record: the episode's part of the journal; None without a journal."""
        self._executor, self._episode, self._record, self.steps = executor, episode, record, record
        self._attempt = Attempt()
        self._asked: Counter[str] = Counter()

    async def __aenter__(self) -> EpisodeEngine:
        self._before = current_attempt.set(self._attempt)
        return self

    async def __aexit__(self, *raised: object) -> None:
        current_attempt.reset(self._before)
        await self._attempt.end()

    def get_version(self) -> int:
        return self._executor.engine.get_version()

    async def sample(
        self, make: Callable[Concatenate[Sampler, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Make one sample. If it fails, only this sample is tried again. After its last try the error is raised."""
        failures = 0
        with self._attempt.call():
            while True:
                # A copy of this engine with its own counts; copy.copy takes 5 times as long.
                sampler = object.__new__(type(self))
                sampler.__dict__ = self.__dict__ | {"_asked": Counter()}
                try:
                    found = await make(sampler, *args, **kwargs)
                except (RequestRefused, RunBroken, AttemptOver):
                    raise
                except Exception as error:  # user code (reward, environment, agent) may raise anything
                    task, failures = asyncio.current_task(), failures + 1
                    if task is not None and task.cancelling():
                        raise
                    self.note(error, of_sample=True)
                    if failures >= self._executor.config.episode_attempts:
                        self._attempt.is_lost = True
                        raise
                    await self._executor.before_retry(self._episode, failures, error)
                else:
                    self.note(None, of_sample=True)
                    return found

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Return the request's reply. If the episode has kept all or part of it, only the missing part is generated."""
        kept, engine = self._episode.replies, self._executor.engine
        if self._episode.is_training:
            trained_as = self._executor.trained_as
            check_sampling(req, trained_as)
            req = copy.copy(req)
            req.changed_size = (trained_as or req.gconfig).changed_size
        name, version = request_name(req), engine.get_version()
        self._asked[name] += 1
        name = f"{name} {self._asked[name]}"
        with self._attempt.call():
            restored = self._record.take_reply(name, version) if self._record is not None else None
            if restored is not None:
                req = continuing(req, restored)
            reply = kept.begin(name, req, version=version, oldest_allowed=self._executor.oldest_kept)
            if reply.stop_reason == "abort":
                reply = await engine.agenerate(continuing(req, reply))
                kept.keep(name, reply)
                if self._record is not None:
                    self._record.keep_reply(name, reply)
            return reply

    @property
    def is_lost(self) -> bool:
        """True if a sample has failed in all its tries. Another attempt at the episode would only repeat these."""
        return self._attempt.is_lost

    def note(self, error: BaseException | None, *, of_sample: bool = False) -> None:
        """Count the end of a try: of a sample if `of_sample`, otherwise of the whole attempt. error: None for success.

        If tries of samples were counted in the attempt, the end of the attempt itself is counted only if it raised an
        error other than that of the last counted try.
        """
        attempt = self._attempt
        is_known = attempt.has_noted and (error is None or error is attempt.noted)
        if of_sample or not is_known:
            attempt.noted, attempt.has_noted = error, True
            self._executor.count_try(error)


def first_of(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups, which a workflow's task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def sample_key(data: dict[str, Any], otherwise: str, step: str = "") -> str:
    """Return the name from which the seeds of a prompt's samples are derived.

    The name of a prompt with an index in the data set depends neither on the rank that runs it nor on what else that
    rank has run, such as an evaluation. otherwise: the name of other prompts. step: prefix of the name.
    """
    if "prompt_index" in data and "epoch" in data:
        return f"{step}prompt {data['epoch']}/{data['prompt_index']}"
    return otherwise
