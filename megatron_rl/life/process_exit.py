"""Ends this process, also when a process on which it depends ends. So no process is left over if one gets SIGKILL."""

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
"""Seconds that a launcher gets to notice a rank's death and to stop the other ranks."""


def exit_with(pid: int, *, says_so: bool = True) -> None:
    """Start a thread that ends this process when process `pid` ends. says_so: whether it prints a line then."""

    def watch() -> None:
        while is_alive(pid):
            time.sleep(LOOK_S)
        stop(f"process {pid}, which started this run, died; stopping." if says_so else "")

    start_thread(watch, name=f"exit-with-{pid}")


def start_thread(main: Callable[[], object], *, name: str) -> threading.Thread:
    """Run `main` in a new daemon thread, and return the thread.

    If `main` raises, log the error and end the process, because other threads would wait for this one forever.
    """

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
    """Make the kernel kill this process by SIGKILL when the thread that started it ends. Works on Linux only.

    parent: id of the parent process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the prctl call
            os._exit(1)


def let_go_of_sockets() -> None:
    """Close the sockets that a forked process inherited, so that it holds none of the parent's connections or ports."""
    # Each number stays in use: an inherited object that closes its socket must not close something else.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            is_socket = number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:  # the descriptor that listdir itself used
            continue
        if is_socket:
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def is_alive(pid: int) -> bool:
    """Return True if the process `pid` is running. A zombie counts as dead."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # Split after the last bracket: the program's name, in brackets, may itself contain brackets and spaces.
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between open and read
        return False


def is_lost_peer(error: RuntimeError) -> bool:
    """Return True if `error` is that of a gloo collective which failed because another rank is gone."""
    known = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return any(words in str(error) for words in known)


def wait_to_be_stopped(rank: int) -> None:
    """Wait, after another rank's death, until the launcher stops this rank. If it does not, end the process.

    This avoids a second traceback for the same failure. rank: number of this rank.
    """
    time.sleep(LAUNCHER_S)
    stop(f"rank {rank} lost its connection to another rank, whose own message says why.")


def stop(message: str, code: int = 1) -> None:
    """Print the message, unless it is empty, and end the process at once. Child processes notice this and end, too."""
    if message:
        print(f"megatron_rl: {message}", file=sys.stderr, flush=True)
    os._exit(code)


def run_and_end(main: Callable[[], object]) -> NoReturn:
    """Call `main` and end the process like `sys.exit`, but skip the interpreter's finalization.

    Finalization would abort the process if a daemon thread returns from C++ meanwhile, such as one that releases a gloo
    group and waits for a lost peer.
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
    threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads, including those of executors
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
