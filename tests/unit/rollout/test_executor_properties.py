"""What the executor promises whatever servers and episodes do: its own code, on simulated servers and time.

An example is a world: how long each piece of each reply takes, which episodes fail or are rejected, how long the
trainer's steps are, how many updates they have and which of these are skipped.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.actor import PolicyActor
from megatron_rl.api import RequestRefused, RolloutWorkflow
from megatron_rl.config import AlgorithmConfig, RolloutConfig
from megatron_rl.rollout.events import RolloutEvents
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics
from megatron_rl.types import Trajectory, TrajectoryBatch
from tests.kit.counting_engine import CountingEngine
from tests.kit.examples import max_examples
from tests.kit.simulated_time import Deadlock, simulate

SECONDS = st.sampled_from([0.0, 0.0, 0.1, 1.0, 3.0, 10.0, 50.0])  # equal ones often: things happen at once
ENDS = st.one_of(st.just("group"), st.sampled_from(["group", "uniform", "none", "error", "refusal"]))
UPDATES = st.lists(st.booleans().map(lambda b: not b), min_size=1, max_size=3)
worlds_examples = settings(max_examples=max_examples(40, 80), deadline=None, derandomize=True, database=None)

# A prompt's last event -> what may follow it.
FOLLOWERS = {
    None: {"queued"},
    "queued": {"started"},
    "started": {"accepted", "rejected", "dead_lettered", "requeued"},
    "accepted": {"consumed", "requeued"},
    "requeued": {"started"},
    "consumed": set(),
    "rejected": set(),
    "dead_lettered": set(),
}


@dataclass
class World:
    max_concurrent: int
    eta: int
    groups: int
    stale: str
    attempts: int
    episodes: list[tuple[list[float], str]]
    """Of the k-th try of any episode: the seconds that each of its tokens takes, and how it ends."""
    steps: list[tuple[float, list[bool]]]
    """Seconds of training, and of each update whether it is applied."""
    evaluates: bool
    oversample: float
    resamples: int

    @property
    def most_present(self):
        """Groups that may be running or waiting at once."""
        return self.eta * self.groups + math.ceil(self.groups * self.oversample)


@st.composite
def worlds(draw):
    eta = draw(st.integers(0, 4))
    return World(
        max_concurrent=draw(st.integers(1, 12)),
        eta=eta,
        evaluates=draw(st.booleans()),
        oversample=1.0 if eta else draw(st.sampled_from([1.0, 1.5, 2.0])),
        resamples=draw(st.integers(0, 2)),
        groups=draw(st.integers(1, 5)),
        stale=draw(st.sampled_from(["drop", "mask"])),
        attempts=draw(st.integers(1, 3)),
        episodes=draw(st.lists(st.tuples(st.lists(SECONDS, min_size=1, max_size=3), ENDS), min_size=1, max_size=20)),
        steps=draw(st.lists(st.tuples(SECONDS, UPDATES), min_size=1, max_size=12)),
    )


class Servers(CountingEngine, RolloutWorkflow):
    """Trainer, engine, servers and workflow of a world in one."""

    def __init__(self, world):
        super().__init__(version=0)
        self.world, self.actor = world, PolicyActor(self, AlgorithmConfig(), temperature=1.0)
        self.tries, self.running, self.most_running = itertools.count(), 0, 0

    def update(self, updates):
        """Train a step and publish once; True where that is another policy than before."""
        before = self.version
        self.actor.update(updates)
        assert self.version == before + any(updates), "versions count publications"
        return any(updates)

    async def arun_episode(self, engine, data):
        durations, end = self.world.episodes[next(self.tries) % len(self.world.episodes)]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        versions = []
        try:
            for seconds in durations:
                versions.append(self.version)  # a token is as old as the weights it was begun with
                await asyncio.sleep(seconds)
        finally:
            self.running -= 1
        if end == "error":
            raise OSError("the verifier broke")
        if end == "refusal":
            raise RequestRefused("too long")
        if end == "none":
            return None
        return [
            Trajectory(
                input_ids=torch.tensor([data["n"]] * (1 + len(versions))),
                loss_mask=torch.tensor([False] + [True] * len(versions)),
                logprobs=torch.zeros(1 + len(versions)),
                versions=torch.tensor([-1, *versions]),
                reward=float(reply) if end == "group" else 1.0,
            )
            for reply in range(2)
        ]


@dataclass
class Ledger(RolloutEvents):
    """Where every prompt is; each event is checked against the one before."""

    most_present: int
    last: dict[int, str] = field(default_factory=dict)
    requeues: Counter[int] = field(default_factory=Counter)

    def note(self, episode, event):
        n = episode.data["n"]
        assert event in FOLLOWERS[self.last.get(n)], f"prompt {n}: {event} after {self.last.get(n)}"
        self.last[n] = event

    def count(self, *events):
        states = Counter(self.last.values())
        return sum(states[event] for event in events)

    def has_room(self, world, steps_ahead):
        """Whether, where no evaluation takes any, a slot and the staleness bound have room for one more episode."""
        running, present = self.count("started"), self.count("started", "accepted")
        return not world.evaluates and running < world.max_concurrent and present < steps_ahead * world.groups

    def queued(self, episode):
        self.note(episode, "queued")

    def started(self, episode):
        self.note(episode, "started")
        assert self.count("started", "accepted") <= self.most_present

    def accepted(self, episode, group):
        self.note(episode, "accepted")

    def requeued(self, episode, why):
        self.note(episode, "requeued")
        self.requeues[episode.data["n"]] += 1

    def consumed(self, episodes, version):
        for episode in episodes:
            self.note(episode, "consumed")

    def rejected(self, episode, why):
        self.note(episode, "rejected")

    def dead_lettered(self, episode, error):
        self.note(episode, "dead_lettered")


def executor_of(world, servers, ledger):
    config = RolloutConfig(
        max_concurrent_episodes=world.max_concurrent,
        max_staleness=world.eta,
        stale=world.stale,
        oversample=world.oversample,
        max_uniform_resamples=world.resamples,
        episode_attempts=world.attempts,
    )
    return RolloutExecutor(servers, config, RolloutMetrics(), [ledger])


def check_batch(batch, world, servers, ledger):
    trained = batch["versions"][batch["loss_mask"]]
    assert servers.version - trained.min() <= world.eta, "a token is older than the bound"
    groups = batch["group"].tolist()
    assert groups == [number for number in range(world.groups) for _ in range(2)], "groups come whole"
    firsts = batch["input_ids"][batch.cu_seqlens[:-1]].tolist()
    prompts = firsts[::2]
    assert firsts == [n for n in prompts for _ in range(2)]
    assert len(set(prompts)) == world.groups
    assert all(ledger.last[n] == "consumed" for n in prompts)
    if world.eta == 0:
        assert prompts == sorted(prompts), "synchronous batches are in the order of the prompts"
    return prompts


def is_excuse(error):
    """So many prompts failed or were rejected that the batch was given up."""
    return "times each and" in str(error) or "were rejected on the way" in str(error)


@pytest.mark.slow
@worlds_examples
@given(worlds())
def test_asynchronous_training_keeps_every_promise(world):
    servers, ledger, consumed = Servers(world), Ledger(world.most_present), []
    executor = executor_of(world, servers, ledger)
    taken = itertools.count()
    source = ({"n": n} for n in taken)

    async def train():
        for seconds, updates in world.steps:
            batch = await executor.prepare_batch(source, servers, world.groups)
            consumed.extend(check_batch(batch, world, servers, ledger))
            if world.evaluates:
                evaluations.append(asyncio.ensure_future(executor.evaluate([{"n": -1}] * world.groups, servers)))
            await asyncio.sleep(seconds)
            waiting = ledger.count("queued", "requeued")
            assert not (waiting and ledger.has_room(world, steps_ahead=world.eta)), "work lies while servers idle"
            is_new = servers.update(updates)
            executor.notice_version()
            if world.eta > 0 and all(end == "group" for _, end in world.episodes):
                assert not ledger.has_room(world, steps_ahead=world.eta + is_new), "new weights start new work"
        # However full training kept the servers, evaluations come to their end, or to nothing where none succeeded.
        for outcome in await asyncio.gather(*evaluations, return_exceptions=True):
            assert isinstance(outcome, TrajectoryBatch) or "evaluate: none of" in str(outcome)

    evaluations = []
    try:
        simulate(train())
    except RuntimeError as error:
        assert is_excuse(error), error
    assert servers.most_running <= world.max_concurrent
    assert len(consumed) == len(set(consumed)) == ledger.count("consumed")
    # Once, and once more where there are more such prompts than a batch takes.
    assert set(ledger.requeues.values()) <= {1, 2}, "a prompt is passed over again and again"
    # Every prompt that was taken is in exactly one place, and the executor knows those that are not at their end.
    assert sorted(ledger.last) == list(range(next(taken)))


@worlds_examples
@given(worlds(), st.integers(1, 12))
def test_submitted_episodes_all_come_back(world, count):
    servers, ledger = Servers(world), Ledger(count)
    executor = executor_of(world, servers, ledger)
    come = []

    async def submit_and_wait():
        for n in range(count):
            await executor.submit({"n": n}, servers)
        while True:
            try:
                batch = await executor.wait(1)
            except RuntimeError:  # nothing is left, or the last ones failed
                if ledger.count("queued", "started", "requeued", "accepted") == 0:
                    return
                continue
            come.append(int(batch["input_ids"][0]))
            assert servers.version - batch["versions"][batch["loss_mask"]].min() <= world.eta
            servers.update(world.steps[len(come) % len(world.steps)][1])
            executor.notice_version()

    simulate(submit_and_wait())
    assert servers.most_running <= world.max_concurrent
    assert sorted(ledger.last) == list(range(count))
    assert sorted(come) == [n for n in range(count) if ledger.last[n] == "consumed"]


@worlds_examples
@given(worlds(), st.floats(0, 100))
def test_end_of_the_world_wakes_who_waits_and_ends_every_episode(world, seconds):
    servers = Servers(world)
    executor = executor_of(world, servers, Ledger(10**9))

    async def train():
        asyncio.get_running_loop().call_later(seconds, executor.fail, "the server died")
        source = ({"n": n} for n in itertools.count())
        while True:
            await executor.prepare_batch(source, servers, world.groups)
            await executor.rollout_batch([next(source) for _ in range(3)], servers)
            await asyncio.sleep(1.0)
            servers.version += 1

    async def run():
        with pytest.raises(RuntimeError) as raised:
            await train()
        assert servers.most_running <= world.max_concurrent
        if "the server died" in str(raised.value):
            await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) == 1, "only this test's own task is left"

    simulate(run())


def test_simulated_loop_finds_a_deadlock():
    with pytest.raises(Deadlock):
        simulate(asyncio.Event().wait())
