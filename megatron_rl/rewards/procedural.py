"""Rewards of procedural tasks: reasoning-gym's own scorers, and countdown without them."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from megatron_rl.rewards import find_tagged
from megatron_rl.rewards.locked import TextFailed, evaluate

MEMORY_BYTES = 1 << 30
LONGEST_EXPRESSION = 200
EXPRESSION = re.compile(r"[0-9+\-*/()\s]*", re.ASCII)
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def reasoning_gym(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    task: str,
    question: str,
    answer: str,
    metadata: dict[str, Any],
    partial: bool = False,
    time_s: float = 5.0,
    **data: Any,
) -> float:
    """What the task's own scorer gives for the reply's `<answer>..</answer>`, or all of it: 1 or 0, or with `partial`
    any score between.

    Some scorers evaluate the text as code, so they run locked in. Text that makes one raise or hang is no right answer.
    """
    entry = {"question": question, "answer": answer, "metadata": metadata}
    found = find_tagged(completions)
    text = (completions if found is None else found).strip()
    try:
        score = float(evaluate(scorer(task), text, entry, time_s=time_s, memory_bytes=MEMORY_BYTES))
    except TextFailed:
        return 0.0
    return score if partial else float(score == 1.0)


@functools.cache
def scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise RuntimeError("reasoning-gym is not installed; run pip install 'megatron-rl[tasks]'.") from error
    return get_score_answer_fn(task)


def countdown(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    metadata: dict[str, Any],
    **data: Any,
) -> float:
    """1 if the reply's `<answer>..</answer>`, or all of it, makes metadata["target"] of metadata["numbers"]; else 0.

    With + - * / and parentheses, each number at most as often as it is given. Nothing is evaluated but these.
    """
    found = find_tagged(completions)
    text = (completions if found is None else found).strip()
    value, used = value_and_numbers(text)
    return float(value == metadata["target"] and used <= Counter(metadata["numbers"]))


def value_and_numbers(text: str) -> tuple[Fraction | None, Counter[int]]:
    """Return an expression's value and the numbers in it; None for text that is no such expression.

    They are counted in the tree, as there are no other signs: in a text comments have numbers too, and 1_2 has two.
    """
    used: Counter[int] = Counter()
    is_expression = len(text) <= LONGEST_EXPRESSION and EXPRESSION.fullmatch(text) is not None
    try:
        value = computed(ast.parse(text, mode="eval").body, used) if is_expression else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        value = None
    return value, used


def computed(node: ast.expr, used: Counter[int]) -> Fraction:
    """Return an expression's value and count its numbers. ValueError for anything but the four operations."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](computed(node.left, used), computed(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -computed(node.operand, used)
    raise ValueError(f"{type(node).__name__} is none of the four operations")
