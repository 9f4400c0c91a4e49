from decimal import Decimal

import pytest

from megatron_rl.rollout.import_path import resolve
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
        ("no_such_package.rewards:f", "No module named 'no_such_package'"),
        ("megatron_rl.rollout.rewards:exact", "has no 'exact'"),
    ]:
        with pytest.raises(ValueError, match=f"rollout.reward = '{path}'.*{cause}"):
            resolve(path, key="rollout.reward")
