"""Known tasks: rows in their published form become prompts, and a countdown answer is read, never run."""

import json

import pytest

from megatron_rl.data.recipes import code, countdown, countdown_reward, gsm8k, last_boxed, math
from megatron_rl.data.tasks import NUMBER_INSTRUCTION
from megatron_rl.rewards import last_number
from megatron_rl.rewards.code import passes


def lines(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_gsm8k_answer_is_what_follows_the_marks(tmp_path):
    source = lines(
        tmp_path / "gsm8k.jsonl",
        {"question": "How many?", "answer": "12 + 30 = <<12+30=42>>42\n#### 1,042"},
        {"question": "Left?", "answer": "#### -3"},
    )
    first, other = gsm8k(source)
    assert first["messages"] == [{"role": "user", "content": f"How many?\n{NUMBER_INSTRUCTION}"}]
    assert (first["answer"], other["answer"]) == ("1042", "-3")
    assert last_number("", "so it is 1,042.", [], [], **first) == 1.0
    assert len(gsm8k(source, count=1)) == 1
    bad = lines(tmp_path / "bad.jsonl", {"question": "a", "answer": "42"})
    with pytest.raises(ValueError, match="row 1: its answer has no ####"):
        gsm8k(bad)
    with pytest.raises(ValueError, match="row 1: has problem and no 'answer'"):
        gsm8k(lines(tmp_path / "other.jsonl", {"problem": "a"}))


def test_math_takes_the_last_box_and_keeps_what_can_be_compared(tmp_path):
    source = lines(
        tmp_path / "math.jsonl",
        {"problem": "a", "solution": r"\boxed{1} and then \boxed{42}.", "level": "Level 1"},
        {"problem": "b", "solution": r"\boxed{\frac{1}{2}}", "level": "Level 2"},
        {"problem": "c", "answer": "-7", "level": 5},
        {"problem": "c", "answer": 0, "level": 4},
        {"problem": "e", "answer": "1,2", "level": 4},
        {"problem": "e", "solution": r"\boxed{-1,234.5}", "level": 4},
        {"problem": "d", "solution": r"\boxed{x + 1}", "level": "Level ?"},
    )
    assert [p["answer"] for p in math(source)] == ["42", "-7", "0", "-1,234.5"]
    assert [p["answer"] for p in math(source, levels=[1])] == ["42"]
    whole = math(source, numbers_only=False)
    assert [p["answer"] for p in whole] == ["42", r"\frac{1}{2}", "-7", "0", "1,2", "-1,234.5", "x + 1"]
    assert whole[0]["messages"][0]["content"].endswith(r"\boxed{}.")


@pytest.mark.parametrize(
    ("text", "content"), [(r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{", ""), ("none", ""), ("}", "")]
)
def test_box_is_read_to_its_own_bracket(text, content):
    assert last_boxed(text) == content


def right(problem, text):
    return countdown_reward("", text, [], [], **problem)


def test_every_countdown_problem_is_solved_by_its_answer():
    problems = countdown(seed=1, count=50, numbers=4)
    assert problems == countdown(seed=1, count=50, numbers=4) != countdown(seed=2, count=50, numbers=4)
    for problem in problems:
        assert 1 <= problem["target"] <= 100 and len(problem["numbers"]) == 4
        assert right(problem, f"first <answer>0</answer> then <answer>{problem['answer']}</answer>") == 1.0
    with pytest.raises(ValueError, match="numbers = 9: must be in"):
        countdown(numbers=9)
    for wrong in ({"most": 0}, {"largest": 0}):
        with pytest.raises(ValueError, match="must be at least 1; no problem has a target below 1"):
            countdown(count=1, **wrong)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("(3 + 4) * 6 = 42", 1.0),
        ("6*4+6*3", 0.0),  # 6 twice
        ("42", 0.0),
        ("(3 + 4) / 6", 0.0),
        ("3.0 + 4 * 6", 0.0),
        ("__import__('os').mkdir('x')", 0.0),
        ("3 ** 4 ** 6", 0.0),
        ("(" * 5000, 0.0),
        ("9" * 5000, 0.0),
        ("7 * 6 # 3 4", 0.0),  # what is not computed is not used
        ("3_4 + 8 # 6", 0.0),
    ],
)
def test_countdown_takes_any_solution_over_the_given_numbers(answer, reward):
    assert right({"numbers": [6, 3, 4], "target": 42}, f"<answer>{answer}</answer>") == reward
    assert right({"numbers": [6, 3, 4], "target": 42}, answer) == 0.0, "without the tags it is no answer"


@pytest.mark.parametrize("answer", ["3_4 + 6", "4 * 10 # 3 6", "4 * 6 + 16 # 3"])
def test_countdown_counts_the_numbers_that_are_computed(answer):
    assert right({"numbers": [6, 3, 4], "target": 40}, f"<answer>{answer}</answer>") == 0.0
    assert right({"numbers": [3, 4], "target": 7}, "<answer>3 + 4 # and 5</answer>") == 0.0
    assert right({"numbers": [3, 4, 5], "target": 7}, "<answer>3 + 4 # and 5</answer>") == 0.0


DOUBLE = "```python\ndef twice(n):\n    return n + n\n```"
DOUBLE_INPUT = "```python\nprint(2 * int(input()))\n```"
HUNDREDS = 5000
PROGRAMS = [
    ({"problem": "Double.", "tests": [{"input": "2", "output": "4"}, {"input": "0\n", "output": "0"}]}, DOUBLE_INPUT),
    ({"problem": "Double.", "tests": {"input": ["2"], "output": ["4"]}}, DOUBLE_INPUT),
    ({"problem": "twice(n)", "tests": ["assert twice(2) == 4", "assert twice(0) == 0"]}, DOUBLE),
    (
        {
            "question": "Double.",
            "input_output": json.dumps({"inputs": ["2\n", ["3"], "9" * HUNDREDS], "outputs": ["4\n", ["6"], "?"]}),
            "solutions": "[]",
        },
        "print(2 * int(input()))",
    ),
    (
        {
            "text": "Double.",
            "code": "",
            "test_setup_code": "two = 2",
            "test_list": ["assert twice(two) == 4", "assert twice(3) == 6"],
        },
        DOUBLE,
    ),
    (
        {"prompt": "Double.", "test_imports": ["import math"], "test_list": ["assert twice(math.floor(2.5)) == 4"]},
        DOUBLE,
    ),
    (
        {
            "task_id": "HumanEval/0",
            "prompt": 'def twice(n: int) -> int:\n    """Double."""\n',
            "entry_point": "twice",
            "canonical_solution": "    return n + n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
        },
        DOUBLE,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "reply"), PROGRAMS, ids=lambda value: " ".join(value) if isinstance(value, dict) else ""
)
def test_programs_rows_of_each_form_are_passed_by_a_right_program_alone(row, reply, tmp_path):
    (prompt,) = code(lines(tmp_path / "rows.jsonl", row), most_tests=2)
    (message,) = prompt.pop("messages")
    assert "Double" in message["content"] or "twice(n)" in message["content"]
    assert "```python block" in message["content"] and 1 <= len(prompt["tests"]) <= 2
    assert passes("", reply, [], [], **prompt) == 1.0
    wrong = reply.replace("n + n", "n").replace("2 * ", "")
    assert passes("", wrong, [], [], **prompt) == 0.0


def test_rows_whose_tests_cannot_be_run_are_left_out_and_others_refused(tmp_path):
    called = {"question": "q", "input_output": json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [1]})}
    untested = [{"question": "q", "input_output": given} for given in ("", "{}", json.dumps({"inputs": []}))]
    huge = {"question": "q", "input_output": '{"inputs": [[' + "9" * HUNDREDS + ']], "outputs": ["1"]}'}
    source = lines(tmp_path / "apps.jsonl", called, *untested, huge)
    (kept,) = code(source)
    assert kept["tests"] == [{"input": "9" * HUNDREDS, "output": "1"}]
    assert "standard input" in kept["messages"][0]["content"]
    with pytest.raises(
        ValueError, match="row 1: has question and none of tests, input_output, test_list and entry_point"
    ):
        code(lines(tmp_path / "other.jsonl", {"question": "q"}))
