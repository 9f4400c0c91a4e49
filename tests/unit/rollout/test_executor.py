"""The executor with workflows that ask no server: order, admission, retries, and the ends of things."""

import asyncio
import dataclasses
import itertools
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from megatron_rl.api import RequestRefused, RolloutWorkflow
from megatron_rl.config import RolloutConfig
from megatron_rl.rollout import executor as executor_module
from megatron_rl.rollout.events import DeadLetters, RolloutEvents
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.rollout.groups import is_uniform, reward_of_each
from megatron_rl.servers.event_loop import EventLoopThread
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics, metrics_of
from megatron_rl.types import LLMResponse, Trajectory, TrajectoryBatch
from megatron_rl.workflows.scoring import RewardCall
from tests.kit.waiting import LATE_S, wait_until


class VersionOnly:
    """The part of an engine that the executor itself uses."""

    version = 0

    def get_version(self):
        return self.version


class Scripted(RolloutWorkflow):
    """Runs `act(data, attempt)`, and counts what ran at once. An episode that is `held` ends when it may."""

    def __init__(self, act, delay_s=0.0):
        self.act, self.delay_s, self.may_end = act, delay_s, threading.Event()
        self.attempts, self.running, self.most_running = {}, 0, 0

    async def arun_episode(self, engine, data):
        number = data["n"]
        self.attempts[number] = self.attempts.get(number, 0) + 1
        data = data | {"version": engine.get_version()}
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(data.get("delay_s", self.delay_s))
            while data.get("held") and not self.may_end.is_set():
                await asyncio.sleep(0.001)
            return self.act(data, self.attempts[number])
        finally:
            self.running -= 1


def trajectory(n, version=0):
    return Trajectory(
        input_ids=torch.tensor([n, n + 1]),
        loss_mask=torch.tensor([False, True]),
        logprobs=torch.tensor([0.0, -1.0]),
        versions=torch.tensor([-1, version]),
        reward=float(n),
    )


def one(data, attempt):
    return [trajectory(data["n"], data.get("version", 0))]


def prompts(*numbers, **fields):
    return [{"n": number, **fields} for number in numbers]


class FromTheTrainer:
    """Calls the executor from another thread, as the rollout engine does for the trainer."""

    def __init__(self, thread, events=(), **config):
        self.thread, self.engine, self.metrics = thread, VersionOnly(), RolloutMetrics()
        self.executor = RolloutExecutor(self.engine, RolloutConfig(**config), self.metrics, events)

    def fail(self, message):
        self.thread.loop.call_soon_threadsafe(self.executor.fail, message)

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.thread.run(getattr(self.executor, name)(*args, **kwargs))


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(executor_module, "FIRST_RETRY_S", 0.001)
    threads = []

    def start(**config):
        threads.append(EventLoopThread("test"))
        return FromTheTrainer(threads[-1], **config)

    yield start
    for thread in threads:
        thread.stop()


def test_rollout_batch_keeps_the_order_of_the_prompts(make):
    workflow = Scripted(lambda data, _: [trajectory(data["n"]), trajectory(data["n"])])
    data = [{"n": n, "delay_s": 0.05 * (3 - n)} for n in range(3)]
    batch = make().rollout_batch(data, workflow)
    assert batch["rewards"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["group"].tolist() == [0, 0, 1, 1, 2, 2]


def test_padded_results_become_one_group(make):
    def padded(data, _):
        n = data["n"]
        return TensorDict(
            {
                "input_ids": torch.tensor([[n, 1, 2], [n, 1, 0]]),
                "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
                "loss_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
                "rewards": torch.tensor([1.0, 2.0]),
            },
            batch_size=[2],
        )

    batch = make().rollout_batch(prompts(7, 8), Scripted(padded))
    assert batch["input_ids"].tolist() == [7, 1, 2, 7, 1, 8, 1, 2, 8, 1]
    assert batch["group"].tolist() == [0, 0, 1, 1]
    assert batch["rewards"].tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e39])
