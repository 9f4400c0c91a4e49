"""The end of a command in which something went wrong: a line that says what, a traceback in a file, exit code 1."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from megatron_rl.config.users_code import PACKAGE, is_users

LOG = "traceback.log"
TEMPORARY, KEPT = "megatron_rl-", 10
"""Tracebacks without a run's folder: how their files begin, and how many of this user's stay beside a new one."""
LONGEST = 2000
"""Characters of a line."""
OTHERS_WAIT_S = 3.0
"""Seconds that another rank than the first waits before it says what the first one may be saying too; a launcher ends
it meanwhile."""


@contextmanager
def one_line(program: str, *, folder: Callable[[], Path | None] = lambda: None) -> Iterator[None]:
    """End the process with one line where an error comes up to here: the only place where errors become messages.

    folder: the run's own, for the traceback; a temporary file takes it where there is none yet. An error that this
    package raises because of what the user wrote says all there is, and has no traceback to be read.
    """
    try:
        yield
    except BrokenPipeError:  # of output that nobody reads: the command's own business
        raise
    except Exception as error:
        if (rank := os.environ.get("RANK", "0")) != "0":
            program = f"{program}: rank {rank}"
            time.sleep(OTHERS_WAIT_S)
        sys.exit(f"{program}: {words_of(error, folder)}")


def words_of(error: Exception, folder: Callable[[], Path | None]) -> str:
    """Return the line of an error, and keep its traceback where the line alone does not say enough."""
    text = " ".join(str(error).split())[:LONGEST]
    # A user's own line says most, and else the last one of this package above the library that raised.
    frames = [place for it in chain(error) for place in places(it.__traceback__)]
    own = [place for place in frames if is_users(place[0])]
    calls = places(error.__traceback__)
    last = next((place for place in reversed(calls) if place[0].startswith(PACKAGE)), calls[-1])
    is_raised_here = isinstance(error, ValueError | RuntimeError | OSError) and calls[-1] == last
    is_ours = is_raised_here or type(error).__module__.startswith("megatron_rl.")
    if not is_ours:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if (own or not is_ours) and (place := own[-1] if own else last) and Path(place[0]).name not in text:
        text += f" ({place[0]}, line {place[1]})"
    if is_ours and isinstance(error, ValueError) and not own:
        return text
    return f"{text} [traceback: {keep(error, folder())}]"


def chain(error: BaseException) -> list[BaseException]:
    """The error and those that it came from, the last one first."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return found


def places(trace: TracebackType | None) -> list[tuple[str, int]]:
    """File and line of each call from the first in this package on: what is above has only called the command."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    frames = [it for it in frames if it[0] != __file__]
    first = next((n for n, (file, _) in enumerate(frames) if file.startswith(PACKAGE)), 0)
    return frames[first:] or [("<unknown>", 0)]


def remove_old() -> None:
    """Remove this user's tracebacks from the temporary folder, but for the newest."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*-{LOG}"):
        with suppress(OSError):  # another process may remove it as well
            about = path.lstat()
            if about.st_uid == os.geteuid() and stat.S_ISREG(about.st_mode):
                found.append((about.st_mtime_ns, path))
    for _, path in sorted(found)[:-KEPT]:
        with suppress(OSError):
            path.unlink()


def keep(error: Exception, folder: Path | None) -> str:
    """Add the traceback to the run's log of them, or write a file of its own; return where it is."""
    head = f"-- {time.strftime('%Y-%m-%d %H:%M:%S')}, pid {os.getpid()}: {' '.join(sys.argv)}\n"
    content = (head + "".join(traceback.format_exception(error))).encode("utf-8", "replace")
    try:
        if folder is not None and folder.is_dir():
            # O_APPEND, as several ranks may come to their end at once.
            handle, path = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), str(folder / LOG)
        else:
            remove_old()
            handle, path = tempfile.mkstemp(prefix=TEMPORARY, suffix=f"-{LOG}")
        with open(handle, "wb", buffering=0) as file:
            file.write(content)
    except OSError as fault:  # of a disk that is full
        return f"could not be written, {fault}"
    return path
