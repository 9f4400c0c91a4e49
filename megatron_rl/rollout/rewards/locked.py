"""Runs what a model wrote, in a process that may compute, read what is installed and print, and nothing else.

A filter of the kernel (seccomp) allows it a list of system calls: no second process, no socket, no file opened for
writing, none removed or renamed, no signal to others. With no second process to hide in, killing it ends it. Landlock
(Linux 5.13) lets it open the interpreter, installed packages and the system's libraries, and no other file. Linux on
x86_64 only; elsewhere such text is not run at all. What it can still do: learn which files there are; read them on a
kernel without Landlock; and, as text that is evaluated beside its own scorer, forge that scorer's verdict.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import math
import os
import platform
import resource
import select
import signal
import stat
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

MOST_RESULT_BYTES = 1 << 16
MOST_OPEN_FILES = 64
READY = b"+"
RESULT = 3
"""File descriptor of a locked fork's result."""

FREE = (
    *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 32, 33, 34),
    *(35, 36, 37, 38, 39, 59, 60, 61, 63, 78, 79, 80, 81, 89, 95, 96, 97, 98, 99, 100, 102, 104, 107, 108, 110, 111),
    *(115, 121, 124, 127, 130, 131, 158, 186, 201, 202, 204, 217, 218, 219, 228, 229, 230, 231, 232, 233, 262, 267),
    *(269, 270, 271, 273, 274, 281, 290, 291, 292, 293, 295, 309, 318, 324, 332, 334, 436, 439),
)
"""System calls of x86_64 allowed with any arguments: reading, memory, time, waiting, what threads need, exec, exit.

Writing is one of them: to the pipe it is given, as no other file can be opened for it.
"""
OPEN, IOCTL, CLONE, KILL, FCNTL, TGKILL, OPENAT, PRLIMIT, CLONE3 = 2, 16, 56, 62, 72, 234, 257, 302, 435
FOR_WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
IS_THREAD = 0x10000  # CLONE_THREAD
HARMLESS_FCNTL = (0, 1, 2, 3, 4, 1030)  # duplicate, and get or set flags; none that sends a signal
HARMLESS_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # of terminals and pipes: ask, block, close on exec

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
BENEATH, ASK_VERSION = 1, 1
EXECUTE_FILE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 2, 1 << 3
ALL_RIGHTS = (1 << 13) - 1
"""Of Landlock's first version, which later ones know too."""

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, KILL_PROCESS, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
X86_64 = 0xC000003E
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16


class TextFailed(RuntimeError):
    """What the model wrote raised, crashed, or took more time, memory or output than it may."""


class Instruction(ctypes.Structure):
    """`struct sock_filter`: classic BPF."""

    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction))]


Step = tuple[int, int, int, int]


def allow_if(test: int, value: int) -> list[Step]:
    """Allow the call if the loaded argument passes; else go on."""
    return [(test, 0, 1, value), (RETURN, 0, 0, ALLOW)]


def refuse(error: int) -> list[Step]:
    return [(RETURN, 0, 0, FAIL | error)]


def argument(index: int, *, high: bool = False) -> list[Step]:
    """Load one half of an argument; the low one holds all of a flag, a command or a process id."""
    return [(LOAD, 0, 0, ARGUMENTS_AT + 8 * index + 4 * high)]


