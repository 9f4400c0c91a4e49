"""Finds the user's own line in a traceback or a thread's stack, and calls user functions so that errors name them."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from megatron_rl.config.import_path import code_of, described

T = TypeVar("T")
PACKAGE = str(Path(__file__).parents[1])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(file: str) -> bool:
    """Return whether a file's code belongs neither to this package nor to a library."""
    return not file.startswith((PACKAGE, *LIBRARIES, "<frozen", "<string>")) and "site-packages" not in file


def place_of(error: BaseException) -> str:
    """Return `file:line` of the innermost user code in an error's traceback, or else in its cause's or context's.

    Empty if no user code was involved.
    """
    at: BaseException | None = error
    seen: list[BaseException] = []
    while at is not None and at not in seen:
        calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(at.__traceback__)]
        own = [f"{file}:{line}" for file, line in calls if is_users(file)]
        if own:
            return own[-1]
        seen.append(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return ""


def words_of(error: BaseException) -> str:
    """Return `type: message (file:line)` of an error.

    The place is left out if this package defines the error's class.
    """
    words = f"{type(error).__name__}: {error}"
    place = "" if type(error).__module__.startswith("megatron_rl.") else place_of(error)
    return words if place in words else f"{words} ({place})"


def place_on(frame: FrameType | None) -> tuple[str, int, str] | None:
    """Return file, line and function of the user's code that a thread is running. frame: the thread's innermost frame.

    Return None if the thread runs this package's code. Frames of libraries are skipped, because they work for their
    caller.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return file, frame.f_lineno, frame.f_code.co_qualname
        if file.startswith(PACKAGE):
            return None
        frame = frame.f_back
    return None


def call(function: Callable[..., T], given: Sequence[Any], args: Mapping[str, Any], *, key: str, contract: str) -> T:
    """Call `function(*given, **args)`. The function may be the user's. key: the option that names it.

    If user code raises a built-in exception, raise a ValueError with the function's name, the line and `contract`,
    which says what the function must do.
    """
    try:
        return function(*given, **args)
    except Exception as error:
        code = code_of(function)
        if code is None or code.co_filename.startswith(PACKAGE) or type(error).__module__ != "builtins":
            raise
        raise ValueError(f"{key}: {described(function)} raised {words_of(error)}; {contract}.") from error
