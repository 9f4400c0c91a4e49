"""Episodes that fail in parts, in every workflow: rewards are asked again, orphans end, infrastructure is counted."""

import asyncio
import itertools

import pytest

from megatron_rl.api import InfrastructureFailure, infrastructure_in
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.rollout.failure_rate import NEWEST, FailureRate
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics, metrics_of
from megatron_rl.telemetry.spans import Spans
from megatron_rl.types import LLMRequest, SampledTokens
from megatron_rl.workflows import (
    BestOfNWorkflow,
    DebateWorkflow,
    JudgedWorkflow,
    MultiTurnWorkflow,
    ReMaxWorkflow,
    RLVRWorkflow,
    ToolUseWorkflow,
)
from megatron_rl.workflows.environments import SelfCorrection
from megatron_rl.workflows.tools import Calculator, Search
from tests.kit.replies import TimedEngine
from tests.kit.simulated_time import simulate
from tests.kit.waiting import LATE_S
from tests.unit.rollout.test_episode_engine import Plain, Reward, at_once, fails_first, run


class Speaking(TimedEngine):
    """Generates the tokens of a text that serves as an answer and as a verdict, one a second."""

    def __init__(self, tokenizer):
        self.ids = tokenizer("<score>5</score>", add_special_tokens=False)["input_ids"]
        super().__init__(length=lambda req: len(self.ids))

    async def agenerate(self, req):
        reply = await super().agenerate(req)
        reply.sampled = SampledTokens.of(self.ids, [-1.0] * len(self.ids), [self.version] * len(self.ids))
        return reply


KINDS = {
    "rlvr": (RLVRWorkflow, {}),
    "best_of_n": (BestOfNWorkflow, {"candidates": 4}),
    "judged": (JudgedWorkflow, {}),
    "remax": (ReMaxWorkflow, {}),
    "multi_turn": (MultiTurnWorkflow, {"environment": SelfCorrection, "max_tokens": 500}),
    "tool_use": (ToolUseWorkflow, {"tools": {Calculator: {}}, "max_tokens": 500}),
    "debate": (DebateWorkflow, {"agents": {"a": "Be brief.", "b": "Be careful."}, "max_tokens": 500}),
}


def workflow_of(kind, reward, tokenizer):
    make, arguments = KINDS[kind]
    gconfig = GenerationConfig(n_samples=3, max_new_tokens=60)
    workflow = make(lambda **_: 0.0, gconfig, tokenizer, **arguments)
    workflow.reward = reward
    return workflow


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_reward_is_asked_again_and_nothing_is_generated_for_it(kind, tokenizer):
    engine = Speaking(tokenizer)
    run(workflow_of(kind, Reward(at_once), tokenizer), engine)
    without_failure = len(engine.asked)
    engine = Speaking(tokenizer)
    batch, metrics = run(workflow_of(kind, Reward(fails_first), tokenizer), engine)
    assert len(engine.asked) == without_failure and engine.continued == []
    assert metrics["rollout/episodes_retried"] == 1 and metrics["rollout/episodes_accepted"] == 1
    assert min(batch["rewards"].tolist()) >= 1.0, "a reward that failed is no reward of 0"


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_is_given_up_takes_its_siblings_with_it(kind, tokenizer):
    """`run` fails where a request or a task outlives its episode."""

    async def score(number, arguments):
        if number == 2:
            raise ZeroDivisionError("in the verifier")
        await asyncio.sleep(1000)

    engine, reward, spans = Speaking(tokenizer), Reward(score), Spans()
    error, _ = run(workflow_of(kind, reward, tokenizer), engine, spans=spans, episode_attempts=1)
    assert "ZeroDivisionError: in the verifier" in str(error)
    assert reward.open == 0 and spans.open() == []


def test_failures_of_infrastructure_are_counted_by_kind_and_a_rewards_own_are_not():
    faults = [InfrastructureFailure("no compiler", kind="compiler"), OSError("a bug"), *[None] * 100]

    async def score(number, arguments):
        if (fault := faults[number - 1]) is not None:
            raise fault
        return 1.0

    batch, metrics = run(Plain(Reward(score), 4), TimedEngine())
    assert batch["rewards"].tolist() == [1.0] * 4 and metrics["rollout/episodes_retried"] == 2
    assert metrics["rollout/infrastructure_failures"] == 1
    assert metrics["rollout/infrastructure_failures/compiler"] == 1
    _, metrics = run(Plain(Reward(at_once), 4), TimedEngine())
    assert metrics["rollout/infrastructure_failures"] == 0


