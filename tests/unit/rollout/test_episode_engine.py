"""Episodes that fail in parts: one sample is tried again alone, what was answered is kept, nothing goes on after."""

import asyncio
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.api import RequestRefused, RolloutWorkflow, together
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.rollout.events import RolloutEvents
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics, metrics_of
from megatron_rl.telemetry.spans import Spans
from megatron_rl.types import LLMRequest, Trajectory
from megatron_rl.workflows import MultiTurnWorkflow, RLVRWorkflow
from megatron_rl.workflows.environments import Environment, Turn
from megatron_rl.workflows.scoring import RewardCall
from tests.kit.examples import max_examples
from tests.kit.replies import TimedEngine
from tests.kit.simulated_time import simulate


class Ends(RolloutEvents):
    def __init__(self):
        self.lines = Counter()
        self.errors = []

    def accepted(self, episode, group):
        self.lines["accepted"] += 1

    def rejected(self, episode, why):
        self.lines["rejected"] += 1

    def dead_lettered(self, episode, error):
        self.lines["dead_lettered"] += 1
        self.errors.append(error)


def run(workflow, engine, *, prompts=1, events=(), spans=None, **config):
    """Run episodes to their ends in simulated time; what they leave behind is a failure."""
    metrics = RolloutMetrics()

    async def main():
        executor = RolloutExecutor(engine, RolloutConfig(**config), metrics, events, spans)
        batch = None
        try:
            batch = await executor.rollout_batch([{"n": n, **WORDS} for n in range(prompts)], workflow)
        except RuntimeError as error:
            batch = error
        assert engine.open == 0, "a request is under way after its episode"
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()
        return batch

    return simulate(main()), metrics_of([metrics.take()])


WORDS = {"messages": [{"role": "user", "content": "12 + 30"}]}


class Reward(RewardCall):
    """Scores in the loop itself, as simulated time has no threads."""

    def __init__(self, score):
        super().__init__(lambda **_: 0.0, None, timeout_s=60.0)
        self.score, self.asked, self.open = score, [], 0

    async def _in_a_thread(self, arguments):
        self.asked.append(arguments)
        self.open += 1
        try:
            return await self.score(len(self.asked), arguments)
        finally:
            self.open -= 1


class Plain(RLVRWorkflow):
    """RLVR without a tokenizer."""

    def __init__(self, reward, n_samples):
        super().__init__(lambda **_: 0.0, GenerationConfig(n_samples=n_samples, max_new_tokens=1000), None)
        self.reward = reward

    async def arun_episode(self, engine, data):
        return await super().arun_episode(engine, data | {"input_ids": [data["n"] + 1]})


class Gathering(Plain):
    """The same as users write it, and the README does."""

    async def arun_episode(self, engine, data):
        request = LLMRequest(rid="", input_ids=[data["n"] + 1], gconfig=self.gconfig)

        async def one():
            reply = await engine.agenerate(request)
            return Trajectory.from_reply(reply, await self.reward(reply, data))

        return await asyncio.gather(*(one() for _ in range(self.gconfig.n_samples)))


def sample_of(req):
    return int(req.metadata["sample_key"].split("/")[1])


async def at_once(number, arguments):
    return 1.0


async def fails_first(number, arguments):
    if number == 1:
        raise OSError("the verifier is down")
    return 1.0


@pytest.mark.parametrize("kind", [Plain, Gathering])
def test_one_failed_reward_is_asked_again_without_generating_anything(kind):
    engine = TimedEngine()
    batch, metrics = run(kind(Reward(fails_first), 16), engine)
    assert batch["rewards"].tolist() == [1.0] * 16 and engine.tokens == 160 and len(engine.asked) == 16
    assert metrics["rollout/episodes_retried"] == 1 and metrics["rollout/episodes_failed"] == 0


def test_only_the_sample_that_failed_is_tried_again_and_the_others_are_not_touched():
    tries = Counter()

    def fault(req):
        tries[sample_of(req)] += 1
        return OSError("the server died") if sample_of(req) == 2 and tries[2] == 4 else None

    engine = TimedEngine(fault=fault)
    batch, _ = run(Plain(Reward(at_once), 4), engine)
    assert len(batch) == 4 and sorted(map(sample_of, engine.asked)) == [0, 1, 2, 2, 3]
    assert engine.tokens == 40, "it goes on with the tokens that it had"


