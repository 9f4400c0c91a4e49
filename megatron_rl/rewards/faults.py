"""Error messages for faults in a reward function. They help its author find the line."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.import_path import code_of

CONTRACT = (
    "it is called for one reply at a time, as reward(prompt, completions, prompt_ids, completion_ids, **data) with the "
    "fields of the prompt's row, and returns one number, or a dict of named ones (TRL's rewards take and return "
    "lists: write one for one reply)"
)


def as_reward(given: Any) -> float:
    """Return a reward as a float. ValueError for anything but a finite number, including text such as "0.5"."""
    try:
        # float("0.5") would succeed, but a reward that returns text most likely returned the wrong thing.
        value = math.nan if isinstance(given, str | bytes | bytearray) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        rule = "must be a finite number" + ("" if isinstance(given, float) else f": {CONTRACT}")
        raise ValueError(f"returned {shortened(given)}, of type {type(given).__name__}; {rule}.")
    return value


def as_score(given: Any) -> float | dict[str, float]:
    """Return a reward function's result if it is a number or a dict of named numbers. ValueError for anything else."""
    if not isinstance(given, Mapping):
        return as_reward(given)
    if not given or not all(isinstance(name, str) and name for name in given):
        raise ValueError(f"returned {shortened(given)}; the parts of a reward, at least one, need names of type str.")
    return {str(name): as_reward(value) for name, value in given.items()}


def words_of(error: BaseException) -> str:
    """Return `type: message` of an exception. If the call did not fit the function's signature, append CONTRACT."""
    words = f"{type(error).__name__}: {error}"
    # No frame inside the function: the arguments did not fit its signature.
    is_of_the_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
    return f"{words}; {CONTRACT}" if isinstance(error, TypeError) and is_of_the_call else words


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}.."


def place_of(error: BaseException, function: Callable[..., Any]) -> str:
    """Return `file:line` where `function` failed: the innermost traceback line in the folder of the function's file.

    Call this where the function's error is caught. If no traceback line is in that folder, for example because the
    function's result was at fault, return the line that defines the function. Return "" for a function without Python
    code.
    """
    code = code_of(function)
    if code is None:
        return ""
    home, line = Path(code.co_filename).parent, f"{code.co_filename}:{code.co_firstlineno}"
    for frame, number in list(traceback.walk_tb(error.__traceback__))[1:]:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(home) and "site-packages" not in file.relative_to(home).parts and file != Path(__file__):
            line = f"{file}:{number}"
    return line
