"""Runs model-written code in locked processes (lock.py): a program in its own interpreter, or a function in a fork."""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_rl.api import InfrastructureFailure
from megatron_rl.sandbox.lock import (
    LOCKED,
    MOST_OPEN_FILES,
    PR_SET_DUMPABLE,
    Threads,
    address_space,
    check_lockable,
    cpu_limit_s,
    lock,
)

MOST_RESULT_BYTES = 1 << 16
MOST_PRINTED_BYTES = 1 << 22
CLOCK_S = 0.1
"""Tolerance in seconds: /proc may report less CPU time than the kernel counts against the CPU limit."""
RESULT = 3
"""File descriptor of the result in a locked fork."""


PROGRAM = """
def read_program():
    import builtins, sys
    builtins.exit = builtins.quit = sys.exit  # which `site` has, and a locked interpreter runs without it
    text, sys.path[len(sys.path) :], sys.argv[1:] = sys.argv[1], sys.argv[2:], []
    with open(int(text), encoding="utf-8", errors="replace") as file:
        return compile(file.read(), "program", "exec", dont_inherit=True)
exec(read_program())
"""
"""Script that runs a program as `__main__`.

Arguments: the file descriptor of the program's text, then folders of packages.
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment that keeps numpy's BLAS from starting a thread per core. Sandboxed code may have few threads or none."""
START_S = 30.0
"""Time limit for locking a process. If it is exceeded, the host is at fault, not the sandboxed code."""
LONGEST_WAIT_S = 60.0
"""Maximum total time that locked processes may wait for a CPU. If they wait longer, the host is at fault."""
LOOK_S = 0.05
"""Time between checks of a process that may be waiting for a CPU."""
ENDING_S = 0.5
"""Maximum time to wait for a process to exit after its output has ended."""


class TextFailed(RuntimeError):
    """Model-written code raised an exception, crashed, or exceeded its limit of time, memory or output."""


class NoResult(TextFailed):
    """A locked fork exited without a result."""


class SandboxFailed(InfrastructureFailure):
    """The process for model-written code could not be locked, or the host killed it.

    The code is not at fault, so this error never becomes a reward.
    """

    KIND = "sandbox"


class TimeLimit:
    """A limit of `time_s` seconds for locked processes. Time that they wait for a CPU does not count.

    This way, a busy host does not turn a right answer into a wrong one.
    """

    def __init__(self, time_s: float, *pids: int) -> None:
        """Start the time. pids: one process, or several that run in turn, so that their waiting times never overlap."""
        self.time_s, self.pids, self.began = time_s, pids, time.monotonic()
        self._waited_before = self._waited_s()

    def left_s(self) -> float:
        """Return the seconds left; 0 or less if none are. SandboxFailed after waiting LONGEST_WAIT_S for a CPU."""
        left_s = self.time_s - (time.monotonic() - self.began)
        if left_s > 0:
            return left_s
        waited_s = self._waited_s() - self._waited_before
        if waited_s > LONGEST_WAIT_S:
            raise SandboxFailed(f"locked text waited {waited_s:.0f} s for a processor; the host has too much to do.")
        left_s += waited_s
        # The kernel counts a wait when it ends, so a process may be waiting now.
        return LOOK_S if left_s <= 0 and any(map(self._may_wait, self.pids)) else left_s

    def _waited_s(self) -> float:
        return sum(processor_use(pid)[1] for pid in self.pids)

    def _may_wait(self, pid: int) -> bool:
        with suppress(OSError):
            return stat_of(pid)[0] == "R" and processor_use(pid)[0] < self.time_s  # R: it runs, or could run
        return False


