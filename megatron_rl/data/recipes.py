"""Functions that make prompts from published data sets, and rewards that match these prompts.

`source` is any source of megatron_rl.data.data_files: a file, a folder, or a name on the hub.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from typing import Any

from megatron_rl.data.data_files import read_rows
from megatron_rl.data.tasks import NUMBER_INSTRUCTION, TAG_INSTRUCTION
from megatron_rl.rewards import BOXED, NUMBER, answer_of, find_tagged, last_boxed
from megatron_rl.rewards.arithmetic import NotArithmetic, evaluate_expression, value_and_numbers

PROGRAM_INSTRUCTION = "Give the whole Python program in one ```python block."
INPUT_INSTRUCTION = "It reads the input from standard input and prints the output."
LEAST, MOST = 2, 6
"""Minimum and maximum count of numbers in a countdown problem."""
MOST_DIGITS = 30


def gsm8k(source: str = "hf:openai/gsm8k:main", split: str = "", count: int | None = None) -> list[dict[str, Any]]:
    """Load grade-school problems (GSM8K, arXiv 2110.14168).

    The source's rows have `question`, and an `answer` that ends like `#### 72`. Reward:
    megatron_rl.rewards:last_number.
    """
    prompts = []
    for number, row in enumerate(read_rows(source, key="source", split=split)[:count], start=1):
        _, found, answer = field_of(row, "answer", source, number).rpartition("####")
        if not found:
            raise ValueError(f"source = {source!r}, row {number}: its answer has no ####; give GSM8K's own rows.")
        question = field_of(row, "question", source, number)
        prompts.append(ask(f"{question}\n{NUMBER_INSTRUCTION}") | {"answer": answer.strip().replace(",", "")})
    return prompts


def math(
    source: str, split: str = "", count: int | None = None, numbers_only: bool = True, levels: list[int] | None = None
) -> list[dict[str, Any]]:
    """Load competition problems as in MATH (arXiv 2103.03874).

    The source's rows have `problem`, and `answer` or a boxed `solution`. numbers_only: keep only problems whose answer
    is a number, which megatron_rl.rewards:last_number can compare. levels: keep only these values of `level`, which is
    written as `Level 3` or 3.
    """
    prompts = []
    for number, row in enumerate(read_rows(source, key="source", split=split), start=1):
        given = "" if row.get("answer") is None else str(row["answer"])
        answer = given or last_boxed(field_of(row, "solution", source, number))
        # Excludes lists such as 1,2: last_number would compare only the last number.
        is_number = re.fullmatch(rf"[-\u2212]?(?:{NUMBER.pattern})", answer.strip()) is not None
        level = re.sub(r"\D", "", str(row.get("level", "")))
        if (numbers_only and not is_number) or (levels and level not in map(str, levels)):
            continue
        instruction = NUMBER_INSTRUCTION if numbers_only else f"Put the final answer into {BOXED}}}."
        problem = field_of(row, "problem", source, number)
        prompts.append(ask(f"{problem}\n{instruction}") | {"answer": answer.strip()})
    return prompts[:count]


def countdown(
    seed: int = 0, count: int = 1000, numbers: int = 3, largest: int = 20, most: int = 100
) -> list[dict[str, Any]]:
    """Make arithmetic problems: reach a target by using all given numbers with + - * /.

    There are `numbers` numbers in 1..largest, and targets are in 1..most. `answer` is one solution;
    megatron_rl.data.recipes:countdown_reward accepts any. Use different seeds for training and evaluation.
    """
    if not LEAST <= numbers <= MOST:
        raise ValueError(f"numbers = {numbers}: must be in [{LEAST}, {MOST}].")
    if largest < 1 or most < 1:
        raise ValueError(f"largest = {largest}, most = {most}: must be at least 1; no problem has a target below 1.")
    draw, prompts = random.Random(f"countdown {seed}"), []
    while len(prompts) < count:
        given = [draw.randint(1, largest) for _ in range(numbers)]
        equation = str(given[0])
        for value in given[1:]:
            equation = f"({equation} {draw.choice('+-*/')} {value})"
        try:
            target, _ = evaluate_expression(equation, most_digits=MOST_DIGITS)
        except NotArithmetic:
            continue
        if target.denominator != 1 or not 1 <= target <= most:
            continue
        # Shuffle, so that the order does not reveal the solution.
        given = draw.sample(given, len(given))
        text = (
            f"Use the numbers {', '.join(map(str, given))}, each exactly once, with + - * / and brackets to make "
            f"{target}.\n{TAG_INSTRUCTION}"
        )
        prompts.append(ask(text) | {"answer": equation, "numbers": given, "target": int(target)})
    return prompts


def countdown_reward(prompt: str, completions: str, *_: Any, numbers: list[int], target: int, **data: Any) -> float:
    """Return 1 if the last <answer> uses exactly the given numbers and its value is the target, else 0.

    The answer may end in `= target`, but in nothing else. Its text is parsed and never run.
    """
    found = find_tagged(answer_of(prompt, completions))
    if found is None:
        return 0.0
    left, equals, right = (part.strip() for part in found.partition("="))
    value, used = value_and_numbers(left)
    return float(value == target and used == Counter(numbers) and right == (str(target) if equals else ""))


def code(source: str, split: str = "", count: int | None = None, most_tests: int = 16) -> list[dict[str, Any]]:
    """Load programming problems with tests, from rows of any of these forms, which are recognized by their columns.

    - `tests`: a list of {input, output} of a program, or of assertions; the problem is in `problem`.
    - `input_output`, as in APPS (arXiv 2105.09938) and TACO: inputs and outputs as JSON, the problem in `question`.
      Rows without tests, or whose tests call a function, are skipped.
    - `test_list`, as in MBPP (arXiv 2108.07732): assertions. The prompt shows them, since only they name the function.
    - `test` and `entry_point`, as in HumanEval (arXiv 2107.03374): the `prompt` is a function's head.

    Reward: megatron_rl.rewards.code:passes. most_tests: use only the first tests of a problem, because each takes time.
    """
    prompts = []
    for number, row in enumerate(read_rows(source, key="source", split=split), start=1):
        text, tests = program_task(row, source, number)
        if tests:
            prompts.append(ask(f"{text}\n{PROGRAM_INSTRUCTION}") | {"tests": tests[:most_tests]})
    return prompts[:count]


def program_task(row: dict[str, Any], source: str, number: int) -> tuple[str, list[Any]]:
    """Return a row's problem text and its tests. source, number: the row's place, for error messages."""
    if "tests" in row:
        tests, problem = row["tests"], field_of(row, "problem", source, number)
        if isinstance(tests, dict):
            tests = input_tests(tests["input"], tests["output"])
        is_read = bool(tests) and isinstance(tests[0], dict)
        return (f"{problem}\n{INPUT_INSTRUCTION}" if is_read else problem), list(tests)
    if "input_output" in row:
        # Keep numbers as text: some have more digits than Python converts.
        pairs = json.loads(row["input_output"] or "{}", parse_int=str, parse_float=str)
        tests = [] if "fn_name" in pairs else input_tests(pairs.get("inputs", []), pairs.get("outputs", []))
        return f"{field_of(row, 'question', source, number)}\n{INPUT_INSTRUCTION}", tests
    if "test_list" in row:
        shown = "\n".join(row["test_list"])
        # The full MBPP has `text`, its sanitized subset `prompt`.
        problem = row["text"] if "text" in row else field_of(row, "prompt", source, number)
        before = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
        tests = ["\n".join([*before, test]).strip() for test in row["test_list"]]
        return f"{problem}\nThese tests must pass:\n```python\n{shown}\n```", tests
    if "entry_point" in row:
        head = field_of(row, "prompt", source, number)
        own = without_function(head, row["entry_point"])
        test = f"{own}\n{field_of(row, 'test', source, number)}\ncheck({row['entry_point']})".strip()
        return f"Complete this function, and repeat its head and imports:\n```python\n{head}\n```", [test]
    raise ValueError(
        f"source = {source!r}, row {number}: has {', '.join(row)} and none of tests, input_output, test_list and "
        f"entry_point; give rows with tests."
    )


def without_function(head: str, name: str) -> str:
    """Return `head`, the beginning of a program, without the function `name`.

    The result has the imports and helpers that the function's test needs.
    """
    try:
        tree = ast.parse(f"{head.rstrip()}\n    pass\n")
    except SyntaxError:  # not just a head
        return ""
    tree.body = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == name)]
    return ast.unparse(tree)


def input_tests(inputs: list[Any], outputs: list[Any]) -> list[dict[str, str]]:
    """Return a test of a program for each input and its output. An input or output may be a list of lines."""

    def text_of(value: Any) -> str:
        return "\n".join(map(str, value)) if isinstance(value, list) else str(value)

    pairs = zip(inputs, outputs, strict=False)
    return [{"input": text_of(given), "output": text_of(wanted)} for given, wanted in pairs]


def ask(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def field_of(row: dict[str, Any], name: str, source: str, number: int) -> str:
    if name not in row:
        raise ValueError(f"source = {source!r}, row {number}: has {', '.join(row)} and no {name!r}; name another file.")
    return str(row[name])
