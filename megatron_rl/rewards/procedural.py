"""Rewards for procedural tasks: reasoning-gym's own scorers, and countdown, which needs no package."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron_rl.rewards import answer_of, find_tagged
from megatron_rl.rewards.arithmetic import value_and_numbers
from megatron_rl.sandbox.locked import TextFailed, evaluate

MEMORY_BYTES = 1 << 30


def reasoning_gym(
    prompt: str,
    completions: str,
    *_: Any,
    task: str,
    question: str,
    answer: str,
    metadata: dict[str, Any],
    partial: bool = False,
    time_s: float = 5.0,
    **data: Any,
) -> float:
    """Score the content of the reply's `<answer>..</answer>`, or else the whole reply, by the task's own scorer.

    The result is 1 or 0; with `partial`, it may also lie in between. Some scorers evaluate the text as code, so they
    run sandboxed. Text that makes a scorer raise or hang scores 0.
    """
    entry = {"question": question, "answer": answer, "metadata": metadata}
    said = answer_of(prompt, completions)
    found = find_tagged(said)
    text = (said if found is None else found).strip()
    try:
        score = float(evaluate(scorer(task), text, entry, time_s=time_s, memory_bytes=MEMORY_BYTES))
    except TextFailed:
        return 0.0
    # Scorers also give a little for a wrong answer in the right form.
    return score if partial else float(score == 1.0)


@functools.cache
def scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise RuntimeError("reasoning-gym is not installed; run pip install 'megatron-rl[tasks]'.") from error
    return get_score_answer_fn(task)


def countdown(prompt: str, completions: str, *_: Any, metadata: dict[str, Any], **data: Any) -> float:
    """Return 1 if the reply's expression computes metadata["target"] from metadata["numbers"]; else 0.

    The expression is the content of `<answer>..</answer>`, or else the whole reply. It may use + - * / and parentheses,
    and each number at most as often as it is given. Nothing else is evaluated.
    """
    said = answer_of(prompt, completions)
    found = find_tagged(said)
    text = (said if found is None else found).strip()
    value, used = value_and_numbers(text)
    return float(value == metadata["target"] and used <= Counter(metadata["numbers"]))
