"""Find the user's own line in a traceback or in a thread's calls, and call a user's function so that errors name it."""

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
    """Return whether code of that file is neither this package's nor a library's."""
    return not file.startswith((PACKAGE, *LIBRARIES, "<frozen", "<string>")) and "site-packages" not in file


def place_of(error: BaseException) -> str:
    """Return `file:line` of the user's line that an error came from; empty where it came through none.

    It is the innermost one of the error itself, or else of what it was raised from.
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
    """Return `type: words (file:line)` of an error, the place being the user's line that it came from.

    An error of a class of this package says all there is, and one that names its place has it.
    """
    words = f"{type(error).__name__}: {error}"
    place = "" if type(error).__module__.startswith("megatron_rl.") else place_of(error)
    return words if place in words else f"{words} ({place})"


def place_on(frame: FrameType | None) -> tuple[str, int, str] | None:
    """Return file, line and function of the user's call that a thread is in; None where it is in one of this package.

    Which of the two called last decides: a library is at work for its caller.
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
    """Return `function(*given, **args)`, a function that the config names as `key` and that may be the user's.

    What that raises becomes a ValueError with its name, its line and the contract. An error of a class that is not
    Python's own, such as a device out of memory, says what it is and goes up as it is.
    """
    try:
        return function(*given, **args)
    except Exception as error:
        code = code_of(function)
        if code is None or code.co_filename.startswith(PACKAGE) or type(error).__module__ != "builtins":
            raise
        raise ValueError(f"{key}: {described(function)} raised {words_of(error)}; {contract}.") from error
