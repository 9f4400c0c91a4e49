"""Rewards of dialogues stand where they arose: on the last token of the reply that has earned them."""

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest
import torch

from megatron_rl.agents import AgentWorkflow
from megatron_rl.config import GenerationConfig
from megatron_rl.rollout.events import Episode
from megatron_rl.rollout.groups import as_group
from megatron_rl.rollout.journal import Restored, RolloutJournal
from megatron_rl.types import LLMResponse
from megatron_rl.workflows import MultiTurnWorkflow, ToolUseWorkflow
from megatron_rl.workflows.conversation import Conversation
from megatron_rl.workflows.environments import Environment, Turn
from megatron_rl.workflows.tools import Calculator, Rewarded
from tests.kit.replies import RecordingEngine
from tests.unit.agent_relay import here

CHAT = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|>"
    "{{ message['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


def replies_of(trajectory):
    """The places of each reply's last token, and its reward there. All other tokens have none."""
    column, mask = trajectory.tokens["turn_rewards"], trajectory.loss_mask
    assert column.dtype == torch.float32 and len(column) == len(mask)
    ends = mask & ~torch.cat([mask[1:], torch.tensor([False])])
    assert not column[~ends].any()
    return column[ends].tolist()


class Paying(Environment):
    """Pays for each turn by its number, and at the end."""

    def __init__(self, data, turns=3, at_end=0.0):
        super().__init__(data)
        self.turns, self.at_end, self.number = turns, at_end, 0

    async def step(self, reply, score):
        self.number += 1
        over = self.number == self.turns
        return Turn(messages=() if over else [{"role": "user", "content": "on"}], reward=self.number / 4)

    async def ended(self):
        return self.at_end