def test_a_reward_that_is_no_number_fails_its_episode_and_no_other(make, reward):
    workflow = Scripted(lambda data, _: [trajectory(1), dataclasses.replace(trajectory(1), reward=data["reward"])])
    executor = make(episode_attempts=2)
    batch = executor.rollout_batch([{"n": 0, "reward": reward}, {"n": 1, "reward": 3.0}], workflow)
    assert batch["rewards"].tolist() == [1.0, 3.0] and workflow.attempts[0] == 2
    with pytest.raises(RuntimeError, match=r"ValueError: arun_episode returned rewards = \[1.0, (nan|inf)\]: must be"):
        executor.rollout_batch([{"n": 0, "reward": reward}], workflow)


def test_trajectories_without_rewards_fail_their_episode(make):
    ones = torch.ones(2, 3, dtype=torch.int64)
    padded = TensorDict({"input_ids": ones, "attention_mask": ones, "loss_mask": ones}, batch_size=[2])
    with pytest.raises(
        RuntimeError, match="returned group, input_ids, .* and no rewards; give one for each trajectory"
    ):
        make(max_uniform_resamples=1).prepare_batch(iter(prompts(0)), Scripted(lambda *_: padded.clone()), 1)


def padded(**columns):
    ones = torch.ones(1, 3, dtype=torch.int64)
    return {"input_ids": ones, "attention_mask": ones, "loss_mask": ones, "rewards": torch.ones(1)} | columns


def changed(**fields):
    return [trajectory(1), dataclasses.replace(trajectory(1), **fields)]


def as_batch(**columns):
    batch = TrajectoryBatch.from_trajectories([[trajectory(1), trajectory(2)]])
    batch.tokens |= {name: value for name, value in columns.items() if len(value) == 4}
    batch.sequences |= {name: value for name, value in columns.items() if len(value) == 2}
    return batch


