"""Ends this process: when one it depends on is gone, so that a SIGKILL anywhere leaves nothing behind, or by itself."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
LOOK_S = 0.5
LAUNCHER_S = 10.0
"""For a launcher to see a rank's death and to stop the others."""


def exit_with(pid: int, *, says_so: bool = True) -> None:
    """Watch process `pid` from a thread and exit when it ends, with one line where `says_so`."""

    def watch() -> None:
        while is_alive(pid):
            time.sleep(LOOK_S)
        stop(f"process {pid}, which started this run, died; stopping." if says_so else "")

    start_thread(watch, name=f"exit-with-{pid}")


def start_thread(main: Callable[[], object], *, name: str) -> threading.Thread:
    """Start a daemon thread. One that an error ends is named, and ends the process: what it did is done no more, and
    whoever waits for it would wait for ever."""

    def run() -> None:
        try:
            main()
        except BaseException as error:
            words = f"thread {name!r} of process {os.getpid()} died of {type(error).__name__}: {error}"
            logger.critical("%s", words, exc_info=True)
            stop(f"{words}; stopping.")

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def die_with(parent: int) -> None:
    """Let the kernel kill this process as soon as its parent's thread that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have ended before the kernel was asked.
        if os.getppid() != parent:
            os._exit(1)


def let_go_of_sockets() -> None:
    """In a forked process: keep none of its parent's connections open, and none of its ports taken.

    Their numbers stay in use, so that an object of the parent's that closes its own closes nothing else.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            is_socket = number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:  # the listing's own
            continue
        if is_socket:
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def is_alive(pid: int) -> bool:
    """True while `pid` runs; a zombie whose parent has not yet waited counts as dead."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # From the last bracket on: a program's name, which stands in brackets, may have brackets and spaces itself.
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return False


def is_lost_peer(error: RuntimeError) -> bool:
    """True where a collective failed because another rank is gone (gloo's words)."""
    return any(
        words in str(error) for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    )


def wait_to_be_stopped(rank: int) -> None:
    """After another rank's death: let the launcher name it and stop this one, instead of adding a traceback."""
    time.sleep(LAUNCHER_S)
    stop(f"rank {rank} lost its connection to another rank, whose own message says why.")


def stop(message: str, code: int = 1) -> None:
    """Print the message, if any, and end the process at once, whatever its other threads wait for.

    Children watch their parent.
    """
    if message:
        print(f"megatron_rl: {message}", file=sys.stderr, flush=True)
    os._exit(code)


def run_and_end(main: Callable[[], object]) -> NoReturn:
    """Call `main` and end the process as `sys.exit` would, with its exit code, but for the interpreter's last steps.

    These unwind a daemon thread that returns from C++, which aborts the process. One may be at it then: to let go of a
    gloo group takes as long as its lost peer does.
    """
    code: object = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # joins what is not a daemon, also those of executors
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