MISTAKES = {
    "a number": ("step", lambda: 1.0, "returned 1.0, a float; must return a Turn(messages=[...], reward=...)"),
    "gym's tuple": ("step", lambda: ([], 1.0, True, {}), "a tuple; must return a Turn"),
    "None": ("step", lambda: None, "returned None, a NoneType; must return a Turn"),
    "text as messages": ("step", lambda: Turn(messages="on"), "Turn.messages = 'on', a str; must return a list of"),
    "texts as messages": ("step", lambda: Turn(messages=["on"]), "a list; must return a list of messages, each a dict"),
    "no reward": ("step", lambda: Turn(reward=None), "returned Turn.reward = None, a NoneType; must return a number"),
    "text as a reward": ("step", lambda: Turn(reward="1"), "returned Turn.reward = '1', a str; must return a number"),
    "an end without a number": ("ended", lambda: None, "returned None, a NoneType; must return a number"),
    "an opening that is text": ("opening", lambda: "2 + 2?", "returned '2 + 2?', a str; must return a prompt: a dict"),
    "not async": ("step", None, "returned Turn(messages=(), reward=0.0), a Turn; must return what can be awaited"),
    "an end that is not async": ("ended", None, "a Turn; must return what can be awaited: make it a coroutine func"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_method_of_an_environment_that_returns_something_else_is_told_with_its_line(tokenizer, what):
    name, gives, words = MISTAKES[what]

    async def method(self, *_):
        return gives()

    def plain(self, *_):
        return Turn()

    mine = type("Mine", (Paying,), {name: method if gives else plain})
    workflow = MultiTurnWorkflow(lambda **_: 0.0, GenerationConfig(max_new_tokens=6), tokenizer, mine, max_tokens=400)
    with pytest.raises(TypeError) as told:
        asyncio.run(workflow.arun_episode(RecordingEngine(tokenizer, seed=3), {"messages": QUESTION}))
    line = (method if gives else plain).__code__.co_firstlineno
    assert f"({__file__}:{line}) " in str(told.value) and words in str(told.value)


def played(tokenizer, *, max_turns=8, max_tokens=400, **environment):
    workflow = MultiTurnWorkflow(
        lambda **_: 0.0,
        GenerationConfig(n_samples=2, max_new_tokens=6),
        tokenizer,
        Paying,
        max_tokens=max_tokens,
        max_turns=max_turns,
        environment_args=environment,
    )
    return asyncio.run(workflow.arun_episode(RecordingEngine(tokenizer, seed=3), {"messages": QUESTION}))


def test_each_turns_reward_is_its_replys_and_that_of_the_end_is_the_last_ones(tokenizer):
    for trajectory in played(tokenizer):
        assert replies_of(trajectory) == [0.25, 0.5, 0.75] and trajectory.reward == 1.5
    for trajectory in played(tokenizer, at_end=10.0):
        assert replies_of(trajectory) == [0.25, 0.5, 10.75] and trajectory.reward == 11.5
    for trajectory in played(tokenizer, max_turns=2, at_end=10.0):
        assert replies_of(trajectory) == [0.25, 10.5] and trajectory.reward == 10.75
    group = as_group(played(tokenizer, turns=20, max_tokens=120))
    assert torch.equal(group.sums_of_tokens(group["turn_rewards"]), group["rewards"]), "also where the room ends"


def test_the_doors_of_the_documentation_pay_one_by_one(tokenizer):
    page = (Path(__file__).parents[3] / "docs" / "workflows.md").read_text(encoding="utf-8")
    (code,) = (part for part in page.split("```python\n")[1:] if "class Doors(" in part)
    names = {}
    exec(code.split("```")[0], names)
    for said, rewards in ((["L", "R", "R", "L"], [0.25] * 4), (["L", "L"], [0.25, 0.0]), (["R"], [0.0])):
        script = iter(said)
        engine = RecordingEngine(tokenizer, script=lambda _, script=script: next(script) + "<eos>")
        workflow = MultiTurnWorkflow(lambda **_: 0.0, GenerationConfig(), tokenizer, names["Doors"], 400)
        (trajectory,) = asyncio.run(workflow.arun_episode(engine, {"messages": QUESTION, "path": "LRRL"}))
        assert replies_of(trajectory) == rewards


class Clicks(Calculator):
    """Pays for a call that comes to more than ten."""

    async def __call__(self, expression):
        shown = await super().__call__(expression)
        return Rewarded(shown, 0.125) if float(shown) > 10 else shown


def test_a_tool_pays_for_the_reply_that_calls_it(tokenizer):
    def call(expression):
        return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'

    script = iter([call("12 + 30") + call("6 * 7") + "<eos>", call("1") + "<eos>", "42<eos>"])
    engine = RecordingEngine(tokenizer, script=lambda _: next(script))
    workflow = ToolUseWorkflow(
        lambda completions, **_: float(completions == "42"),
        GenerationConfig(max_new_tokens=400),
        tokenizer,
        {Clicks: {}},
        1500,
    )
    (trajectory,) = asyncio.run(workflow.arun_episode(engine, {"messages": QUESTION}))
    assert replies_of(trajectory) == [0.25, 0.0, 1.0] and trajectory.reward == 1.25
    assert "<|user|>42<|end|>" in tokenizer.decode(trajectory.input_ids), "what it shows is text like any other"


def reply_to(dialogue, count):
    columns = {"output_tokens": [7] * count, "output_logprobs": [-0.5] * count, "output_versions": [0] * count}
    return LLMResponse(input_tokens=list(dialogue.ids), **columns, stop_reason="stop")


def test_a_dialogues_rewards_go_the_way_of_its_tokens():
    dialogue = Conversation([1, 2])
    dialogue.take(reply_to(dialogue, 2))
    assert "turn_rewards" not in dialogue.trajectory(1.0).tokens, "where it alone has a reward there is no column"
    dialogue.earn(1.0)
    dialogue.add([3])
    dialogue.take(reply_to(dialogue, 1))
    dialogue.earn(4.0)
    dialogue.earn(0.5)
    dialogue.earn(2.0, end=4)  # the first reply's, heard of later

    def column(of):
        return of.trajectory(0.0).tokens["turn_rewards"].tolist()

    assert column(dialogue) == [0, 0, 0, 3, 0, 4.5]
    other_way = dialogue.fork(4)
    assert column(other_way) == [0, 0, 0, 3]
    other_way.take(reply_to(other_way, 1))
    other_way.earn(8.0)
    other_way.leave_out_before(4)
    assert column(other_way) == [0, 0, 0, 0, 8] and column(dialogue) == [0, 0, 0, 3, 0, 4.5]
    dialogue.take_back(4)
    assert column(dialogue) == [0, 0, 0, 3]
    empty = Conversation([1])
    empty.earn(1.0)
    assert column(empty) == [0], "nothing was written that could earn it"


def asked(base_url, api_key, messages):
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


def agent_run(tokenizer, *rewards):
    """Trajectories of an agent that goes on, then goes back to the first reply and goes on otherwise.

    rewards: what it returns, each time something else.
    """
    left = list(rewards)

    def agent(base_url, api_key, data):
        begun = [*data["messages"], asked(base_url, api_key, data["messages"])]
        for said in ("and?", "or?"):
            asked(base_url, api_key, [*begun, {"role": "user", "content": said}])
        return left.pop()

    gconfig = GenerationConfig(n_samples=len(rewards), max_new_tokens=20)
    workflow = AgentWorkflow(lambda **_: 7.0, gconfig, tokenizer, max_tokens=300, **here(agent))
    engine = RecordingEngine(tokenizer, seed=2)
    return asyncio.run(workflow.arun_episode(engine, {"messages": QUESTION, "sample_key": "k"}))


def test_an_agent_gives_each_reply_its_reward_and_a_dialogue_has_the_sum_of_its_own(tokenizer):
    on, otherwise = agent_run(tokenizer, [1.0, 0.25, 0.5])
    assert replies_of(on) == [1.0, 0.25] and on.reward == 1.25
    # Its first reply is the other dialogue's, and so is the reward.
    assert replies_of(otherwise) == [0.5] and otherwise.reward == 0.5
    assert on.sequence["sample"] == otherwise.sequence["sample"]
    as_group([on, otherwise])


def test_samples_of_agents_with_one_reward_and_with_several_are_one_group(tokenizer):
    trajectories = agent_run(tokenizer, None, 3.0, [1.0, 0.25, 0.5])
    found = sorted(replies_of(trajectory)[-1] for trajectory in trajectories)
    assert found == [0.25, 0.5, 3.0, 3.0, 7.0, 7.0], "one reward is that of each dialogue's last reply"
    group = as_group(trajectories)
    assert torch.equal(group.sums_of_tokens(group["turn_rewards"]), group["rewards"])


def test_an_agent_that_gives_another_number_of_rewards_is_told_how_many_replies_it_had(tokenizer):
    with pytest.raises(ValueError, match=r"agent .*relay: returned 2 rewards for 3 replies: must be one for each"):
        agent_run(tokenizer, [1.0, 2.0])


def test_a_run_that_was_killed_takes_the_rewards_of_turns_from_its_journal(tokenizer, tmp_path):
    group = as_group(played(tokenizer, at_end=1.0))
    stamp = {"rank": 0, "first_step": 0, "version": 4, "fingerprint": "f"}
    journal = RolloutJournal(tmp_path, run_attempt=1, **stamp)
    data = {"prompt_number": 3, "prompt_index": 3, "epoch": 0, "sample_key": "prompt 0/3"}
    journal.accepted(Episode(number=3, data=data, workflow=None), group)
    journal.close()
    restored = Restored(tmp_path, run_attempt=2, version=4, max_staleness=4, fingerprint="f")
    found = as_group(restored.take("prompt 0/3", version=4))
    assert torch.equal(found["turn_rewards"], group["turn_rewards"])
    assert torch.equal(found["rewards"], group["rewards"])