def processor_use(pid: int) -> tuple[float, float]:
    """Return the seconds that a process's main thread has run, and the seconds that it has waited for a CPU.

    (0, 0) if the kernel does not report them.
    """
    try:
        ran_ns, waited_ns = Path(f"/proc/{pid}/schedstat").read_bytes().split()[:2]
        return int(ran_ns) / 1e9, int(waited_ns) / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, beginning with the state (see proc(5)). OSError if the process is gone."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def evaluate(
    function: Callable[..., Any],
    *args: Any,
    time_s: float,
    memory_bytes: int,
    keep: Sequence[int] = (),
    threads: Threads | None = None,
    waits_for: Sequence[int] = (),
) -> Any:
    """Return `function(*args)`, computed in a locked fork of this process and sent back as JSON.

    TextFailed if the function fails, SandboxFailed if the host is at fault.

    time_s: as in TimeLimit. waits_for: ids of locked processes that the function waits for. Time that
    these wait for a CPU does not count either.

    memory_bytes: memory limit in addition to this process's usage. keep: file descriptors that the fork keeps open;
    `function` gets their new numbers as its last arguments. threads: the `Threads` of another program, whose requests
    are granted during the evaluation.
    """
    check_host()
    # The fork inherits the caller's imports. A single pipe leads back, so that it can do nothing but answer.
    parent = os.getpid()
    with host_errors():
        reader, writer = os.pipe()
        pid = os.fork()
    if pid == 0:
        answer_and_exit(function, args, writer, keep, parent=parent, time_s=time_s, memory_bytes=memory_bytes)
    try:
        os.close(writer)
        wait_until_locked(reader)
        content = read_to_the_end(reader, TimeLimit(time_s, pid, *waits_for), MOST_RESULT_BYTES, threads)
        if not content and content is not None:
            refuse_killed(pid, time_s)
    finally:
        os.close(reader)
        # Kill it even if it has exited: its process id is not reused before waitpid.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if content is None:
        raise TextFailed(f"the evaluation did not end within {time_s:g} s.")
    if not content:
        raise NoResult("the evaluation ended without a result.")
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TextFailed("the evaluation gave no result that can be read.") from error
    if not isinstance(answer, dict) or "value" not in answer:
        raise TextFailed(f"the evaluation failed: {str(answer)[:500]}.")
    return answer["value"]


def answer_and_exit(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    writer: int,
    keep: Sequence[int],
    *,
    parent: int,
    time_s: float,
    memory_bytes: int,
) -> None:
    """Lock this fork, run the function, write the result and exit.

    Only the result pipe and the files in `keep` stay open.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # other locked processes cannot read its memory
        # Move the descriptors to high numbers, so that setting the low ones below overwrites none.
        high = [fcntl.fcntl(kept, fcntl.F_DUPFD, MOST_OPEN_FILES) for kept in (writer, *keep)]
        kept = range(RESULT, RESULT + len(high))
        for old, new in zip(high, kept, strict=True):
            os.dup2(old, new)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nowhere, standard)
        # The lock only prevents opening new files. The parent's open sockets and files must be closed here.
        os.closerange(kept.stop, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        lock(parent=parent, time_s=time_s, memory_bytes=address_space() + memory_bytes)
        os.write(RESULT, LOCKED)
        os.environ.update(ONE_THREAD)
        try:
            answer = {"value": function(*args, *kept[1:])}
        except BaseException as error:  # model-written code may raise anything
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        os.write(RESULT, json.dumps(answer).encode())
    finally:
        os._exit(0)


def run_program(
    source: str, stdin: str, *, time_s: float, memory_bytes: int, folders: Sequence[str] = ()
) -> str | None:
    """Run Python source in its own locked interpreter and return what it printed.

    None if the program exited with an error, printed more than MOST_PRINTED_BYTES or took longer than `time_s`. It
    can import the standard library and the packages in `folders`. SandboxFailed if the host is at fault.
    """
    with host_errors():
        given, text = memory_file(stdin), memory_file(source)
    ends = {"stdin": given, "stdout": subprocess.PIPE, "pass_fds": [text]}
    try:
        with started_program(PROGRAM, (str(text), *folders), **ends, time_s=time_s, memory_bytes=memory_bytes) as (
            process,
            threads,
        ):
            assert process.stdout is not None
            limit = TimeLimit(time_s, process.pid)
            printed = read_to_the_end(process.stdout.fileno(), limit, MOST_PRINTED_BYTES, threads)
            if printed is not None:
                refuse_killed(process.pid, time_s)
            # The program may have closed its output and still be running.
            code = None if printed is None else process.wait(max(0.0, limit.left_s()))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        os.close(given)
        os.close(text)
    return None if printed is None or code != 0 else printed.decode("utf-8", "replace")


@contextmanager
def started_program(
    source: str,
    arguments: Sequence[str] = (),
    *,
    time_s: float,
    memory_bytes: int,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> Iterator[tuple[subprocess.Popen[bytes], Threads]]:
    """Start Python source in its own locked interpreter, and kill it at the end of the `with` block.

    The caller must grant the yielded `Threads`.
    """
    check_host()
    parent = os.getpid()
    with host_errors():
        script, threads = memory_file(source), Threads()
    with closing(threads):
        try:
            process = started(
                # Run isolated, without site-packages and their start-up code, and without writing .pyc files.
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", f"/proc/self/fd/{script}", *arguments],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                env=ONE_THREAD,
                pass_fds=[script, *pass_fds],
                preexec_fn=lambda: lock(
                    parent=parent, time_s=time_s, memory_bytes=memory_bytes, threads=threads.theirs
                ),
            )
        finally:
            os.close(script)
        try:
            # Popen has returned, so preexec_fn has finished, and the program has locked itself.
            threads.take_listener()
            if not threads.is_locked:
                raise SandboxFailed("a program's process ended before it was locked in; look for a lack of memory.")
            yield process, threads
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def check_host() -> None:
    """Raise SandboxFailed if this host cannot lock a process."""
    try:
        check_lockable()
    except (RuntimeError, OSError) as error:
        raise SandboxFailed(str(error)) from error


@contextmanager
def host_errors() -> Iterator[None]:
    """Convert operating system errors, such as a lack of memory, processes or files, to SandboxFailed."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxFailed(f"no process could be started to lock text in: {error}.") from error


