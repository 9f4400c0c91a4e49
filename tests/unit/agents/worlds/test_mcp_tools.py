"""Tools of real MCP servers, over stdin and stdout and over HTTP: what they answer, and how they fail."""

import asyncio
import copy
import json
import os
import sys
from pathlib import Path

import pytest

from megatron_rl.agents.worlds.mcp_tools import Connection, McpTools
from megatron_rl.config import GenerationConfig
from megatron_rl.workflows import MultiTurnWorkflow
from tests.kit.http import program_at_a_port
from tests.kit.optional import later
from tests.kit.replies import RecordingEngine, check_trajectory
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S
from tests.unit.workflows.test_conversations import asked

later("mcp.server.mcpserver", reason="mcp is not installed: pip install 'megatron-rl[worlds]'")
pytestmark = pytest.mark.slow

SHOP = str(Path(__file__).with_name("mcp_shop.py"))
BY_PIPES = {"command": [sys.executable, SHOP], "env": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(replies, *servers, samples=1, call_timeout_s=LATE_S):
    """Lead dialogues in which the policy says these, one after the other; return them and what it was told."""
    tokenizer = make_tokenizer()
    engine = RecordingEngine(tokenizer)
    engine.script = lambda req: replies[tokenizer.decode(req.input_ids).count("<|assistant|>") - 1] + "<eos>"
    gconfig = GenerationConfig(n_samples=samples, max_new_tokens=400)
    workflow = MultiTurnWorkflow(
        lambda completions, **_: float(completions == "bye"),
        gconfig,
        tokenizer,
        McpTools,
        20_000,
        environment_args={"servers": list(servers), "call_timeout_s": call_timeout_s},
    )
    trajectories = asyncio.run(workflow.arun_episode(engine, asked("Go shopping.")))
    for trajectory in trajectories:
        check_trajectory(trajectory, engine.served)
    return trajectories, [tokenizer.decode(t.input_ids[~t.loss_mask]) for t in trajectories]


@pytest.fixture
def shop_url():
    with program_at_a_port(SHOP) as port:
        yield f"http://127.0.0.1:{port}/mcp"


SOON_S = 0.5


@pytest.fixture
def only_what_hangs_is_late(monkeypatch):
    """Give what answers at all as long as it needs; what never answers has the deadline of its connection."""
    ask = Connection._ask

    async def patient(self, coroutine, what):
        asked = copy.copy(self)  # as calls of one reply run beside each other
        if what not in ("calling nap", "calling hang", "a sign of life after a late hang"):
            asked.call_timeout_s = LATE_S
        return await ask(asked, coroutine, what)

    monkeypatch.setattr(Connection, "_ask", patient)


ERRANDS = [
    call("add", item="apples") + call("add", item="nothing"),
    call("add", item=7) + call("sing") + call("nap"),
    call("add", item="pears"),
    "bye",
]


def check_errands(heard):
    assert '"name": "add", "description": "Put an item into the basket."' in heard, "the template shows the schema"
    assert "<|user|>apples<|end|><|user|>error: Error executing tool add: there is no such item<|end|>" in heard
    assert "error: Error executing tool add: 1 validation error" in heard
    assert "error: there is no tool 'sing', only add, nap" in heard
    assert "<|user|>error: nap did not end within 0.5 s<|end|>" in heard, "the server lives: the call was too much"
    assert "<|user|>apples, pears<|end|>" in heard, "the server has kept its state"


def test_tools_of_a_program_are_called_and_their_errors_told_to_the_policy(only_what_hangs_is_late):
    trajectories, contexts = play(ERRANDS, BY_PIPES, samples=2, call_timeout_s=SOON_S)
    assert [t.reward for t in trajectories] == [1.0, 1.0]
    for heard in contexts:  # each dialogue has a server of its own: its basket has no apples of the other's
        check_errands(heard)


def test_tools_at_a_url_are_called_and_a_server_that_dies_fails_the_sample(shop_url, only_what_hangs_is_late):
    (trajectory,), (heard,) = play(ERRANDS, {"url": shop_url}, call_timeout_s=SOON_S)
    assert trajectory.reward == 1.0
    check_errands(heard)
    with pytest.raises(RuntimeError, match=f"MCP server {shop_url}: calling leave: "):
        play([call("leave"), "bye"], {"url": shop_url})
    with pytest.raises(RuntimeError, match=f"MCP server {shop_url}: connecting: "):
        play(["bye"], {"url": shop_url})


@pytest.mark.parametrize(
    ("tool", "what"), [("leave", "calling leave: .*losed"), ("hang", "a sign of life after a late hang took longer")]
)
def test_a_program_that_dies_or_hangs_fails_the_sample_and_is_no_reward(tool, what, only_what_hangs_is_late):
    with pytest.raises(RuntimeError, match=f"MCP server .*mcp_shop.py: {what}"):
        play([call(tool), "bye"], BY_PIPES, call_timeout_s=SOON_S)


def test_a_server_that_cannot_be_started_is_named():
    with pytest.raises(RuntimeError, match="MCP server no_such_program: connecting: FileNotFoundError"):
        play(["bye"], {"command": ["no_such_program"]})
    with pytest.raises(RuntimeError, match="MCP server .*-c pass: connecting: .*losed"):
        play(["bye"], {"command": [sys.executable, "-c", "pass"]})


def test_servers_of_the_same_tool_and_servers_without_an_address_are_refused():
    with pytest.raises(ValueError, match="has a tool add, as another has; run one"):
        play(["bye"], BY_PIPES, BY_PIPES)
    with pytest.raises(ValueError, match=r"servers: {}: must have either a command, and maybe env, or a url"):
        McpTools({}, servers=[{}])
