"""Equality of mathematical answers, by the package math-verify (the extra `math`)."""

from __future__ import annotations

import functools
import logging
from typing import Any

from megatron_rl.rollout.rewards import BOXED, gold, last_boxed
from megatron_rl.rollout.rewards.locked import TextFailed, evaluate

MEMORY_BYTES = 1 << 30
MOST_CHARACTERS = 50_000
"""Of a reply's end, where its answer is."""


def math_answer(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], *, time_s: float = 5.0, **data: Any
) -> float:
    """1 if the reply's answer, in its last `\\boxed{..}`, other LaTeX or plain, equals data["answer"]; else 0.

    1/2 is 0.5 and (x+1)^2 is x^2+2x+1. The package works on the model's text with sympy, so it does that locked in; a
    text with which it does not come to an end within `time_s` is no right answer.
    """
    warm_up()
    wanted = gold(data)
    end = completions[-MOST_CHARACTERS:]
    try:
        verdict = evaluate(is_equal, wanted, end, time_s=time_s, memory_bytes=MEMORY_BYTES)
    except TextFailed:
        return 0.0
    if verdict is None:
        raise ValueError(f"answer = {wanted!r}: math-verify reads no answer in it; give a number or LaTeX.")
    return float(verdict)


@functools.cache
def warm_up() -> None:
    """Import the package and have it read an answer of ours: locked forks begin with all that this has loaded."""
    try:
        import math_verify
    except ImportError as error:
        raise RuntimeError("math-verify is not installed; run pip install 'megatron-rl[math]'.") from error
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)  # it warns that its own time limits are off
    is_equal("\\frac{1}{2} + x", "$x + 0.5$")


def is_equal(wanted: str, reply: str) -> bool | None:
    # Its own time limits are alarms that would end up in this process's; the lock has one.
    from math_verify import parse, verify

    # Outside of LaTeX the last number would be all that is read of an answer such as x + 1.
    is_marked = any(mark in wanted for mark in ("$", "\\(", "\\[", "\\boxed"))
    right = parse(wanted if is_marked else f"\\boxed{{{wanted}}}", parsing_timeout=None)
    # Of several boxes the package makes one set: who has corrected himself would be wrong.
    given = f"{BOXED}{found}}}" if (found := last_boxed(reply)) else reply
    return bool(verify(right, parse(given, parsing_timeout=None), timeout_seconds=None)) if right else None
