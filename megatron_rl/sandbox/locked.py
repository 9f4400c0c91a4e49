"""Runs what a model wrote, locked in (lock.py): a program in an interpreter of its own, or a function in a fork."""

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
from contextlib import closing, contextmanager
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
"""Within which the kernel's two ways to count processor time agree."""
RESULT = 3
"""File descriptor of a locked fork's result."""


PROGRAM = """
def read_program():
    import builtins, sys
    builtins.exit = builtins.quit = sys.exit  # which `site` has, and a locked interpreter runs without it
    text, sys.path[len(sys.path) :], sys.argv[1:] = sys.argv[1], sys.argv[2:], []
    with open(int(text), encoding="utf-8", errors="replace") as file:
        return compile(file.read(), "program", "exec", dont_inherit=True)
exec(read_program())
"""
"""The script that runs a program as `__main__`. Arguments: the descriptor of its text, and folders of packages."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment in which BLAS, which numpy has, starts no thread for each core: text may have few or none."""
START_S = 30.0
"""Longest that a process may take until it is locked in. That is not the text's doing."""
ENDING_S = 0.5
"""Longest between the end of a process's output and its own."""


class TextFailed(RuntimeError):
    """The model's text raised, crashed, or took more time, memory or output than it may."""


class NoResult(TextFailed):
    """A locked fork ended, and said nothing."""


class SandboxFailed(InfrastructureFailure):
    """Text could not be locked in, or the host has killed its process: nothing that the text did. Never a reward."""

    KIND = "sandbox"


def evaluate(
    function: Callable[..., Any],
    *args: Any,
    time_s: float,
    memory_bytes: int,
    keep: Sequence[int] = (),
    threads: Threads | None = None,
) -> Any:
    """Return what `function(*args)` gives in a locked fork of this process, as JSON carries it. TextFailed otherwise.

    memory_bytes: that it may take beside what this process has. keep: open files that it keeps; `function` has their
    descriptors there as its last arguments. threads: of another program, which are granted meanwhile.
    """
    check_host()
    # A fork has what the caller has imported. A pipe alone leads back from it, so that it can do nothing but answer.
    parent = os.getpid()
    with host_errors():
        reader, writer = os.pipe()
        pid = os.fork()
    if pid == 0:
        answer_and_exit(function, args, writer, keep, parent=parent, time_s=time_s, memory_bytes=memory_bytes)
    try:
        os.close(writer)
        wait_until_locked(reader)
        content = read_to_the_end(reader, time.monotonic() + time_s, MOST_RESULT_BYTES, threads)
        if not content and content is not None:
            refuse_killed(pid, time_s)
    finally:
        os.close(reader)
        # Also where it has ended: until it is waited for, its number is given to no other process.
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
    """The locked fork: all it keeps of its parent's files is the pipe for its result, and what it is told to."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # another locked process cannot read its memory
        high = [fcntl.fcntl(kept, fcntl.F_DUPFD, MOST_OPEN_FILES) for kept in (writer, *keep)]  # out of the way
        kept = range(RESULT, RESULT + len(high))
        for old, new in zip(high, kept, strict=True):
            os.dup2(old, new)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nowhere, standard)
        # Sockets and files of the parent would stay open past the lock, which only keeps new ones from being opened.
        os.closerange(kept.stop, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        lock(parent=parent, time_s=time_s, memory_bytes=address_space() + memory_bytes)
        os.write(RESULT, LOCKED)
        os.environ.update(ONE_THREAD)
        try:
            answer = {"value": function(*args, *kept[1:])}
        except BaseException as error:  # the text's own, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        os.write(RESULT, json.dumps(answer).encode())
    finally:
        os._exit(0)


def run_program(
    source: str, stdin: str, *, time_s: float, memory_bytes: int, folders: Sequence[str] = ()
) -> str | None:
    """Run Python source in an interpreter of its own, locked; return what it printed.

    None where it ended with an error, printed more than MOST_PRINTED_BYTES or took longer than `time_s`. It has the
    standard library and the packages in `folders`. SandboxFailed where it was not its own doing.
    """
    deadline = time.monotonic() + time_s
    with host_errors():
        given, text = memory_file(stdin), memory_file(source)
    ends = {"stdin": given, "stdout": subprocess.PIPE, "pass_fds": [text]}
    try:
        with started_program(PROGRAM, (str(text), *folders), **ends, time_s=time_s, memory_bytes=memory_bytes) as (
            process,
            threads,
        ):
            assert process.stdout is not None
            printed = read_to_the_end(process.stdout.fileno(), deadline, MOST_PRINTED_BYTES, threads)
            if printed is not None:
                refuse_killed(process.pid, time_s)
            # It may have closed its output and go on.
            code = None if printed is None else process.wait(max(0.0, deadline - time.monotonic()))
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
    """Start Python source in an interpreter of its own, locked, and kill it in the end. `threads` are to be granted."""
    check_host()
    parent = os.getpid()
    with host_errors():
        script, threads = memory_file(source), Threads()
    with closing(threads):
        try:
            process = started(
                # Isolated, without site packages or what they run at the start, and without writing .pyc files.
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
            # Popen has returned: the program was executed, and so has locked itself.
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
    """SandboxFailed where this host cannot lock a process."""
    try:
        check_lockable()
    except (RuntimeError, OSError) as error:
        raise SandboxFailed(str(error)) from error


@contextmanager
def host_errors() -> Iterator[None]:
    """Say of errors of the system that they are the host's, such as a lack of memory, processes or files."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxFailed(f"no process could be started to lock text in: {error}.") from error


