import builtins
import json
import os
import sys
from decimal import Decimal

import pytest

from megatron_rl.import_path import resolve
from megatron_rl.rollout.rewards import exact_match, find_last_number, last_number, tagged_answer


def score(reward, completion, answer, **data):
    return reward("prompt", completion, [1], [2], answer=answer, **data)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("12", "12", 1.0),
        ("  12 \n", "12", 1.0),
        ("\n12\n3+4=7", "12", 1.0),  # a model without a stop token goes on after the answer
        ("120", "12", 0.0),
        ("1", "12", 0.0),
        ("", "12", 0.0),
        ("a\nb\nc", "a\nb", 1.0),
        ("a\nc", "a\nb", 0.0),
        ("a", "a\nb", 0.0),
    ],
)
def test_exact_match_compares_the_first_line(completion, answer, reward):
    assert score(exact_match, completion, answer) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 42.", "42"),
        ("1,234,567 in all", "1234567"),
        ("costs $12.50", "12.50"),
        ("#### -7", "-7"),
        ("the result is -3", "-3"),
        ("8 - 5", "5"),
        ("8-5", "5"),
        ("f(x)-5", "5"),
        ("x-5", "5"),
        ("from 5 to -3", "-3"),
        ("= \u22124", "-4"),
        ("first 3, then 4, 5", "5"),
        ("12,34", "34"),
    ],
)
def test_last_number_of_a_text(text, number):
    assert find_last_number(text) == Decimal(number)


def test_last_number_compares_values_not_spellings():
    assert score(last_number, "it is 1000.0", "1,000") == 1.0
    assert score(last_number, "no idea", "1") == 0.0
    assert score(last_number, "70", "18 + 54 = #### 72") == 0.0


def test_tagged_answer_takes_the_last_tags():
    assert score(tagged_answer, "<answer>3</answer> no: <answer> 4\n</answer>", "4") == 1.0
    assert score(tagged_answer, "4", "4") == 0.0


def test_prompt_without_a_usable_answer_is_an_error_not_a_reward():
    with pytest.raises(ValueError, match="has no 'answer'"):
        exact_match("p", "1", [], [], task="sums")
    with pytest.raises(ValueError, match="is blank"):
        score(exact_match, "", " ")
    with pytest.raises(ValueError, match="holds no number"):
        score(last_number, "1", "one")


def test_import_path_errors_name_key_value_and_cause():
    assert resolve("megatron_rl.rollout.rewards:exact_match", key="rollout.reward") is exact_match
    for path, cause in [
        ("exact_match", "package.module:name"),
        ("megatron_rl.no_such:f", "No module named 'megatron_rl.no_such'"),
        ("megatron_rl.rollout.rewards:exact", "has no 'exact'"),
    ]:
        with pytest.raises(ValueError, match=f"rollout.reward = '{path}'.*{cause}"):
            resolve(path, key="rollout.reward")


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A user's file beside the config, which says so when it is run."""
    (tmp_path / "my_rewards.py").write_text(
        "import builtins\nbuiltins.my_rewards_ran = True\nfrom shutil import rmtree\n"
        "from megatron_rl.rollout.rewards import last_number\n"
        "def length(completions, **_): return float(len(completions))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(builtins, "my_rewards_ran", False, raising=False)
    yield
    sys.modules.pop("my_rewards", None)


def test_module_that_nobody_declared_is_not_even_imported(own_module):
    with pytest.raises(ValueError) as refused:
        resolve("my_rewards:length", key="rollout.reward", import_from=["my_project"])
    for part in (
        "rollout.reward = 'my_rewards:length': module my_rewards is not in megatron_rl or run.import_from",
        "= ['my_project']",
        "set run.import_from=[my_project,my_rewards].",
    ):
        assert part in str(refused.value)
    assert not builtins.my_rewards_ran


def test_declared_module_is_imported_and_so_are_those_below_it(own_module):
    assert resolve("my_rewards:length", key="k", import_from=["my_rewards"])(completions="abc") == 3.0
    assert resolve("my_rewards:last_number", key="k", import_from=["my_rewards"]) is last_number
    assert resolve("os.path:join", key="k", import_from=["os", "posixpath"]) is os.path.join
    for near in ("my", "my_rewards.sub", "my_rewards_too"):
        with pytest.raises(ValueError, match="is not in megatron_rl or run.import_from"):
            resolve("my_rewards:length", key="k", import_from=[near])
    assert resolve("json:dumps", key="k", import_from=None) is json.dumps, "code may name what it likes"


def test_what_a_declared_module_has_only_imported_is_refused(own_module):
    with pytest.raises(ValueError, match="is defined in shutil, which is not in .*run.import_from=.my_rewards,shutil."):
        resolve("my_rewards:rmtree", key="data.train", import_from=["my_rewards"])