@pytest.mark.parametrize("kind", [Plain, Gathering])
def test_a_group_that_is_given_up_leaves_no_request_and_no_reward_under_way(kind):
    async def score(number, arguments):
        if number == 2:
            raise ZeroDivisionError("in the verifier")
        await asyncio.sleep(1000)

    lengths = itertools.count(3)
    engine, reward, spans = TimedEngine(length=lambda req: next(lengths)), Reward(score), Spans()
    error, metrics = run(kind(reward, 16), engine, spans=spans, episode_attempts=1)
    assert "ZeroDivisionError: in the verifier" in str(error) and metrics["rollout/episodes_failed"] == 1
    assert reward.open == 0 and spans.open() == []
    assert engine.tokens < 16 * 5, "the others were stopped when the group was lost"


def test_no_more_requests_are_under_way_than_episodes_may_be_when_samples_fail():
    """A bound of one episode of 16 samples, whose first sample fails twice."""
    failures = Counter()

    async def score(number, arguments):
        failures["all"] += 1
        if failures["all"] <= 2:
            raise OSError("the verifier is down")
        return 1.0

    lengths = random.Random(1)
    engine = TimedEngine(length=lambda req: lengths.randint(1, 300))
    run(Gathering(Reward(score), 16), engine, prompts=3, max_concurrent_episodes=1)
    assert engine.most_open <= 16


def test_a_refused_prompt_is_a_dead_letter_at_once_and_its_siblings_are_stopped():
    refusal = RequestRefused("the prompt has 5000 tokens")
    engine = TimedEngine(fault=lambda req: refusal if sample_of(req) == 3 else None)
    ends = Ends()
    error, metrics = run(Plain(Reward(at_once), 8), engine, events=[ends])
    assert ends.errors == [refusal] and engine.tokens == 0 and metrics["rollout/episodes_retried"] == 0


def test_a_sample_that_waits_for_no_request_is_stopped_and_cleans_up_when_another_is_lost():
    ends, cleaned = Ends(), []

    class Slow(Plain):
        async def scored_reply(self, engine, request, data):
            reply = await engine.agenerate(request)
            if sample_of(request) == 3:
                raise ZeroDivisionError("in the third sample")
            try:
                await asyncio.sleep(1000)  # the workflow's own call, of which the engine knows nothing
            finally:
                await asyncio.sleep(1)
                cleaned.append(len(ends.errors))
            return reply, 0.0

    error, _ = run(Slow(Reward(at_once), 8), TimedEngine(), events=[ends], episode_attempts=1)
    assert "in the third sample" in str(error) and cleaned == [0] * 7, "before the prompt is given up"


@pytest.mark.parametrize("kind", [Plain, Gathering])
def test_the_cleaning_up_of_a_cancelled_episodes_samples_is_not_interrupted(kind):
    """However long each sample takes for it, and also if the workflow uses asyncio.gather."""
    cleaned, numbers = [], itertools.count(1)

    class Slow(TimedEngine):
        async def agenerate(self, req):
            number = next(numbers)
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(number / 10)
                cleaned.append(number)

    async def main():
        executor = RolloutExecutor(Slow(), RolloutConfig(), RolloutMetrics())
        batch = asyncio.ensure_future(executor.rollout_batch([{"n": 1}], kind(Reward(at_once), 4)))
        await asyncio.sleep(1.0)
        for task in list(executor._running):
            task.cancel()
        with pytest.raises(RuntimeError, match="the episode was cancelled"):
            await batch

    simulate(main())
    assert cleaned == [1, 2, 3, 4]