def wait_until_locked(reader: int) -> None:
    """SandboxFailed where a fork does not say that it is locked in."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    if not poll.poll(START_S * 1000):
        raise SandboxFailed(f"a process was not locked in within {START_S:g} s; the host has too much to do.")
    if os.read(reader, len(LOCKED)) != LOCKED:
        raise SandboxFailed("a process ended before it was locked in; look for a lack of memory.")


def refuse_killed(pid: int, time_s: float) -> None:
    """SandboxFailed for a child whose output has ended, and that somebody outside killed, such as for want of memory.

    Text cannot kill itself so, and is not killed so by any limit but that of its processor time.
    """
    until = time.monotonic() + ENDING_S
    while (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
        if time.monotonic() > until:  # it has closed its output, and goes on
            return
        time.sleep(0.001)
    was_killed = ended.si_code == os.CLD_KILLED and ended.si_status == signal.SIGKILL
    if was_killed and processor_s(pid) < cpu_limit_s(time_s) - CLOCK_S:
        raise SandboxFailed(
            "the host killed a process in which text was locked, long before its own limits; look for a lack of "
            "memory, in the kernel's log."
        )


def processor_s(pid: int) -> float:
    """Return the processor time of a child that has ended and is not waited for yet."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        user, system = file.read().rpartition(b")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    with host_errors():
        return subprocess.Popen(command, **options)


def memory_file(text: str) -> int:
    """Return the descriptor of a file in memory, at its beginning."""
    # No folder has it, so that no other program finds it and nothing is left of it.
    file = os.memfd_create("text")
    content = memoryview(text.encode("utf-8", "replace"))
    while content:
        content = content[os.write(file, content) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def read_to_the_end(end: int, deadline: float, most: int, threads: Threads | None = None) -> bytes | None:
    """Return all that comes through a pipe; None where it does not end in time or is more than `most` bytes.

    Meanwhile its program is granted its threads.
    """
    content, poll = bytearray(), select.poll()
    poll.register(end, select.POLLIN)
    listener = -1 if threads is None else threads.listener
    if listener >= 0:
        poll.register(listener, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        # Rounded up, or the last millisecond would be spent asking again and again.
        ready = dict(poll.poll(math.ceil(left_s * 1000)))
        if threads is not None and listener in ready:
            threads.grant()
            if threads.listener < 0:
                poll.unregister(listener)
                listener = -1
        if not ready:
            break
        if end not in ready:
            continue
        part = os.read(end, 1 << 16)
        if not part:
            return bytes(content)
        content += part
        if len(content) > most:
            break
    return None
