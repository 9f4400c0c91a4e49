"""What a user's reward does wrong is said in one line with its file and line, before the run and in it."""

import asyncio
import re
import sys

import pytest

from megatron_rl.config import GenerationConfig, RolloutConfig, RunConfig, TrainConfig
from megatron_rl.rewards.recipe import Recipe, ingredients
from megatron_rl.rewards.reward_service import RewardFailed, RewardService
from megatron_rl.rollout.factory import TriedReward, check_reward
from megatron_rl.types import LLMResponse
from megatron_rl.workflows import RLVRWorkflow

ROW = {"input_ids": [1, 2], "answer": "4", "id": 7}
REWARDS = """
import os, sys
def raises(completions, answer, **data):
    return 1.0 / data["weight"]
def in_a_helper(**data):
    return helper(data)
def helper(data):
    return int("four")
def none(**_): pass
def text(**_): return "1.0"
def nan(**_): return float("nan")
def lists(completions, **_): return [1.0 for _ in completions]
def of_trl(prompts, completions, **kwargs): return [0.0] * len(completions)
def leaves(**_): sys.exit("bye")
def dies(**_): os._exit(0)
async def awaits(**_): return None
def right(prompt, completions, prompt_ids, completion_ids, answer, **_): return completions == answer
def at_first(completions, **_): return {"right": 1.0}[completions]
"""
LINES = {line: number for number, line in enumerate(REWARDS.splitlines(), start=1)}


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "my_faulty_rewards.py"
    path.write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("my_faulty_rewards", None)


def config(name):
    options = RolloutConfig(reward=f"my_faulty_rewards:{name}")
    return TrainConfig(
        generation=GenerationConfig(n_samples=2), rollout=options, run=RunConfig(import_from=["my_faulty_rewards"])
    )


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("raises", '    return 1.0 / data["weight"]', "KeyError: 'weight'"),
        ("in_a_helper", '    return int("four")', "invalid literal for int"),
        ("none", "def none(**_): pass", "returned None, of type NoneType; must be a finite number"),
        ("text", 'def text(**_): return "1.0"', "returned '1.0', of type str; must be a finite number"),
        ("nan", 'def nan(**_): return float("nan")', "returned nan, of type float; must be a finite number"),
        ("lists", "def lists(completions, **_): return [1.0 for _ in completions]", "returned [1.0], of type list; "),
        (
            "of_trl",
            "def of_trl(prompts, completions, **kwargs): return [0.0] * len(completions)",
            "of_trl() missing 1 required positional argument: 'prompts'; it is called for one reply at a time",
        ),
        ("leaves", 'def leaves(**_): sys.exit("bye")', "SystemExit: bye"),
        ("dies", "", "a worker died"),
    ],
)
def test_a_wrong_reward_is_one_line_with_the_users_file_and_line(file, name, line, words):
    with pytest.raises(ValueError) as told:
        check_reward(config(name), ROW, None)
    message = str(told.value)
    assert message.startswith(f"rollout.reward = 'my_faulty_rewards:{name}': ") and "\n" not in message
    assert words in message and (f"{file}:{LINES[line]}" if line else "") in message
    assert "the fields input_ids, answer, id and the reply '4'" in message and message.endswith("or the prompts.")
    assert ("reward(prompt, completions, prompt_ids, completion_ids, **data)" in message) == (
        name in ("none", "text", "lists", "of_trl")
    ), "who returns another thing is told what is wanted"


def test_a_right_reward_is_computed_for_the_rows_own_answer(file):
    assert check_reward(config("right"), ROW, None) == TriedReward(1.0, reached=[], not_tried=[])
    awaits = TriedReward(None, reached=[], not_tried=["my_faulty_rewards:awaits"])
    assert check_reward(config("awaits"), ROW, None) == awaits, "nobody knows what it waits for"


def test_a_reward_that_raises_sometimes_is_warned_of_once_with_its_line(file, caplog):
    found = ingredients("rollout.recipe", [{"reward": "my_faulty_rewards:at_first"}], None)
    service = RewardService([ingredient.task for ingredient in found], workers=1)
    workflow = RLVRWorkflow(Recipe(found, service), GenerationConfig(), None)

    def score(text):
        tokens = {"input_tokens": [1], "output_tokens": [2], "output_logprobs": [0.0], "output_versions": [0]}
        return asyncio.run(workflow.reward(LLMResponse(**tokens, stop_reason="stop", text=text), {}))

    for text in ("wrong", "wrong", "right"):
        try:
            assert score(text) == 1.0
        except RewardFailed as failure:
            assert failure.place == f"{file}:{len(LINES)}"
    service.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    place = re.escape(str(file))
    assert re.search(rf"KeyError: 'wrong' \(reward at_first, {place}:\d+\); .* rollout/reward_failed/at_first", warning)