def filter_steps(pid: int) -> list[Step]:
    """The whole filter, for the process `pid`, which may send signals to itself."""
    only_reading = [(ANY_BIT, 0, 1, FOR_WRITING), *refuse(errno.EPERM), (RETURN, 0, 0, ALLOW)]
    to_itself = [*argument(0), *allow_if(EQUAL, pid), *refuse(errno.EPERM)]
    # glibc starts threads by clone where there is no clone3, whose flags a filter cannot see.
    decided: dict[int, list[Step]] = {
        OPEN: [*argument(1), *only_reading],
        OPENAT: [*argument(2), *only_reading],
        CLONE: [*argument(0), *allow_if(ANY_BIT, IS_THREAD), *refuse(errno.EPERM)],
        CLONE3: refuse(errno.ENOSYS),
        KILL: to_itself,
        TGKILL: to_itself,
        FCNTL: [*argument(1), *sum((allow_if(EQUAL, it) for it in HARMLESS_FCNTL), []), *refuse(errno.EPERM)],
        IOCTL: [*argument(1), *sum((allow_if(EQUAL, it) for it in HARMLESS_IOCTL), []), *refuse(errno.ENOTTY)],
        # Limits may be read: there is no pointer to new ones.
        PRLIMIT: [
            *argument(2),
            (EQUAL, 0, 3, 0),
            *argument(2, high=True),
            *allow_if(EQUAL, 0),
            *refuse(errno.EPERM),
        ],
    }
    steps: list[Step] = [(LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, X86_64), (RETURN, 0, 0, KILL_PROCESS)]
    steps += [(LOAD, 0, 0, NUMBER_AT)]
    for number in FREE:
        steps += allow_if(EQUAL, number)
    for number, block in decided.items():
        steps += [(EQUAL, 0, len(block), number), *block]
    return [*steps, *refuse(errno.EPERM)]


def lock(*, parent: int, time_s: float, memory_bytes: int) -> None:
    """Take from this process all that text must not do, for good. It dies with its parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_ulong(0)
    steps = filter_steps(os.getpid())
    program = Program(len(steps), (Instruction * len(steps))(*steps))
    header, no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), nothing, nothing, nothing)
    if os.getppid() != parent:
        os._exit(1)
    libc.capset(header, no_capabilities)
    libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), nothing, nothing, nothing)
    if hides_files():
        hide_files()
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NOFILE, MOST_OPEN_FILES)
    limit(resource.RLIMIT_CPU, math.ceil(time_s) + 1)
    limit(resource.RLIMIT_AS, memory_bytes)
    if libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(program), nothing, nothing):
        os._exit(1)  # better no verdict than one beside free text


def landlock(call: int, *arguments: Any) -> int:
    """Return what one of Landlock's system calls gives: -1 where it fails, as on a kernel without them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    as_given = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(libc.syscall(ctypes.c_long(call), *as_given))


def hides_files() -> bool:
    return landlock(CREATE_RULESET, 0, 0, ASK_VERSION) >= 1


def readable() -> list[str]:
    """What locked text may open: the interpreter, installed packages and the system's libraries."""
    programs = os.path.dirname(sys.executable)
    python = [sys.base_prefix, sys.base_exec_prefix, programs, os.path.join(os.path.dirname(programs), "pyvenv.cfg")]
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
    return [path for path in (*python, *packages, *system) if os.path.realpath(path) != "/"]


def hide_files() -> None:
    """Have this process open nothing but what is readable, for good; it has no new privileges already."""
    rules = landlock(CREATE_RULESET, ctypes.byref(ctypes.c_uint64(ALL_RIGHTS)), 8, 0)
    for path in readable():
        try:
            place = os.open(path, os.O_PATH)
        except OSError:
            continue  # not every system has all of them
        rights = READ_FILE | EXECUTE_FILE | (READ_FOLDER if stat.S_ISDIR(os.fstat(place).st_mode) else 0)
        landlock(ADD_RULE, rules, BENEATH, struct.pack("<Qi", rights, place), 0)
        os.close(place)
    if landlock(RESTRICT_SELF, rules, 0):
        os._exit(1)  # better no verdict than one beside free text
    os.close(rules)


def limit(what: int, value: int) -> None:
    """Lower a limit; one that is lower stays."""
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


