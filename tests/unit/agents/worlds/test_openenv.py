"""Environments of a real OpenEnv server, over its websocket: actions, tools, sessions, and how they fail."""

import asyncio
import json
from pathlib import Path

import pytest

from megatron_rl.agents.worlds.openenv import OpenEnv
from megatron_rl.agents.worlds.openenv_session import OpenEnvFailed, Session
from megatron_rl.config import GenerationConfig
from megatron_rl.workflows import MultiTurnWorkflow
from tests.kit.http import program_at_a_port
from tests.kit.optional import later
from tests.kit.replies import RecordingEngine, check_trajectory
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S

later("openenv.core", reason="openenv-core is not installed: see requirements/worlds.txt")
pytestmark = pytest.mark.slow

WORLDS = str(Path(__file__).with_name("openenv_worlds.py"))


@pytest.fixture(scope="module")
def goes_on(tmp_path_factory):
    """The file for which an environment that hangs waits."""
    return tmp_path_factory.mktemp("openenv") / "goes on"


@pytest.fixture(scope="module")
def server(goes_on):
    with program_at_a_port(WORLDS, str(goes_on)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def guesses(server):
    return f"{server}/guess"


def play(replies, url, *, samples=1, seed=42, **options):
    """Lead dialogues in which the policy says these, one after the other."""
    tokenizer = make_tokenizer()
    engine = RecordingEngine(tokenizer)
    engine.script = lambda req: replies[tokenizer.decode(req.input_ids).count("<|assistant|>") - 1] + "<eos>"
    gconfig = GenerationConfig(n_samples=samples, max_new_tokens=400)
    deadlines = {"session_timeout_s": LATE_S, "call_timeout_s": LATE_S}
    options = {"environment_args": {"url": url, **deadlines, **options}}
    workflow = MultiTurnWorkflow(lambda **_: 1 / 0, gconfig, tokenizer, OpenEnv, 20_000, **options)
    data = {"messages": [{"role": "user", "content": "Play."}], "reset": {"seed": seed}}
    trajectories = asyncio.run(workflow.arun_episode(engine, data))
    for trajectory in trajectories:
        check_trajectory(trajectory, engine.served)
    return [t.reward for t in trajectories], [tokenizer.decode(t.input_ids) for t in trajectories]


def test_actions_are_objects_in_replies_and_the_environments_rewards_count(guesses):
    # Two dialogues at a server of one session: the second waits for the first one's end.
    replies = ['I try {"number": 10}.', '{"number": 50}', '{"number": 42}']
    rewards, texts = play(replies, guesses, samples=2, shown="hint")
    assert rewards == [pytest.approx(1 / 3)] * 2
    for text in texts:
        assert text.startswith("<|user|>Play.<|end|><|user|>guess from 0 to 99<|end|><|assistant|>I try")
        assert "<|user|>more<|end|>" in text and "<|user|>less<|end|>" in text and text.endswith('{"number": 42}<eos>')


def test_what_does_not_fit_is_told_to_the_policy_and_costs_no_step(guesses):
    rewards, (text,) = play(["hello", '{"number": "x"}', '{"number": 7}'], guesses, seed=7)
    assert rewards == [1.0]
    assert "<|user|>error: the reply has no JSON object<|end|>" in text
    assert "<|user|>error: number: Input should be a valid integer" in text
    assert '<|user|>{"hint": "guess from 0 to 99"}<|end|>' in text, "without `shown` the whole observation"


def test_a_replys_text_is_the_field_that_takes_it(guesses):
    assert play(["42"], guesses, action="number")[0] == [1.0]


def test_an_environment_that_crashes_fails_the_sample_and_is_no_reward(guesses):
    with pytest.raises(OpenEnvFailed, match="/ws: step: EXECUTION_ERROR: its disk is full"):
        play(["-1"], guesses, action="number")


def test_an_environment_that_hangs_fails_the_sample_and_is_no_reward(guesses, goes_on, monkeypatch):
    step = Session.step

    async def hurried(self, action):
        self.call_timeout_s = 0.5
        return await step(self, action)

    monkeypatch.setattr(Session, "step", hurried)
    with pytest.raises(OpenEnvFailed, match="/ws: step took longer than 0.5 s"):
        play(["-3"], guesses, action="number")
    goes_on.touch()  # for the next test: the server has one session


def test_a_server_that_has_no_free_session_is_waited_for_so_long(guesses):
    async def beside_another():
        other, mine = (Session(guesses, session_timeout_s=s, call_timeout_s=LATE_S) for s in (LATE_S, 0.5))
        try:
            await other.reset({"seed": 1})
            await mine.reset({"seed": 2})
        finally:
            await other.close()
            await mine.close()

    with pytest.raises(OpenEnvFailed, match="/ws: gave no session within 0.5 s"):
        asyncio.run(beside_another())


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_of_an_environment_are_actions_with_rewards(server):
    replies = [call("put", item="stone") + call("sing"), call("put", item="apple"), call("put", item="pear") * 2]
    rewards, (text,) = play(replies, f"{server}/shop", with_tools=True)
    assert play(["no call"], f"{server}/shop", with_tools=True)[0] == [0.0]
    assert rewards == [1.0], "half for each fruit, the last of them after the end"
    assert '"name": "put", "description": "Put a fruit into the basket."' in text
    assert "<|user|>error: Error calling tool 'put': stone is no fruit<|end|>" in text
    assert "<|user|>error: there is no tool 'sing', only put<|end|>" in text and "<|user|>apple<|end|>" in text


def test_actions_that_are_text_and_calls_are_refused():
    with pytest.raises(ValueError, match="action = 'message' and with_tools = true"):
        OpenEnv({}, url="http://127.0.0.1:1", action="message", with_tools=True)


def test_a_server_that_dies_or_is_not_there_fails_the_sample(guesses):  # the last one: it ends the server of all
    with pytest.raises(OpenEnvFailed, match="/ws: step: the server is gone"):
        play(["-2"], guesses, action="number")
    with pytest.raises(OpenEnvFailed, match="/ws: ClientConnectorError"):
        play(["1"], guesses, action="number")
