"""Agents of a framework, unmodified: of all that its model was asked and gave, nothing is lost or trained twice."""

import asyncio

import pytest

from megatron_rl.agents import AgentWorkflow
from megatron_rl.config import GenerationConfig
from tests.kit.optional import later
from tests.kit.replies import RecordingEngine, check_trajectory
from tests.kit.tokenizers import make_tokenizer

later("smolagents", reason="smolagents is not installed: pip install smolagents")
AGENTS = "tests.unit.smol_agents"


def call(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call><eos>'


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("agent", "replies"),
    [
        (f"{AGENTS}:calling", [call("add", '{"x": 12, "y": 30}'), call("final_answer", '{"answer": "42"}')]),
        (
            f"{AGENTS}:in_code",
            ["Thought: add.\n<code>\nz = add(12, 30)\n</code><eos>", "<code>\nfinal_answer(z)\n</code><eos>"],
        ),
    ],
)
def test_an_agent_of_smolagents_is_trained_on_what_it_was_served(agent, replies):
    tokenizer = make_tokenizer()
    rest = iter(replies)
    engine = RecordingEngine(tokenizer, script=lambda _: next(rest))
    workflow = AgentWorkflow(lambda **_: 0.0, GenerationConfig(max_new_tokens=200), tokenizer, agent, 40_000)
    trajectories = asyncio.run(workflow.arun_episode(engine, {"messages": []}))
    assert [t.reward for t in trajectories] == [1.0] * len(trajectories) and len(engine.served) == 2
    assert sum(len(check_trajectory(t, engine.served)) for t in trajectories) == 2
    trained = sum(int(t.loss_mask.sum()) for t in trajectories)
    assert trained == sum(reply.output_len for _, reply in engine.served)
