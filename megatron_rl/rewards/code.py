"""Rewards for programs: the Python code of a reply is run against the prompt's tests, sandboxed (sandbox/locked.py).

program_text.py decides which of the reply's code blocks is the program. A program fails a test if it crashes, does
something forbidden or is too slow. That is the model's fault, so the reward is 0.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.rewards.program_text import find_program
from megatron_rl.sandbox.locked import run_program
from megatron_rl.sandbox.trial import holds, parsed_names

MEMORY_MIB = 512
TOLERANCE = 1e-6
"""Allowed difference from an expected number that has a decimal point. It is relative if the number's magnitude exceeds
1."""
INTEGER, NUMBER = re.compile(r"[-+]?[0-9]+"), re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")


def program_output(
    prompt: str,
    completions: str,
    *_: Any,
    tests: Sequence[dict[str, Any]],
    time_s: float = 10.0,
    memory_mib: int = MEMORY_MIB,
    partial: bool = False,
    packages: Sequence[str] = (),
    **data: Any,
) -> float:
    """Return 1 if the program prints each test's `output` for its `input`, as compared by `is_same_output`; else 0.

    An input or output may be text, a number or a list of lines. The program never sees an `output`.

    time_s: time limit for all tests together. partial: return the share of passed tests instead of 1 or 0. packages:
    installed packages that programs may import, such as numpy.
    """
    given = [(text_of(test, "input"), text_of(test, "output")) for test in checked(tests)]
    source = find_program(completions, prompt=prompt, reads_input=any(text.strip() for text, _ in given))
    memory, folders = memory_mib << 20, folders_of(tuple(packages))

    def is_passed(test: tuple[str, str], left_s: float) -> bool:
        printed = run_program(source, test[0], time_s=left_s, memory_bytes=memory, folders=folders)
        return printed is not None and is_same_output(printed, test[1])

    # An empty program prints nothing. It must not pass a test whose output is empty.
    return share_passed(given, is_passed, time_s=time_s, partial=partial) if source.strip() else 0.0


def assertions(
    prompt: str,
    completions: str,
    *_: Any,
    tests: Sequence[str],
    time_s: float = 10.0,
    memory_mib: int = MEMORY_MIB,
    partial: bool = False,
    packages: Sequence[str] = (),
    **data: Any,
) -> float:
    """Return 1 if all `tests`, Python code such as `assert f(2) == 4`, pass with the program's functions; else 0.

    The tests and the program run in separate processes. The program only sees the arguments of calls to its functions
    (trial.py). Arguments and results are plain data. The program runs as if imported: its `__name__` is not `__main__`.
    The options are those of `program_output`.
    """
    tests = checked(tests)
    names = sorted({name for test in tests for name in parsed_names(test)[0]})
    source = find_program(completions, names, prompt=prompt)
    memory, folders = memory_mib << 20, folders_of(tuple(packages))

    def is_passed(test: str, left_s: float) -> bool:
        return holds(source, test, time_s=left_s, memory_bytes=memory, folders=folders)

    return share_passed(tests, is_passed, time_s=time_s, partial=partial) if source.strip() else 0.0


def passes(prompt: str, completions: str, *_: Any, tests: Sequence[Any], **data: Any) -> float:
    """Apply `assertions` if the prompt's tests are Python, `program_output` if they are inputs and outputs."""
    reward = assertions if isinstance(checked(tests)[0], str) else program_output
    return reward(prompt, completions, tests=tests, **data)


def share_passed(
    tests: Sequence[Any], is_passed: Callable[[Any, float], bool], *, time_s: float, partial: bool
) -> float:
    """Run the tests and return the share that passed. Without `partial`, return 0 as soon as a test fails.

    is_passed: function that runs a test, given the test and its time limit in seconds. time_s: time limit for all tests
    together. Tests for which no time is left count as failed.
    """
    deadline, passed = time.monotonic() + time_s, 0
    for test in tests:
        left_s = deadline - time.monotonic()
        # With `partial`, tests after the deadline count as failed and are not run.
        if left_s > 0 and is_passed(test, left_s):
            passed += 1
        elif not partial:
            return 0.0
    return passed / len(tests)


def checked(tests: Sequence[Any]) -> Sequence[Any]:
    if not len(tests):
        raise ValueError("tests = []: a program is run against its prompt's tests; give every prompt some.")
    if not isinstance(tests, str):
        return tests
    try:
        found = json.loads(tests)  # a text column may hold the list as JSON
    except ValueError:
        found = None
    return checked(found) if isinstance(found, list) else [tests]


def text_of(test: dict[str, Any], key: str) -> str:
    """Return a test's input or output as text. A list becomes lines; a list inside it becomes the words of a line."""
    if not isinstance(test, dict) or key not in test:
        raise ValueError(f"tests: {test!r:.200} has no {key!r}; a test of a program is {{input: ..., output: ...}}.")
    value = test[key]
    if isinstance(value, dict):
        raise ValueError(f"tests: {key} = {value!r:.200}: must be text, a number or a list of lines; write it as text.")
    if not isinstance(value, list | tuple):
        return "" if value is None else str(value)
    return "\n".join(" ".join(map(str, line)) if isinstance(line, list | tuple) else str(line) for line in value)


def is_same_output(printed: str, wanted: str) -> bool:
    """Return True if the non-blank lines have the same words. Numbers with a decimal point may differ by TOLERANCE."""
    ours, theirs = words_of(printed), words_of(wanted)
    if [len(line) for line in ours] != [len(line) for line in theirs]:
        return False
    return all(map(is_same_word, itertools.chain(*ours), itertools.chain(*theirs)))


def words_of(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def is_same_word(word: str, right: str) -> bool:
    if word == right:
        return True
    if not (NUMBER.fullmatch(word) and NUMBER.fullmatch(right)):
        return False
    # Two integers are compared as text: 0101 is not 101, and large ones are not rounded.
    if INTEGER.fullmatch(word) and INTEGER.fullmatch(right):
        return False
    if INTEGER.fullmatch(right):
        return re.fullmatch(r"([-+]?[0-9]+)\.0*", word) is not None and word.partition(".")[0] == right
    value, wanted = float(word), float(right)
    return math.isfinite(value) and abs(value - wanted) <= TOLERANCE * max(1.0, abs(wanted))


@functools.cache
def folders_of(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders that contain the packages. ValueError for a package not installed in site-packages."""
    folders = []
    for name in packages:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        places = [] if spec is None else [*(spec.submodule_search_locations or []), spec.origin or ""][:1]
        folder = Path(places[0]).parent if places else Path()
        if folder.name not in ("site-packages", "dist-packages"):
            raise ValueError(
                f"packages = {list(packages)}: {name!r} is not installed among this environment's packages; "
                f"pip install it, or leave it out."
            )
        folders.append(str(folder))
    return tuple(dict.fromkeys(folders))