NAN, UNTRAINED = float("nan"), torch.zeros(2, dtype=torch.bool)
UNFIT = {
    "a reward that is none": (changed(reward=None), "trajectory 1 with reward = None: must be a number"),
    "rewards by token": (
        padded(rewards=torch.tensor([[0.0, 0.0, NAN]])),
        r"rewards = \[0.0, 0.0, nan\]: must be finite",
    ),
    "a greedy reward": (padded(greedy_reward=torch.tensor([NAN])), r"greedy_reward = \[nan\]: must be finite"),
    "a sample": (changed(sequence={"sample": NAN}), "same further fields"),
    "a sample by token": (
        padded(sample=torch.ones(1, 3)),
        "sample for each token; give one number for each trajectory",
    ),
    "a log-prob": (changed(logprobs=torch.tensor([0.0, NAN])), "trajectory 1 with logprobs that hold nan at token 1"),
    "a log-prob of 0": (padded(logprobs=torch.tensor([[0.0, -torch.inf, 0.0]])), "logprobs that hold -inf at token 1"),
    "a length": (changed(logprobs=torch.zeros(3)), r"logprobs of shape \(3,\) for input_ids of \(2,\)"),
    "a list": (changed(versions=[0, 0]), "TypeError: .* trajectory 1 with versions as list; must be a torch.Tensor"),
    "an array": (padded(rewards=torch.ones(1).numpy()), "TypeError: .* rewards as ndarray"),
    "a device": (padded(loss_mask=torch.ones(1, 3, device="meta")), "loss_mask on meta; must be on the CPU"),
    "ids that are floats": (padded(input_ids=torch.full((1, 3), 0.5)), "input_ids that hold 0.5: must be whole"),
    "ids below 0": (changed(input_ids=torch.tensor([-100, 3])), "input_ids that hold -100: must be ids"),
    "a mask of weights": (changed(loss_mask=torch.tensor([0.0, 0.5])), "loss_mask that holds 0.5: must be True for"),
    "a mask of labels": (as_batch(loss_mask=torch.tensor([-100, 1, -100, 1])), "loss_mask that holds -100"),
    "nothing to train": ([dataclasses.replace(trajectory(1), loss_mask=UNTRAINED)], "False for all 2 tokens: nothing"),
    "no tokens": (padded(attention_mask=torch.zeros(1, 3)), r"trajectories of \[0\] tokens: each needs one"),
    "other fields": ([*changed(tokens={"mine": torch.ones(2)})], "give all trajectories the same further fields"),
    "a batch's numbers": (as_batch(rewards=torch.tensor([NAN, 1.0])), r"rewards = \[nan, 1.0\]"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_a_workflow_returns_is_looked_at_before_it_is_trained(make, what):
    result, message = UNFIT[what]
    executor = make(episode_attempts=1)
    batch = executor.rollout_batch(prompts(0, 1), Scripted(lambda data, _: result if data["n"] == 0 else one(data, 1)))
    assert batch["rewards"].tolist() == [1.0]
    with pytest.raises(RuntimeError, match=message) as error:
        executor.prepare_batch(iter(prompts(0) * 3), Scripted(lambda *_: result), 1)
    assert "1 episodes failed 1 times each and none succeeded" in str(error.value)
    assert re.search(rf"\({__name__}:Scripted at {__file__}:\d+, episode 0\)", str(error.value))


def test_a_group_of_whatever_form_has_the_dtypes_of_a_trajectory(make):
    integers = as_batch(rewards=torch.tensor([1, 2]), loss_mask=torch.tensor([0, 1, 0, 1]))
    del integers.sequences["group"]
    for result in (integers, padded(rewards=torch.tensor([1])), padded(rewards=torch.ones(1).double())):
        batch = make().rollout_batch(prompts(0), Scripted(lambda *_, result=result: result))
        assert batch["rewards"].dtype == torch.float32 and batch["loss_mask"].dtype == torch.bool
    empty = TrajectoryBatch.from_trajectories([[trajectory(1)]]).select([])
    with pytest.raises(RuntimeError, match="1 were rejected"):
        make().rollout_batch(prompts(0), Scripted(lambda *_: empty))


def test_an_episode_that_something_cancels_has_failed_and_gives_its_place_back(make):
    class Cancelled(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            if data["n"] == 0:
                waits = asyncio.get_running_loop().create_future()
                waits.cancel()
                await waits
            return one(data, 1)

    executor = make(max_concurrent_episodes=1, episode_attempts=2)
    batch = executor.prepare_batch(({"n": n} for n in itertools.count()), Cancelled(), 2)
    assert batch["rewards"].tolist() == [1, 2]
    assert metrics_of([executor.metrics.take()])["rollout/episodes_failed"] == 1
    assert executor.rollout_batch(prompts(0, 1), Cancelled())["rewards"].tolist() == [1]


def test_rewards_of_tokens_that_are_not_trained_make_no_difference():
    group = TrajectoryBatch.from_trajectories([[trajectory(1), trajectory(2)]])
    del group.sequences["rewards"]
    group.tokens["rewards"] = torch.tensor([5.0, 1.0, 7.0, 1.0])
    assert is_uniform(group) and reward_of_each(group).tolist() == [1.0, 1.0]
    group.tokens["rewards"][1] = 2.0
    assert not is_uniform(group)


def test_a_reward_that_never_ends_fails_its_episode_by_name_and_is_counted(make):
    told = threading.Event()
    at_once = RewardCall(lambda **data: data["n"], None, timeout_s=LATE_S)
    never = RewardCall(lambda **_: told.wait(), None, timeout_s=0.1)
    reply = LLMResponse(
        input_tokens=[1], output_tokens=[2], output_logprobs=[-1.0], output_versions=[0], stop_reason="stop"
    )

    class Rewarded(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return [trajectory(await (at_once if data["n"] else never)(reply, data))]

    rollout = make(episode_attempts=2)
    try:
        assert rollout.rollout_batch(prompts(0, 3), Rewarded())["rewards"].tolist() == [3]
        with pytest.raises(RuntimeError, match=r"<lambda>: no reward within 0.1 s; [34] of its calls still run"):
            rollout.rollout_batch(prompts(0), Rewarded())
    finally:
        told.set()
    metrics = metrics_of([rollout.metrics.take()])
    assert (metrics["rollout/rewards_late"], metrics["rollout/episodes_failed"]) == (4, 2)


def test_failing_episode_is_tried_again_then_left_out_and_counted(make):
    def act(data, attempt):
        if data["n"] == 1 or (data["n"] == 2 and attempt < 3):
            raise OSError("verifier broke")
        return None if data["n"] == 3 else one(data, attempt)

    executor, workflow = make(episode_attempts=3), Scripted(act)
    batch = executor.rollout_batch(prompts(0, 1, 2, 3), workflow)
    assert batch["rewards"].tolist() == [0, 2]
    assert batch["group"].tolist() == [0, 1]
    assert workflow.attempts == {0: 1, 1: 3, 2: 3, 3: 1}
    metrics = metrics_of([executor.metrics.take()])
    assert [metrics[f"rollout/episodes_{k}"] for k in ("accepted", "rejected", "failed", "retried")] == [2, 1, 1, 4]


def test_refused_request_is_not_tried_again(make):
    def act(data, _):
        if data["n"] == 0:
            raise RequestRefused("prompt too long")
        return one(data, 1)

    workflow = Scripted(act)
    assert make().rollout_batch(prompts(0, 1), workflow)["rewards"].tolist() == [1]
    assert workflow.attempts[0] == 1


def test_server_that_keeps_old_weights_is_a_failure_and_not_sampled_for_ever(make):
    executor = make(max_staleness=0, episode_attempts=2)
    executor.engine.version = 7
    workflow = Scripted(lambda data, _: [trajectory(data["n"], version=6)])
    with pytest.raises(RuntimeError, match="tokens of policy version 6, but the episode began at version 7"):
        executor.prepare_batch(({"n": n} for n in itertools.count()), workflow, 2)


def test_batch_without_any_group_raises_the_first_cause(make):
    def act(data, _):
        raise OSError("no verifier here")

    with pytest.raises(RuntimeError, match="none of 2 episodes.*OSError: no verifier here"):
        make(episode_attempts=1).rollout_batch(prompts(0, 1), Scripted(act))


def test_workflow_that_returns_something_else_is_named(make):
    with pytest.raises(RuntimeError, match="arun_episode returned float"):
        make(episode_attempts=1).rollout_batch(prompts(0), Scripted(lambda *_: 1.0))


def test_concurrency_is_bounded(make):
    workflow = Scripted(one, delay_s=0.01)
    batch = make(max_concurrent_episodes=3).rollout_batch(prompts(*range(10)), workflow)
    assert len(batch) == 10
    assert workflow.most_running == 3


def test_wait_returns_groups_in_the_order_they_finish(make):
    book = Book()
    executor, workflow = make(events=[book]), Scripted(one)
    executor.submit({"n": 0, "held": True}, workflow)
    executor.submit({"n": 1}, workflow)
    wait_until(lambda: book.of(1)[-1] == "accepted")
    workflow.may_end.set()
    assert executor.wait(2)["rewards"].tolist() == [1, 0]


def test_queued_episodes_start_as_others_finish(make):
    executor, workflow = make(max_concurrent_episodes=2), Scripted(one)
    for n in range(5):
        executor.submit({"n": n, "held": True}, workflow)
    workflow.may_end.set()
    assert sorted(executor.wait(5)["rewards"].tolist()) == [0, 1, 2, 3, 4]
    assert workflow.most_running == 2


def test_wait_that_times_out_loses_nothing(make):
    book = Book()
    executor, workflow = make(events=[book]), Scripted(one)
    executor.submit({"n": 0}, workflow)
    executor.submit({"n": 1, "held": True}, workflow)
    wait_until(lambda: book.of(0)[-1] == "accepted")
    with pytest.raises(TimeoutError, match="1 of 2 groups"):
        executor.wait(2, timeout_s=0.1)
    workflow.may_end.set()
    assert executor.wait(2)["rewards"].tolist() == [0, 1]


def test_wait_for_more_than_was_submitted_does_not_hang(make):
    executor = make()
    executor.submit({"n": 0}, Scripted(lambda *_: None))
    with pytest.raises(RuntimeError, match="asked for 1 groups.*1 were rejected"):
        executor.wait(1)


def test_synchronous_batches_hold_the_next_prompts_in_order(make):
    executor, source = make(max_staleness=0), iter([{"n": n, "delay_s": 0.02 * (2 - n % 3)} for n in range(6)])
    workflow = Scripted(one)
    assert executor.prepare_batch(source, workflow, 3)["rewards"].tolist() == [0, 1, 2]
    assert next(source)["n"] == 3  # nothing was sampled ahead
    executor.engine.version = 1
    source = itertools.chain(prompts(3), source)
    assert executor.prepare_batch(source, workflow, 3)["rewards"].tolist() == [3, 4, 5]


def test_asynchronous_batches_run_ahead_by_the_staleness_bound(make):
    executor, workflow = make(max_staleness=1), Scripted(one)
    source = ({"n": n} for n in itertools.count())
    executor.prepare_batch(source, workflow, 4)
    wait_until(lambda: len(workflow.attempts) >= 8)
    time.sleep(0.05)  # in which one too many may come
    assert len(workflow.attempts) == 8  # (1 + 0 + 1) * 4, and not one more until the version rises
    executor.engine.version = 1
    batch = executor.prepare_batch(source, workflow, 4)
    assert len(batch) == 4
    metrics = metrics_of([executor.metrics.take()])
    # Four tokens at age 0, then four of version 0 consumed at version 1.
    assert metrics["rollout/staleness"] == 0.5
    assert metrics["rollout/staleness_max"] == 1


def test_rejected_prompts_are_replaced(make):
    workflow = Scripted(lambda data, _: one(data, 1) if data["n"] % 2 else None)
    batch = make().prepare_batch(({"n": n} for n in itertools.count()), workflow, 3)
    assert batch["rewards"].tolist() == [1, 3, 5]


def test_broken_reward_ends_the_run_instead_of_burning_the_prompts(make):
    def act(*_):
        raise OSError("no verifier here")

    workflow = Scripted(act)
    with pytest.raises(RuntimeError, match="none succeeded.*OSError: no verifier here"):
        make(episode_attempts=1).prepare_batch(({"n": n} for n in itertools.count()), workflow, 4)
    assert len(workflow.attempts) < 12


@pytest.mark.parametrize("call", ["wait", "rollout_batch"])
def test_dead_server_wakes_the_trainer(make, call):
    executor, workflow = make(), Scripted(one, delay_s=LATE_S)
    executor.submit({"n": 0}, workflow)
    threading.Timer(0.1, executor.fail, ["rollout server 0 (pid 7) was killed by SIGKILL"]).start()
    with pytest.raises(RuntimeError, match="killed by SIGKILL"):
        executor.wait(1) if call == "wait" else executor.rollout_batch(prompts(1), workflow)
    with pytest.raises(RuntimeError, match="killed by SIGKILL"):
        executor.submit({"n": 2}, workflow)


def test_sample_keys_do_not_depend_on_who_runs_the_prompt(make):
    keys = []

    def act(data, _):
        keys.append(data["sample_key"])
        return one(data, 1)

    step = [{"n": n, "epoch": 2, "prompt_index": n + 10} for n in range(2)]
    make().rollout_batch(step, Scripted(act))
    first = make()
    first.rollout_batch(prompts(5), Scripted(act))  # an evaluation, which only the first rank runs
    first.rollout_batch(step[:1], Scripted(act))
    make().rollout_batch(step[1:], Scripted(act))
    assert keys[:2] == ["version 0 prompt 2/10", "version 0 prompt 2/11"] == keys[3:]


def test_a_batch_knows_the_places_of_its_prompts_in_the_data(make):
    named = [{"n": n, "prompt_index": 7 - n, "epoch": 0} for n in range(2)]
    assert make().rollout_batch(named, Scripted(one))["prompt_index"].tolist() == [7, 6]
    assert "prompt_index" not in make().rollout_batch([*named, {"n": 3}], Scripted(one))


def test_unnamed_prompts_get_new_samples_with_every_batch(make):
    keys, executor = [], make()
    workflow = Scripted(lambda data, _: keys.append(data["sample_key"]) or one(data, 1))
    executor.rollout_batch(prompts(0), workflow)
    executor.rollout_batch(prompts(0), workflow)
    executor.rollout_batch(prompts(0, sample_key="mine"), workflow)
    assert keys == ["version 0 batch 0 0", "version 0 batch 1 0", "mine"]


class Book(RolloutEvents):
    """Writes every event down with the prompt's number."""

    def __init__(self):
        self.lines = []

    def queued(self, episode):
        self.lines.append(("queued", episode.data["n"]))

    def started(self, episode):
        self.lines.append(("started", episode.data["n"]))

    def accepted(self, episode, group):
        self.lines.append(("accepted", episode.data["n"], group["rewards"].tolist()))

    def rejected(self, episode, why):
        self.lines.append(("rejected", episode.data["n"], why))

    def requeued(self, episode, why):
        self.lines.append(("requeued", episode.data["n"], why))

    def dead_lettered(self, episode, error):
        self.lines.append(("dead_lettered", episode.data["n"], str(error)))

    def of(self, n):
        return [line[0] for line in self.lines if line[1] == n]

    def consumed(self, episodes, version):
        self.lines.append(("consumed", [episode.data["n"] for episode in episodes], version))


def test_observers_hear_of_every_turn_of_a_prompt(make):
    def act(data, _):
        if data["n"] == 1:
            raise RequestRefused("prompt too long")
        return None if data["n"] == 2 else one(data, 1)

    book = Book()
    executor = make(events=[book])
    executor.engine.version = 3
    executor.rollout_batch(prompts(0, 1, 2), Scripted(act))
    assert book.of(0) == ["queued", "started", "accepted"]
    assert book.of(1) == ["queued", "started", "dead_lettered"]
    assert book.of(2) == ["queued", "started", "rejected"]
    assert ("accepted", 0, [0.0]) in book.lines and ("dead_lettered", 1, "prompt too long") in book.lines
    assert book.lines[-1] == ("consumed", [0], 3)

    book.lines.clear()
    executor.prepare_batch(iter(prompts(1, 2, 4, 5)), Scripted(act), 2)
    assert book.of(1)[-1] == "dead_lettered" and book.of(2)[-1] == "rejected"
    assert book.of(4) == book.of(5) == ["queued", "started", "accepted"]
    assert book.lines[-1] == ("consumed", [4, 5], 3)


@pytest.mark.parametrize("event", ["queued", "started", "accepted", "consumed"])
def test_books_that_cannot_be_kept_end_the_run(make, event):
    class FullDisk(RolloutEvents):
        pass

    def write(*_):
        raise OSError("no space left on device")

    setattr(FullDisk, event, write)
    executor = make(events=[FullDisk()])
    with pytest.raises((RuntimeError, OSError), match="no space left on device"):
        executor.prepare_batch(iter(prompts(0)), Scripted(one), 1)


def test_every_call_after_that_says_so(make):
    class FullDisk(RolloutEvents):
        def accepted(self, episode, group):
            raise OSError("no space left on device")

    executor = make(events=[FullDisk()])
    with pytest.raises(RuntimeError, match="OSError: no space left on device"):
        executor.prepare_batch(iter(prompts(0)), Scripted(one), 1)
    with pytest.raises(RuntimeError, match="no space left on device"):
        executor.rollout_batch(prompts(1), Scripted(one))


class Dated(RolloutWorkflow):
    """A trajectory of two trained tokens: of the version when the episode began, and of that when it ended.

    The episode that has prompt 0 at version 0 ends after `hold` is set.
    """

    def __init__(self):
        self.hold, self.started = asyncio.Event(), []

    async def arun_episode(self, engine, data):
        n, first = data["n"], engine.get_version()
        self.started.append((n, first))
        if n == 0 and first == 0:
            await self.hold.wait()
        ids = torch.tensor([n, n + 1, n + 2])
        return [
            Trajectory(
                input_ids=ids,
                loss_mask=torch.tensor([False, True, True]),
                logprobs=torch.zeros(3),
                versions=torch.tensor([-1, first, engine.get_version()]),
                reward=float(n),
            )
        ]


@pytest.fixture
def with_late_group(make):
    """An executor at version 2, whose bound is 1, with a group of prompt 0 that was begun at version 0."""

    def start(stale):
        workflow, book = Dated(), Book()
        executor = make(max_staleness=1, stale=stale, events=[book])
        source = ({"n": n} for n in itertools.count())
        for version in range(2):
            executor.engine.version = version
            assert 0 not in executor.prepare_batch(source, workflow, 2)["rewards"]
        executor.engine.version = 2
        executor.thread.loop.call_soon_threadsafe(workflow.hold.set)
        wait_until(lambda: book.of(0)[-1] == "accepted")
        metrics_of([executor.metrics.take()])
        return executor, workflow, book, source

    return start


def test_group_that_comes_too_late_is_sampled_again(with_late_group):
    executor, workflow, book, source = with_late_group("drop")
    seen = []
    for version in range(2, 5):
        executor.engine.version = version
        batch = executor.prepare_batch(source, workflow, 2)
        assert (version - batch["versions"][batch["loss_mask"]]).max() <= 1
        seen += batch["rewards"].tolist()
    assert seen.count(0) == 1
    assert book.of(0) == ["queued", "started", "accepted", "requeued", "started", "accepted"]  # and consumed
    first, again = [version for n, version in workflow.started if n == 0]
    assert first == 0 and again >= 2  # 3 where the trainer is quicker than the episode's task
    assert metrics_of([executor.metrics.take()])["rollout/episodes_stale"] == 1


def test_prompt_with_long_replies_is_waited_for_the_second_time(make):
    """It takes longer than the two steps that the bound allows, whenever it is begun."""
    book, hold = Book(), [asyncio.Event(), asyncio.Event()]

    class Long(Dated):
        async def arun_episode(self, engine, data):
            first = engine.get_version()
            if data["n"] == 0:
                await hold[book.of(0).count("started") - 1].wait()
            return [trajectory(data["n"], version=first)]

    executor, source = make(max_staleness=1, events=[book]), ({"n": n} for n in itertools.count())
    for version in range(2):
        executor.engine.version = version
        executor.prepare_batch(source, Long(), 2)
    executor.engine.version = 2
    executor.thread.loop.call_soon_threadsafe(hold[0].set)
    wait_until(lambda: book.of(0)[-1] == "accepted")
    executor.prepare_batch(source, Long(), 2)
    assert book.of(0)[-2:] == ["requeued", "started"]  # at version 2
    executor.engine.version = 3
    threading.Timer(0.2, executor.thread.loop.call_soon_threadsafe, [hold[1].set]).start()
    assert 0 in executor.prepare_batch(source, Long(), 2)["rewards"], "at version 4 it would be too old again"


def test_tokens_that_are_too_old_can_be_masked_instead(with_late_group):
    executor, workflow, book, source = with_late_group("mask")
    batch = executor.prepare_batch(source, workflow, 2)
    assert batch["rewards"].tolist()[0] == 0, "the oldest comes first"
    assert batch["versions"][:3].tolist() == [-1, 0, 2]
    assert batch["loss_mask"][:3].tolist() == [False, False, True]
    metrics = metrics_of([executor.metrics.take()])
    assert metrics["rollout/masked_tokens"] == 1 and metrics["rollout/episodes_stale"] == 0
    assert metrics["rollout/staleness_max"] <= 1


def test_group_of_which_masking_leaves_nothing_is_sampled_again(with_late_group):
    executor, workflow, book, source = with_late_group("mask")
    executor.engine.version = 4  # its newest token is of version 2
    batch = executor.prepare_batch(source, workflow, 2)
    assert batch["loss_mask"].sum() == 4, "all are whole"
    assert "requeued" in book.of(0)


def test_groups_can_be_trained_however_old(with_late_group):
    executor, workflow, book, source = with_late_group("keep")
    batch = executor.prepare_batch(source, workflow, 2)
    assert batch["rewards"].tolist()[0] == 0 and batch["loss_mask"][:3].tolist() == [False, True, True]
    assert metrics_of([executor.metrics.take()])["rollout/staleness_max"] == 2


def pair(*rewards):
    return lambda data, _: [
        dataclasses.replace(trajectory(data["n"]), reward=float(reward)) for reward in rewards[data["n"] % len(rewards)]
    ]


def test_groups_without_variance_are_replaced(make):
    book = Book()
    executor = make(events=[book], max_uniform_resamples=10)
    workflow = Scripted(pair((1, 1), (0, 1), (0, 0)))
    batch = executor.prepare_batch(({"n": n} for n in itertools.count()), workflow, 2)
    assert batch["input_ids"][::4].tolist() == [1, 4]
    assert ("rejected", 0, "all rewards are equal") in book.lines
    assert metrics_of([executor.metrics.take()])["rollout/episodes_uniform"] >= 2


def test_task_without_any_variance_does_not_spin_for_ever(make):
    executor, workflow = make(max_uniform_resamples=3), Scripted(pair((1, 1)))
    batch = executor.prepare_batch(({"n": n} for n in itertools.count()), workflow, 2)
    assert len(batch) == 4, "the rest is trained as it is"
    assert len(workflow.attempts) == 2 + 3 * 2
    assert metrics_of([executor.metrics.take()])["rollout/episodes_uniform"] == 6


def test_full_step_does_not_wait_for_the_slowest_but_the_next_one_does(make):
    book = Book()
    executor, workflow = make(events=[book], oversample=1.5), Scripted(one)
    delays = {1: 0.5}
    source = ({"n": n, "delay_s": delays.get(n, 0.02 if n < 3 else 0)} for n in itertools.count())
    assert executor.prepare_batch(source, workflow, 2)["rewards"].tolist() == [0, 2]
    assert ("requeued", 1, "the step was full") in book.lines
    executor.engine.version = 1
    assert 1 in executor.prepare_batch(source, workflow, 2)["rewards"], "it is not passed over twice"
    assert book.of(1) == ["queued", "started", "requeued", "started", "accepted"]


def test_evaluation_runs_beside_training_without_pausing_it(make):
    executor, workflow, scored = make(max_concurrent_episodes=3, max_staleness=1), Scripted(one), Scripted(one)
    source = ({"n": n, "delay_s": 0.02} for n in itertools.count())
    evaluation = executor.thread.submit(executor.executor.evaluate(prompts(*range(5), delay_s=0.05), scored))
    for version in range(6):
        executor.engine.version = version
        executor.prepare_batch(source, workflow, 2)
    batch = evaluation.result()
    assert batch["rewards"].tolist() == [0, 1, 2, 3, 4]
    assert workflow.most_running >= 2 and scored.most_running >= 1
    # (1 + 5 + 1) * 2, as far as the version of the last step allows.
    wait_until(lambda: len(workflow.attempts) == 14)
    wait_until(lambda: executor.executor.state_counts()["finished, not yet trained"] == 2)  # 12 of them are
    assert metrics_of([executor.metrics.take()])["rollout/episodes_accepted"] == len(workflow.attempts), (
        "evaluations do not count"
    )


def test_evaluations_are_counted_apart_from_training(make):
    executor = make().executor
    executor._running = {number: SimpleNamespace(is_training=number > 0) for number in range(3)}
    counts = executor.state_counts()
    executor._running = {}
    assert (counts["running"], counts["evaluations running"]) == (2, 1)


def test_failed_prompts_are_listed_with_their_error(make, tmp_path):
    def act(data, _):
        if data["n"] == 1:
            raise ZeroDivisionError("in the verifier")
        return one(data, 1)

    executor = make(events=[DeadLetters(tmp_path / "dead_letters.jsonl")], episode_attempts=2)
    executor.rollout_batch(prompts(0, 1, source=Path("data")), Scripted(act))
    (letter,) = [json.loads(line) for line in (tmp_path / "dead_letters.jsonl").read_text().splitlines()]
    assert letter["prompt"]["n"] == 1 and letter["prompt"]["source"] == "data"
    assert letter["error"].startswith("ZeroDivisionError: in the verifier (") and "in act" in letter["traceback"]


def no_coroutine(self, engine, data):
    return one(data, 1)


async def a_yield(self, engine, data):
    yield one(data, 1)


async def too_few(self, engine):
    return []


async def a_missing_field(self, engine, data):
    return data["answer"]


def workflow_of(method):
    return type("Mine", (RolloutWorkflow,), {"arun_episode": method})()


LINES = [line.strip() for line in Path(__file__).read_text().splitlines()]
MISTAKEN = {
    "a plain function": (workflow_of(no_coroutine), "def no_coroutine", "returned list; must be a coroutine function"),
    "a generator": (workflow_of(a_yield), "async def a_yield", "has a yield; must be a coroutine function"),
    "one argument": (workflow_of(too_few), "async def too_few", "does not take engine and data (too many positional"),
    "a KeyError": (workflow_of(a_missing_field), 'return data["answer"]', "KeyError: 'answer' ("),
    "the class": (Scripted, "", "workflow: is the class Scripted; give an object of it"),
    "a function": (one, "", "workflow: is function, which has no arun_episode"),
    "none": (None, "", "workflow: is NoneType, which has no arun_episode"),
}


@pytest.mark.parametrize("what", MISTAKEN)
@pytest.mark.parametrize("way", ["rollout_batch", "prepare_batch"])
def test_a_workflow_that_is_none_is_told_with_the_users_file_and_line(make, what, way):
    workflow, line, words = MISTAKEN[what]
    executor = make(episode_attempts=1)
    with pytest.raises((RuntimeError, ValueError)) as told:
        if way == "rollout_batch":
            executor.rollout_batch(prompts(0), workflow)
        else:
            executor.prepare_batch(iter(prompts(0)), workflow, 1)
    last = str(told.value).splitlines()[-1]
    assert words in last
    if line:
        number = next(n for n, text in enumerate(LINES, start=1) if text.startswith(line))
        assert f"{__file__}:{number}" in last
