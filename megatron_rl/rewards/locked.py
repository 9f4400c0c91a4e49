"""Runs what a model wrote, locked in (sandbox.py): a program in an interpreter of its own, or a function in a fork."""

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

from megatron_rl.rewards.sandbox import MOST_OPEN_FILES, PR_SET_DUMPABLE, Threads, address_space, check_lockable, lock

MOST_RESULT_BYTES = 1 << 16
MOST_PRINTED_BYTES = 1 << 22
RESULT = 3
"""File descriptor of a locked fork's result."""


class TextFailed(RuntimeError):
    """The model's text raised, crashed, or took more time, memory or output than it may."""


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
    check_lockable()
    # A fork has what the caller has imported. A pipe alone leads back from it, so that it can do nothing but answer.
    parent, deadline = os.getpid(), time.monotonic() + time_s
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer_and_exit(function, args, writer, keep, parent=parent, time_s=time_s, memory_bytes=memory_bytes)
    try:
        os.close(writer)
        content = read_to_the_end(reader, deadline, MOST_RESULT_BYTES, threads)
    finally:
        os.close(reader)
        # Also where it has ended: until it is waited for, its number is given to no other process.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not content:
        how = f"did not end within {time_s:g} s" if content is None else "ended without a result"
        raise TextFailed(f"the evaluation {how}.")
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
        try:
            answer = {"value": function(*args, *kept[1:])}
        except BaseException as error:  # the text's own, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        os.write(RESULT, json.dumps(answer).encode())
    finally:
        os._exit(0)


def run_program(source: str, stdin: str, *, time_s: float, memory_bytes: int) -> str | None:
    """Run Python source in an interpreter of its own, locked; return what it printed.

    None where it ended with an error, printed more than MOST_PRINTED_BYTES or took longer than `time_s`. It has the
    standard library and no other package.
    """
    deadline, given = time.monotonic() + time_s, memory_file(stdin)
    ends = {"stdin": given, "stdout": subprocess.PIPE}
    try:
        with started_program(source, **ends, time_s=time_s, memory_bytes=memory_bytes) as (process, threads):
            assert process.stdout is not None
            printed = read_to_the_end(process.stdout.fileno(), deadline, MOST_PRINTED_BYTES, threads)
            # It may have closed its output and go on.
            code = None if printed is None else process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        os.close(given)
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
    check_lockable()
    parent, script = os.getpid(), memory_file(source)
    with closing(Threads()) as threads:
        try:
            process = subprocess.Popen(
                # Isolated, without site packages or what they run at the start, and without writing .pyc files.
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", f"/proc/self/fd/{script}", *arguments],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                env={},
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
            yield process, threads
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


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