def wait_until_locked(reader: int) -> None:
    """Wait until a fork reports that it is locked. SandboxFailed if it does not within START_S."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    if not poll.poll(START_S * 1000):
        raise SandboxFailed(f"a process was not locked in within {START_S:g} s; the host has too much to do.")
    if os.read(reader, len(LOCKED)) != LOCKED:
        raise SandboxFailed("a process ended before it was locked in; look for a lack of memory.")


def refuse_killed(pid: int, time_s: float) -> None:
    """Raise SandboxFailed if a child whose output has ended was killed from outside, such as for lack of memory.

    A child killed by SIGKILL before its CPU time limit was killed from outside. Sandboxed code cannot send itself
    SIGKILL, and no other limit causes SIGKILL.
    """
    until = time.monotonic() + ENDING_S
    while (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
        if time.monotonic() > until:  # it has closed its output but still runs
            return
        time.sleep(0.001)
    was_killed = ended.si_code == os.CLD_KILLED and ended.si_status == signal.SIGKILL
    if was_killed and processor_s(pid) < cpu_limit_s(time_s) - CLOCK_S:
        raise SandboxFailed(
            "the host killed a process in which text was locked, long before its own limits; look for a lack of "
            "memory, in the kernel's log."
        )


def processor_s(pid: int) -> float:
    """Return the CPU time in seconds of a child that has exited but has not been waited for."""
    user, system = stat_of(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    with host_errors():
        return subprocess.Popen(command, **options)


def memory_file(text: str) -> int:
    """Return the descriptor of an in-memory file with this text, positioned at its start."""
    # Such a file is in no folder, so no other program finds it, and it vanishes when closed.
    file = os.memfd_create("text")
    content = memoryview(text.encode("utf-8", "replace"))
    while content:
        content = content[os.write(file, content) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def read_to_the_end(end: int, limit: TimeLimit, most: int, threads: Threads | None = None) -> bytes | None:
    """Read a pipe to its end. Return None if it does not end within the limit or exceeds `most` bytes.

    threads: the program's `Threads`, whose requests are granted while this function reads.
    """
    content, poll = bytearray(), select.poll()
    poll.register(end, select.POLLIN)
    listener = -1 if threads is None else threads.listener
    if listener >= 0:
        poll.register(listener, select.POLLIN)
    while (left_s := limit.left_s()) > 0:
        # Round up, or the last millisecond would be a busy loop.
        ready = dict(poll.poll(math.ceil(left_s * 1000)))
        if threads is not None and listener in ready:
            threads.grant()
            if threads.listener < 0:
                poll.unregister(listener)
                listener = -1
        if end not in ready:
            continue
        part = os.read(end, 1 << 16)
        if not part:
            return bytes(content)
        content += part
        if len(content) > most:
            break
    return None