def test_a_workflows_own_search_that_is_down_is_a_failure_of_infrastructure(tokenizer):
    with pytest.raises(InfrastructureFailure, match="search at http://127.0.0.1:9/") as raised:
        asyncio.run(Search("http://127.0.0.1:9/", timeout_s=LATE_S)(query="a"))
    assert infrastructure_in(ExceptionGroup("in a task group", [OSError(), raised.value])).kind == "search"


def failing(share):
    """A reward whose calls fail for want of a service, so many of each ten."""
    numbers = itertools.count()

    async def score(number, arguments):
        if next(numbers) % 10 < 10 * share:
            raise InfrastructureFailure("the index at node7 is gone", kind="index")
        return 1.0

    return score


def test_a_run_in_which_infrastructure_fails_too_often_stops_and_says_what_failed():
    async def main():
        metrics, config = RolloutMetrics(), RolloutConfig(episode_attempts=10)
        executor = RolloutExecutor(TimedEngine(), config, metrics)
        data, workflow = [{"n": n} for n in range(100)], Plain(Reward(failing(0.6)), 4)
        words = []
        for _ in range(2):  # every later call of the trainer says the same
            with pytest.raises(RuntimeError) as raised:
                await executor.rollout_batch(data, workflow)
            words.append(str(raised.value))
        assert words[0] == words[1]
        return words[0], metrics_of([metrics.take()])

    message, metrics = simulate(main())
    assert "rollout.max_infrastructure_failures = 0.5: infrastructure failed" in message
    assert "tries of samples (index " in message
    assert "InfrastructureFailure: the index at node7 is gone. Mend that and resume the run" in message
    assert NEWEST // 2 < metrics["rollout/infrastructure_failures/index"] < 2 * NEWEST, "it stops early"


@pytest.mark.parametrize(("share", "most"), [(0.4, 0.5), (0.6, 1.0)])
def test_a_run_goes_on_with_as_many_failures_as_it_may_have(share, most):
    config = {"prompts": 80, "episode_attempts": 20, "max_infrastructure_failures": most}
    batch, metrics = run(Plain(Reward(failing(share)), 4), TimedEngine(length=lambda req: 2), **config)
    assert len(batch) == 320 and metrics["rollout/infrastructure_failures/index"] > 160


def test_a_workflow_without_samples_of_its_own_counts_by_its_attempts():
    class Alone(Plain):
        async def arun_episode(self, engine, data):
            request = LLMRequest(rid="", input_ids=[data["n"] + 1], gconfig=self.gconfig)
            reply = await engine.agenerate(request)
            await self.reward(reply, data)
            return None

    async def main():
        metrics = RolloutMetrics()
        executor = RolloutExecutor(TimedEngine(), RolloutConfig(episode_attempts=100), metrics)
        with pytest.raises(
            RuntimeError, match=f"failed {NEWEST} of the last {NEWEST} tries of samples .index {NEWEST}"
        ):
            await executor.rollout_batch([{"n": n} for n in range(300)], Alone(Reward(failing(1.0)), 1))
        return metrics_of([metrics.take()])

    assert simulate(main())["rollout/infrastructure_failures/index"] == NEWEST


def test_a_service_that_is_away_for_a_second_stops_no_large_run():
    """Of 4,000 samples a minute 600 fail at once, which are all of the newest 256.

    Where it stays away: 1,701 failures later, 25.5 s, the minute has 2,301 of them and as good as 2,299 others.
    """

    async def main():
        rate = FailureRate(0.5)
        for _ in range(3400):
            rate.add(None)
            await asyncio.sleep(60 / 4000)
        for _ in range(600):
            rate.add(InfrastructureFailure("away", kind="service"))
        assert rate.excess() is None
        for _ in range(4000):  # but not one that stays away
            rate.add(InfrastructureFailure("away", kind="service"))
            await asyncio.sleep(60 / 4000)
            if why := rate.excess():
                return why

    assert "infrastructure failed 2301 of the last 4600 tries" in simulate(main())
