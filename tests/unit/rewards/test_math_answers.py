"""Mathematical answers that are right however they are written, and others that are not."""

from pathlib import Path

import pytest
import yaml

from megatron_rl.rewards import mathematics
from tests.kit.examples import IS_THOROUGH
from tests.kit.optional import later

later("math_verify", reason="math-verify is not installed: pip install 'megatron-rl[math]'")
ANSWERS = yaml.safe_load((Path(__file__).parent / "math_answers.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2, 3))])
def test_answers_are_right_or_wrong_whatever_their_form(part):
    mathematics.warm_up()
    wrong = []
    for case in ANSWERS[part::4]:
        for is_right, answers in ((True, case["right"]), (False, case["wrong"])):
            for answer in answers:
                if mathematics.is_right(case["answer"], f"So it is \\boxed{{{answer}}}.") != is_right:
                    wrong.append((case["answer"], answer, is_right))
    assert not wrong


STRANGE = [
    "}{",
    "\\text{",
    "$$$",
    "%",
    ".",
    "\\boxed{",
    "a\\\\b",
    "\\frac",
    "[1, 2",
    "二",
    "4 \\",
    "\\begin{x}",
    '"',
    "**",
]


def test_an_answer_that_repeats_the_right_one_is_right_whatever_that_is():
    mathematics.warm_up()
    for wanted in [*STRANGE, *(case["answer"] for case in ANSWERS[:: 1 if IS_THOROUGH else 4])]:
        assert mathematics.is_right(wanted, f"It is $\\boxed{{{wanted}}}$."), wanted
        assert mathematics.is_right(wanted, wanted), wanted


def test_a_right_answer_without_any_mathematics_is_compared_as_text():
    reply = {"prompt": "", "prompt_ids": [], "completion_ids": []}
    assert mathematics.math_answer(completions="It is \\boxed{%}.", answer="%", **reply) == 1.0
    assert mathematics.math_answer(completions="It is \\boxed{4}.", answer="%", **reply) == 0.0


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("The answer is Paris.", 1.0),
        ("Answer: **Paris**", 1.0),
        ("paris", 1.0),
        ("Of these, the capital of France is Paris.", 1.0),
        ("**Answer:** Paris", 1.0),
        ("The answer is Pairs.", 0.0),
        ("The answer is not Paris.", 0.0),
        ("The answer is Paris or London.", 0.0),
        ("\\boxed{London} <think>\n\\boxed{Paris}", 0.0),
        ("<think>\\boxed{Paris}</think>\nIt is \\boxed{London}.", 0.0),
        ("<think>\\boxed{London}</think>\nIt is \\boxed{Paris}.", 1.0),
        ("<think>It is \\boxed{Paris}", 0.0),
        ("It is \\boxed{Paris}</think>", 0.0),
    ],
)
def test_an_answer_behind_a_thought_is_scored_and_one_inside_is_not(reply, reward):
    assert mathematics.math_answer("", reply, [], [], answer="Paris") == reward