@functools.cache
def check_lockable() -> None:
    """Raise RuntimeError where this host cannot lock a process."""
    host = f"{sys.platform} on {platform.machine()}"
    if host != "linux on x86_64":
        raise RuntimeError(
            f"this reward runs what the model writes, which can be locked in on Linux on x86_64 alone, and this is "
            f"{host}; take a reward that compares text."
        )
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            lock(parent=parent, time_s=10, memory_bytes=1 << 46)
            os.kill(parent, 0)
        except PermissionError:
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError(
            "this reward runs what the model writes, and this kernel refuses the filter (seccomp) that would lock it "
            "in; allow seccomp in the container, or take a reward that compares text."
        )
    if not hides_files():
        warnings.warn(
            "this kernel has no Landlock (Linux 5.13): what the model writes can read the files that this user may "
            "read, such as the run's token; run as a user whose files are no secrets.",
            RuntimeWarning,
            stacklevel=2,
        )


def evaluate(function: Callable[..., Any], *args: Any, time_s: float, memory_bytes: int) -> Any:
    """Return what `function(*args)` gives in a locked fork of this process, as JSON carries it. TextFailed otherwise.

    memory_bytes: that it may take beside what this process has.
    """
    check_lockable()
    parent, deadline = os.getpid(), time.monotonic() + time_s
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer_and_exit(function, args, writer, parent=parent, time_s=time_s, memory_bytes=memory_bytes)
    try:
        os.close(writer)
        content = read_to_the_end(reader, deadline, MOST_RESULT_BYTES)
    finally:
        os.close(reader)
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
    function: Callable[..., Any], args: tuple[Any, ...], writer: int, *, parent: int, time_s: float, memory_bytes: int
) -> None:
    """The locked fork: all it keeps of its parent's files is the pipe for its result."""
    try:
        os.dup2(writer, RESULT)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nowhere, standard)
        os.closerange(RESULT + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        lock(parent=parent, time_s=time_s, memory_bytes=address_space() + memory_bytes)
        try:
            answer = {"value": function(*args)}
        except BaseException as error:  # the text's own, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        os.write(RESULT, json.dumps(answer).encode())
    finally:
        os._exit(0)


def address_space() -> int:
    """Bytes of address space that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def run_program(source: str, stdin: str, *, time_s: float, memory_bytes: int, most_output: int = 1 << 22) -> str | None:
    """Run Python source in an interpreter of its own, locked; return what it printed.

    None where it ended with an error, printed more than `most_output` bytes or took longer than `time_s`. It has the
    standard library and no other package.
    """
    check_lockable()
    parent, deadline = os.getpid(), time.monotonic() + time_s
    script, given = memory_file(source), memory_file(stdin)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", f"/proc/self/fd/{script}"],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            pass_fds=[script],
            preexec_fn=lambda: lock(parent=parent, time_s=time_s, memory_bytes=memory_bytes),
        )
    finally:
        os.close(script)
        os.close(given)
    assert process.stdout is not None
    try:
        printed = read_to_the_end(process.stdout.fileno(), deadline, most_output)
        code = None if printed is None else process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return None if printed is None or code != 0 else printed.decode("utf-8", "replace")


def memory_file(text: str) -> int:
    """Return the descriptor of a file in memory, at its beginning."""
    file = os.memfd_create("text")
    content = memoryview(text.encode("utf-8", "replace"))
    while content:
        content = content[os.write(file, content) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def read_to_the_end(end: int, deadline: float, most: int) -> bytes | None:
    """Return all that comes through a pipe; None where it does not end in time or is more than `most` bytes."""
    content, poll = bytearray(), select.poll()
    poll.register(end, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        if not poll.poll(math.ceil(left_s * 1000)):
            break
        part = os.read(end, 1 << 16)
        if not part:
            return bytes(content)
        content += part
        if len(content) > most:
            break
    return None


def become_program() -> None:
    """Lock this process in, say so, and become the Python program that stdin holds. The launcher of a tool's calls.

    Arguments: the parent's process id, seconds of processor time, bytes of address space.
    """
    parent, time_s, memory_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    lock(parent=parent, time_s=time_s, memory_bytes=memory_bytes)
    os.write(1, READY)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-"])


if __name__ == "__main__":
    become_program()
