"""Environments of the real package verifiers: single replies, dialogues and tools, with their rubrics' rewards."""

import asyncio
import json
import signal

import pytest

from megatron_rl.agents.agent_workers import AgentFailed
from megatron_rl.agents.worlds.verifiers import Rollout, VerifiersWorkflow, verifiers_prompts
from megatron_rl.config import GenerationConfig
from megatron_rl.data.prompts import load_prompts
from tests.kit.optional import later
from tests.kit.replies import RecordingEngine, check_trajectory
from tests.kit.tokenizers import make_tokenizer

later("verifiers", reason="verifiers is not installed: see requirements/worlds.txt")
pytestmark = pytest.mark.slow

HOME = "tests.unit.agents.worlds.verifiers_worlds"


TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def rollouts():
    """Of a group of environments, which processes load once for all tests."""
    gconfig = GenerationConfig(n_samples=1, max_new_tokens=200)
    workflow = VerifiersWorkflow(lambda **_: 1 / 0, gconfig, TOKENIZER, f"{HOME}:all_of_them", 2000)
    yield workflow
    workflow.workers.close()


@pytest.fixture(scope="module")
def rows():
    found = {}
    for prompt in verifiers_prompts(f"{HOME}:all_of_them"):
        found.setdefault(prompt["row"]["info"]["env_id"], prompt)
    return found


def lead(workflow, row, *replies):
    """Lead a rollout in which the policy says these, one after the other."""
    engine = RecordingEngine(TOKENIZER)
    engine.script = lambda req: replies[TOKENIZER.decode(req.input_ids).count("<|assistant|>") - 1] + "<eos>"
    trajectories = asyncio.run(workflow.arun_episode(engine, row))
    turns = [len(check_trajectory(trajectory, engine.served)) for trajectory in trajectories]
    return [t.reward for t in trajectories], turns, TOKENIZER.decode(trajectories[0].input_ids)


def test_an_environments_rows_are_prompts_and_its_signal_handlers_are_not_ours():
    before = signal.getsignal(signal.SIGTERM)
    args = {"environment": f"{HOME}:sums", "environment_args": {"system_prompt": "Add."}, "first": 1}
    prompts = load_prompts(f"{verifiers_prompts.__module__}:verifiers_prompts", args, import_from=[HOME])
    assert [prompt["messages"][-1]["content"] for prompt in prompts] == ["What is 1 + 2?", "What is 5 + 5?"]
    assert prompts[0]["messages"][0] == {"role": "system", "content": "Add."} and prompts[0]["row"]["answer"] == "3"
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ValueError, match=r"environment = .*: has 3 rows, and none from 3 on"):
        verifiers_prompts(f"{HOME}:sums", first=3)
    with pytest.raises(ValueError, match="is not in megatron_rl or run.import_from"):
        load_prompts(f"{verifiers_prompts.__module__}:verifiers_prompts", args | {"import_from": [HOME]})


def test_a_reply_has_the_weighted_sum_of_the_rubrics_functions(rollouts, rows):
    told = "<|system|>You add numbers.<|end|><|user|>What is 12 + 30?<|end|><|assistant|>"
    assert lead(rollouts, rows["sums"], "42") == ([1.0], [1], f"{told}42<eos>")
    assert lead(rollouts, rows["sums"], "please")[0] == [0.25]


def test_a_dialogue_is_one_trajectory_with_exactly_the_tokens_that_were_served(rollouts, rows):
    rewards, turns, text = lead(rollouts, rows["guessing"], "10", "50", "42")
    assert rewards == [pytest.approx(1 / 3)] and turns == [3]
    assert "10<eos><|end|><|user|>more<|end|><|assistant|>50<eos><|end|><|user|>less" in text


def test_tools_are_called_by_the_package(rollouts, rows):
    call = f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'x': 12, 'y': 30}})}</tool_call>"
    rewards, turns, text = lead(rollouts, rows["tools"], call, "42")
    assert rewards == [1.0] and turns == [2]
    assert '"name": "add", "description": "Add two numbers."' in text and "<|user|>42<|end|>" in text


def test_an_empty_reply_and_a_full_context_are_the_policys_doing(rollouts, rows):
    assert lead(rollouts, rows["sums"], "")[:2] == ([0.0], [1])
    rewards, turns, _ = lead(rollouts, rows["guessing"], *["9" * 190] * 30)
    assert rewards == [pytest.approx(1 / turns[0])]


@pytest.mark.parametrize(
    ("world", "reply", "fault"),
    [
        ("guessing", "0", "InfraError: its server is gone"),
        ("late", "1", "TimeoutError: its own time limit"),
        ("broken", "42", "a reward function raised"),
    ],
)
def test_a_world_that_fails_or_hangs_and_a_verifier_that_raises_are_no_rewards(rollouts, rows, world, reply, fault):
    with pytest.raises(AgentFailed, match=f"environment {HOME}:all_of_them: {fault}"):
        lead(rollouts, rows[world], reply)


@pytest.fixture
def own_signal_handlers():
    """Put this process's handlers back: an environment that is made here takes those for its own end."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_rubric_that_compares_rollouts_is_refused(own_signal_handlers):
    rollout = Rollout(f"{HOME}:compared", {})
    with pytest.raises(ValueError, match="its rubric compares rollouts"):
        asyncio.run(rollout("http://127.0.0.1:1/v1", "key", {}))
