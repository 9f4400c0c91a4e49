"""Programs in replies, and how they are run: as the judges of the field's benchmarks do."""

from pathlib import Path

import pytest
import yaml

from megatron_rl.rewards import code
from megatron_rl.rewards.program_text import compiles, find_program
from tests.kit.waiting import LATE_S

HERE = Path(__file__).parent


def cases(name):
    return yaml.safe_load((HERE / name).read_text(encoding="utf-8"))


def test_the_program_of_a_reply_is_the_block_that_its_tests_can_run():
    wrong = []
    for case in cases("replies_with_programs.yaml"):
        source = find_program(case["reply"], case["names"], reads_input=not case["names"])
        if ("right" in source and compiles(source)) != case["found"]:
            wrong.append((case["reply"], source))
    assert not wrong


def test_a_block_in_a_thought_that_the_prompt_opened_is_no_program():
    block = "```python\ndef f(x): return 1\n```"
    for thought in (block, "def f(x): return 1\n"):
        assert "def f" not in find_program(thought, ["f"], prompt="What is f?<think>\n")
    assert find_program(f"Hm.</think>\n{block}", ["f"], prompt="What is f?<think>\n") == "def f(x): return 1\n"


def passed(case):
    given = {"tests": case["tests"], "packages": case.get("packages", ()), "time_s": LATE_S}
    return code.passes("", f"```python\n{case['program']}\n```", [], [], **given) == 1.0


# Each runs in a process of its own: `make test` takes every third.
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))])
def test_programs_run_as_the_judges_of_benchmarks_run_them(part):
    wrong = [case["program"] for case in cases("programs.yaml")["run"][part::3] if passed(case) != case["right"]]
    assert not wrong


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))])
def test_functions_are_judged_whatever_else_their_program_does(part):
    wrong = [case["program"] for case in cases("programs.yaml")["call"][part::3] if passed(case) != case["right"]]
    assert not wrong


def test_what_is_printed_is_compared_by_lines_and_words_and_numbers_within_a_tolerance():
    outputs = cases("programs.yaml")["outputs"]
    assert [case for case in outputs if code.is_same_output(case[1], case[0]) != case[2]] == []


def test_tests_may_be_one_text_or_the_text_of_a_list():
    for tests in ("assert f(1) == 2", '["assert f(1) == 2"]'):
        assert code.passes("", "def f(x): return x + 1", [], [], tests=tests) == 1.0
        assert code.passes("", "def f(x): return x", [], [], tests=tests) == 0.0
    assert code.passes("", "print(int(input()) + 1)", [], [], tests='[{"input": "1", "output": 2}]') == 1.0


@pytest.mark.parametrize("test", [{"input": "1"}, {"input": {"a": 1}, "output": "1"}, "assert f("])
def test_a_test_that_cannot_be_run_is_refused_and_says_why(test):
    with pytest.raises(ValueError, match=r"tests: .*(has no 'output'|write it as text|is no Python)"):
        code.passes("", "print(1)", [], [], tests=[test])


def test_a_package_that_is_not_installed_is_refused():
    with pytest.raises(ValueError, match=r"packages = \['no_such'\]: 'no_such' is not installed"):
        code.passes("", "print(1)", [], [], tests=["assert f()"], packages=["no_such"])


@pytest.mark.parametrize("reply", ["", "<think>print()</think>", "<think>\n```python\nprint()\n```"])
def test_a_reply_without_a_program_passes_no_test(reply):
    assert code.passes("", reply, [], [], tests=[{"input": "", "output": ""}]) == 0.0
    assert code.passes("", reply, [], [], tests=["assert True"], partial=True) == 0.0