def test_a_task_that_a_workflow_left_behind_is_refused_further_requests():
    refused = []

    class Leaving(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            async def later():
                await asyncio.sleep(5.0)
                try:
                    await engine.agenerate(LLMRequest(rid="", input_ids=[1]))
                except RuntimeError as error:
                    refused.append(str(error))

            self.task = asyncio.ensure_future(later())
            reply = await engine.agenerate(LLMRequest(rid="", input_ids=[2]))
            return [Trajectory.from_reply(reply, 1.0)]

    engine, workflow = TimedEngine(length=lambda req: 2), Leaving()

    async def main():
        executor = RolloutExecutor(engine, RolloutConfig(), RolloutMetrics())
        await executor.rollout_batch([{}], workflow)
        await workflow.task

    simulate(main())
    assert len(engine.asked) == 1 and "has ended" in refused[0]


def test_equal_requests_of_a_group_get_replies_of_their_own_also_when_they_are_asked_again():
    lengths = itertools.count(1)
    engine = TimedEngine(length=lambda req: next(lengths))
    batch, _ = run(Gathering(Reward(fails_first), 4), engine)
    assert len(set(batch.lengths.tolist())) == 4, "all are different, as what was generated is"


def test_replies_that_have_become_too_old_meanwhile_are_generated_anew():
    engine = TimedEngine()

    async def score(number, arguments):
        if number == 1:
            engine.version = 1
            raise OSError("the verifier is down")
        return 1.0

    batch, _ = run(Plain(Reward(score), 1), engine)
    assert engine.tokens == 20 and batch["versions"][batch["loss_mask"]].tolist() == [1] * 10
    engine.version, engine.tokens = 0, 0
    batch, _ = run(Plain(Reward(score), 1), engine, max_staleness=1)
    assert engine.tokens == 10 and batch["versions"][batch["loss_mask"]].tolist() == [0] * 10


class Flaky(Environment):
    """Says the same in each dialogue; its second step fails in the first two dialogues of a prompt."""

    made = 0

    def __init__(self, data):
        super().__init__(data)
        Flaky.made += 1
        self.number, self.steps = Flaky.made, 0

    async def step(self, reply, score):
        self.steps += 1
        if self.steps == 2 and self.number <= 2:
            raise OSError("the world is down")
        return Turn(messages=[{"role": "user", "content": "more"}] if self.steps < 3 else (), reward=1.0)


def test_a_dialogue_whose_world_failed_is_played_again_with_the_replies_that_it_had(tokenizer):
    Flaky.made, engine = 0, TimedEngine(length=lambda req: 4)
    gconfig = GenerationConfig(n_samples=3, max_new_tokens=8)
    workflow = MultiTurnWorkflow(lambda **_: 0.0, gconfig, tokenizer, Flaky, max_tokens=400)
    batch, _ = run(workflow, engine)
    assert batch["rewards"].tolist() == [3.0] * 3 and batch["turns"].tolist() == [3.0] * 3
    assert Flaky.made == 5 and len(engine.asked) == 9 and engine.tokens == 36


def test_together_raises_what_failed_first_and_leaves_its_task_as_it_was():
    ended = []

    async def fails():
        await asyncio.sleep(1.0)
        raise KeyError("first")

    async def waits():
        try:
            await asyncio.sleep(100.0)
        finally:
            await asyncio.sleep(2.0)
            ended.append("waits")

    async def main():
        with pytest.raises(KeyError, match="first"):
            await together([waits(), fails(), waits()])
        assert ended == ["waits"] * 2 and asyncio.current_task().cancelling() == 0
        assert await together([]) == []
        assert await together([asyncio.sleep(2, "a"), asyncio.sleep(1, "b")]) == ["a", "b"]

    simulate(main())


def test_a_failure_in_a_workflows_own_task_group_is_known_for_what_it_is():
    """Before Python 3.13 such a group leaves its task marked as cancelled."""

    class Grouped(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            async def refused():
                raise RequestRefused("too long")

            async with asyncio.TaskGroup() as group:
                group.create_task(engine.agenerate(LLMRequest(rid="", input_ids=[1])))
                group.create_task(refused())

    ends = Ends()
    _, metrics = run(Grouped(), TimedEngine(), events=[ends], prompts=3, max_concurrent_episodes=1)
    assert ends.lines == {"dead_lettered": 3} and isinstance(ends.errors[0], RequestRefused)
    assert metrics["rollout/episodes_retried"] == 0


# -- anything may happen -----------------------------------------------------------------------------------------------


@st.composite
def troubles(draw):
    """Of each prompt and sample: what goes wrong in its first tries, and when."""
    kinds = st.sampled_from(["reward", "server", "refusal", "reward hangs", "cancelled"])
    when = st.integers(0, 9)
    return {
        (draw(st.integers(0, 2)), draw(st.integers(0, 3))): draw(st.lists(st.tuples(kinds, when), max_size=4))
        for _ in range(draw(st.integers(0, 6)))
    }


class Troubled(TimedEngine):
    """Makes what `troubles` say of a sample come to it, one after the other."""

    def __init__(self, troubles):
        super().__init__(length=lambda req: 10, fault=self.trouble)
        self.left = {key: list(found) for key, found in troubles.items()}
        self.happened = Counter()

    def next_of(self, key, *kinds):
        found = self.left.get(key)
        return found.pop(0) if found and found[0][0] in kinds else None

    def trouble(self, req):
        key = req.input_ids[0] - 1, sample_of(req)
        found = self.left.get(key)
        if not found or found[0][1] > req.begun.output_len:
            return None
        trouble = self.next_of(key, "server", "refusal", "cancelled")
        if trouble is None:
            return None
        self.happened[key[0]] += 1
        return {"server": OSError("died"), "refusal": RequestRefused("no"), "cancelled": asyncio.CancelledError()}[
            trouble[0]
        ]


@pytest.mark.slow
@settings(max_examples=max_examples(25, 60), deadline=None, derandomize=True, database=None)
@given(troubles(), st.integers(1, 3), st.one_of(st.none(), st.integers(0, 60)))
def test_whatever_fails_each_group_is_had_once_or_given_up_and_nothing_is_left_over(troubles, attempts, ends_at):
    engine, ends, spans, samples = Troubled(troubles), Ends(), Spans(), 4

    class Scored(Plain):
        async def scored_reply(self, engine_here, request, data):
            reply = await engine_here.agenerate(request)
            trouble = engine.next_of((data["n"], sample_of(request)), "reward", "reward hangs")
            engine.happened[data["n"]] += trouble is not None
            if trouble is not None and trouble[0] == "reward":
                raise ZeroDivisionError("in the verifier")
            if trouble is not None:
                async with asyncio.timeout(5.0):
                    await asyncio.sleep(1000.0)
            return reply, 1.0

    async def main():
        config = RolloutConfig(episode_attempts=attempts, max_concurrent_episodes=2)
        executor = RolloutExecutor(engine, config, RolloutMetrics(), [ends], spans)
        if ends_at is not None:
            asyncio.get_running_loop().call_later(ends_at, executor.fail, "the world ended")
        try:
            await executor.rollout_batch([{"n": n} for n in range(3)], Scored(Reward(at_once), samples))
        except RuntimeError:
            pass
        await asyncio.sleep(0.001)
        assert engine.open == 0 and spans.open() == [] and len(asyncio.all_tasks()) == 1

    simulate(main())
    asked = Counter(req.input_ids[0] - 1 for req in engine.asked)
    for prompt, count in asked.items():
        assert count <= samples + (samples + 1) * engine.happened[prompt]
    assert engine.tokens <= 3 * samples * 10, "no token is generated twice"
    if ends_at is None:
        assert ends.lines["accepted"] + ends.lines["dead_lettered"] == 3 and None not in ends.errors


def long_of_four(req):
    """The length of replies belongs to the prompt."""
    return 100 if req.input_ids[0] % 4 == 0 else 10


def steps_with(engine, ledger, *, count=4, steps=8, **config):
    """Train steps of so many groups; returns their batches and how long they took."""

    async def main():
        executor = RolloutExecutor(engine, RolloutConfig(**config), RolloutMetrics(), [ledger])
        source, batches = ({"n": n} for n in itertools.count()), []
        workflow = Plain(Reward(at_once), 2)
        for _ in range(steps):
            batches.append(await executor.prepare_batch(source, workflow, count))
            engine.version += 1
            executor.notice_version()
        return batches, asyncio.get_running_loop().time()

    return simulate(main())


class Placed(RolloutEvents):
    def __init__(self):
        self.consumed_prompts = []

    def consumed(self, episodes, version):
        self.consumed_prompts.append([episode.data["n"] for episode in episodes])


@pytest.mark.parametrize("stale", ["mask", "keep", "drop"])
def test_a_recalled_prompt_goes_on_where_it_was_and_oversampling_gains_time(stale):
    _, alone_s = steps_with(TimedEngine(length=long_of_four), Placed())
    engine, ledger = TimedEngine(length=long_of_four), Placed()
    batches, seconds = steps_with(engine, ledger, oversample=1.5, stale=stale)
    consumed = sum(ledger.consumed_prompts, [])
    assert len(consumed) == len(set(consumed)) == 32
    assert all(prompts == sorted(prompts) for prompts in ledger.consumed_prompts), "in the order of the prompts"
    for version, batch in enumerate(batches):
        versions = batch["versions"][batch["loss_mask"]]
        assert versions.max() == version and (stale == "keep" or versions.min() == version)
    tokens = {n: 0 for n in consumed}
    for prompts, batch in zip(ledger.consumed_prompts, batches, strict=True):
        for n, length in zip(prompts, batch.lengths[::2].tolist(), strict=True):
            tokens[n] = length - 1
    assert all(tokens[n] == long_of_four(LLMRequest(rid="", input_ids=[n + 1])) for n in consumed)
    if stale == "drop":  # of which none may be trained: they are generated anew, as the bound is strict
        return
    assert seconds < 0.75 * alone_s
    assert engine.continued and all(prompt % 4 == 0 for prompt in engine.continued)
    finished, surplus, under_way = 2 * sum(tokens.values()), 2 * 10 * 8, 2 * 100 * 2
    assert engine.tokens <= finished + surplus + under_way, "no long reply begins anew"
