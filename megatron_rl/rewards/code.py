"""Rewards for programs: a reply's Python is run against the prompt's tests, locked in (locked.py).

The program is the reply's last fenced block, or all of it where there is none. A program that crashes, does what it
must not or is too slow has failed its test; that is the model's doing, and its reward is 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.rewards.locked import run_program
from megatron_rl.rewards.trial import holds

FENCE = "```"
MEMORY_MIB = 512


def program_output(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    tests: Sequence[dict[str, str]],
    time_s: float = 10.0,
    memory_mib: int = MEMORY_MIB,
    partial: bool = False,
    **data: Any,
) -> float:
    """1 if the program prints each test's `output` for its `input`, white space at line ends aside; else 0.

    time_s: of all tests together. partial: the share of tests that pass. The program never sees an `output`.
    """
    source, memory = find_program(completions), memory_mib << 20

    def is_passed(test: dict[str, str], left_s: float) -> bool:
        printed = run_program(source, test["input"], time_s=left_s, memory_bytes=memory)
        return printed is not None and lines(printed) == lines(test["output"])

    return share_passed(tests, is_passed, time_s=time_s, partial=partial)


def assertions(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    tests: Sequence[str],
    time_s: float = 10.0,
    memory_mib: int = MEMORY_MIB,
    partial: bool = False,
    **data: Any,
) -> float:
    """1 if each of `tests`, Python such as `assert f(2) == 4`, ends without an error with the program's names; else 0.

    The tests run in another process than the program, which sees the arguments of its functions and none of the rest
    (trial.py). What it is given and gives is plain data.
    """
    source, memory = find_program(completions), memory_mib << 20

    def is_passed(test: str, left_s: float) -> bool:
        return holds(source, test, time_s=left_s, memory_bytes=memory)

    return share_passed(tests, is_passed, time_s=time_s, partial=partial)


def passes(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    tests: Sequence[Any],
    **data: Any,
) -> float:
    """`assertions` where the prompt's tests are Python, `program_output` where they are inputs and outputs."""
    reward = assertions if isinstance(checked(tests)[0], str) else program_output
    return reward(prompt, completions, prompt_ids, completion_ids, tests=tests, **data)


def share_passed(
    tests: Sequence[Any], is_passed: Callable[[Any, float], bool], *, time_s: float, partial: bool
) -> float:
    """Run the tests, each within what is left of `time_s`; without `partial` the first that fails makes it 0."""
    deadline, passed = time.monotonic() + time_s, 0
    for test in checked(tests):
        left_s = deadline - time.monotonic()
        # With `partial` those that come after a late one count as failed, and are not run.
        if left_s > 0 and is_passed(test, left_s):
            passed += 1
        elif not partial:
            return 0.0
    return passed / len(tests)


def checked(tests: Sequence[Any]) -> Sequence[Any]:
    if not tests:
        raise ValueError("tests = []: a program is run against its prompt's tests; give every prompt some.")
    return tests


def find_program(reply: str) -> str:
    """Return the content of the last fenced block that is closed; the whole reply where there is none."""
    blocks = reply.split(FENCE)[1:-1:2]  # one that is cut off has no fence behind it
    if not blocks:
        return reply
    block = blocks[-1]
    language, newline, source = block.partition("\n")
    return source if newline and language.strip().lower() in ("", "python", "python3", "py") else block


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
