"""Reports the error that ends a command: by one line on stderr, a traceback in a file, and exit code 1."""

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
"""TEMPORARY: prefix of the names of traceback files in the temporary folder. KEPT: number of this user's earlier files
that are kept."""
LONGEST = 2000
"""Maximum number of characters of an error's own message that are shown."""
OTHERS_WAIT_S = 3.0
"""Seconds that ranks other than 0 wait before they print their error. If rank 0 prints the same error, the launcher
ends them in that time."""


@contextmanager
def one_line(program: str, *, folder: Callable[[], Path | None] = lambda: None) -> Iterator[None]:
    """Report an exception that leaves the `with` block by one line on stderr, and exit with code 1.

    program: name of the command, with which the line begins. folder: function that returns the run's folder, to which
    the traceback is written, or None to write it to a temporary file. The traceback of a ValueError that this package
    raises about the user's input is not written.
    """
    try:
        yield
    except BrokenPipeError:  # nobody reads the output: the command handles that itself
        raise
    except Exception as error:
        if (rank := os.environ.get("RANK", "0")) != "0":
            program = f"{program}: rank {rank}"
            time.sleep(OTHERS_WAIT_S)
        sys.exit(f"{program}: {words_of(error, folder)}")


def words_of(error: Exception, folder: Callable[[], Path | None]) -> str:
    """Return a line about an error, and save the error's traceback unless the line alone explains the error."""
    text = " ".join(str(error).split())[:LONGEST]
    # The best place to name is a line of the user's code, otherwise this package's last call into another library.
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
    """Return the error, its cause, the cause's cause, and so on."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return found


def places(trace: TracebackType | None) -> list[tuple[str, int]]:
    """Return (file, line) of each call in a traceback, from this package's first frame on.

    The frames before it only start the command.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    frames = [it for it in frames if it[0] != __file__]
    first = next((n for n, (file, _) in enumerate(frames) if file.startswith(PACKAGE)), 0)
    return frames[first:] or [("<unknown>", 0)]


def remove_old() -> None:
    """Remove this user's traceback files from the temporary folder, except for the newest `KEPT`."""
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
    """Append the error's traceback to traceback.log in `folder`, or write a temporary file. Return the file's path.

    If the file cannot be written, the returned text says why.
    """
    head = f"-- {time.strftime('%Y-%m-%d %H:%M:%S')}, pid {os.getpid()}: {' '.join(sys.argv)}\n"
    content = (head + "".join(traceback.format_exception(error))).encode("utf-8", "replace")
    try:
        if folder is not None and folder.is_dir():
            # O_APPEND, because several ranks may fail at the same time.
            handle, path = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), str(folder / LOG)
        else:
            remove_old()
            handle, path = tempfile.mkstemp(prefix=TEMPORARY, suffix=f"-{LOG}")
        with open(handle, "wb", buffering=0) as file:
            file.write(content)
    except OSError as fault:  # such as a full disk
        return f"could not be written, {fault}"
    return path
