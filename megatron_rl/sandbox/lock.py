"""Takes from a process what text of a model must not do: it computes, reads what is installed, prints, and no more.

A filter of the kernel (seccomp) allows it a list of system calls: no second process, no socket, no file opened for
writing, none removed or renamed, no signal to others. With no second process to hide in, killing it ends it. A program
has so many threads as its `Threads` grant, and none on a kernel that does not ask (Linux before 5.5). Landlock
(Linux 5.13) lets it open the interpreter, installed packages and the system's libraries, and no other file. Linux on
x86_64 only; elsewhere such text is not run at all. What it can still do: learn which files there are; read them on a
kernel without Landlock; and, as text that is evaluated beside its own scorer, forge that scorer's verdict.

`locked.py` runs programs so. This file is also the script of a tool's launcher, which has the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import math
import os
import platform
import resource
import select
import signal
import socket
import stat
import struct
import sys
import warnings
from typing import Any

MOST_OPEN_FILES = 64
MOST_THREADS = 63
"""That a program may start in its life, beside its first one. The limit that the system has (RLIMIT_NPROC) counts all
processes of a user, and does not bind root."""
READY, LOCKED = b"+", b"!"
"""Said with a listener, or to a tool; and by a process once it is locked in."""

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
"""The rights of Landlock's first version, which later ones know too."""

# Of <linux/prctl.h>, <linux/bpf_common.h> and <linux/seccomp.h>, for which Python has no names.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, KILL_PROCESS, FAIL, ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
SECCOMP, SET_FILTER, NEW_LISTENER = 317, 1, 1 << 3
HEAR_QUESTION, ANSWER_QUESTION, GO_ON = 0xC0502100, 0xC0182101, 1
QUESTION_BYTES, ASKED_ARGUMENTS_AT = 80, 32
"""The size of `struct seccomp_notif`, which begins with the question's number; where the call's arguments begin."""
X86_64 = 0xC000003E
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16


class Instruction(ctypes.Structure):
    """`struct sock_filter`: classic BPF."""

    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction))]


Step = tuple[int, int, int, int]
"""Operation, how many steps to skip where its test holds, how many where it does not, and the value."""


def allow_if(test: int, value: int) -> list[Step]:
    """Allow the call if the loaded argument passes; else go on."""
    return [(test, 0, 1, value), (RETURN, 0, 0, ALLOW)]


def refuse(error: int) -> list[Step]:
    return [(RETURN, 0, 0, FAIL | error)]


def argument(index: int, *, high: bool = False) -> list[Step]:
    """Load one half of an argument; the low one holds all of a flag, a command or a process id."""
    return [(LOAD, 0, 0, ARGUMENTS_AT + 8 * index + 4 * high)]


def asking_steps() -> list[Step]:
    """The filter that asks a listener for each thread, and leaves all else to the other one."""
    # Of two filters the stricter verdict counts: what the whole filter refuses is not asked about.
    steps: list[Step] = [(LOAD, 0, 0, NUMBER_AT), (EQUAL, 0, 3, CLONE), *argument(0)]
    return [*steps, (ANY_BIT, 0, 1, IS_THREAD), (RETURN, 0, 0, ASK), (RETURN, 0, 0, ALLOW)]


def filter_steps(pid: int, *, has_threads: bool) -> list[Step]:
    """The whole filter, for the process `pid`, which may send signals to itself."""
    of_thread = [(RETURN, 0, 0, ALLOW)] if has_threads else refuse(errno.EAGAIN)
    only_reading = [(ANY_BIT, 0, 1, FOR_WRITING), *refuse(errno.EPERM), (RETURN, 0, 0, ALLOW)]
    # But SIGKILL, by which a process that the host has killed is known.
    to_itself = [*argument(0), *allow_if(EQUAL, pid), *refuse(errno.EPERM)]
    no_kill = [(EQUAL, 0, 1, signal.SIGKILL), *refuse(errno.EPERM)]
    # glibc starts threads by clone where there is no clone3, whose flags a filter cannot see.
    # Each block ends in a verdict, or a call would run on into the next block with an argument for its number.
    decided: dict[int, list[Step]] = {
        OPEN: [*argument(1), *only_reading],
        OPENAT: [*argument(2), *only_reading],
        CLONE: [*argument(0), (ANY_BIT, 0, 1, IS_THREAD), *of_thread, *refuse(errno.EPERM)],
        CLONE3: refuse(errno.ENOSYS),
        KILL: [*argument(1), *no_kill, *to_itself],
        TGKILL: [*argument(2), *no_kill, *to_itself],
        FCNTL: [*argument(1), *sum((allow_if(EQUAL, it) for it in HARMLESS_FCNTL), []), *refuse(errno.EPERM)],
        IOCTL: [*argument(1), *sum((allow_if(EQUAL, it) for it in HARMLESS_IOCTL), []), *refuse(errno.ENOTTY)],
        # Limits may be read: there is no pointer to new ones.
        PRLIMIT: [*argument(2), (EQUAL, 0, 3, 0), *argument(2, high=True), *allow_if(EQUAL, 0), *refuse(errno.EPERM)],
    }
    # The numbers mean other calls for programs of 32 bits, which the kernel runs too.
    steps: list[Step] = [(LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, X86_64), (RETURN, 0, 0, KILL_PROCESS)]
    steps += [(LOAD, 0, 0, NUMBER_AT)]
    for number in FREE:
        steps += allow_if(EQUAL, number)
    for number, block in decided.items():
        steps += [(EQUAL, 0, len(block), number), *block]
    # A list of what is allowed: a call that a later kernel adds is refused.
    return [*steps, *refuse(errno.EPERM)]


class Threads:
    """Grants a locked program its threads: for each the kernel asks the process that has the program's listener.

    Once MOST_THREADS are granted, nobody listens any more, and the kernel refuses what it would ask for.

        with closing(Threads()) as threads:
            process = subprocess.Popen(command, preexec_fn=lambda: lock(..., threads=threads.theirs))
            threads.take_listener()
            poll.register(threads.listener, select.POLLIN)  # threads.grant() whenever it is readable, while it is >= 0
    """

    def __init__(self) -> None:
        """theirs: for `lock`, which sends the listener through it."""
        self._ours, self.theirs = socket.socketpair()
        self._left, self.listener = MOST_THREADS, -1
        self.is_locked = False
        """The process has said that it is locked in."""

    def take_listener(self) -> None:
        """Call it once the process is locked, or has ended. Without a listener, the program has no thread."""
        self.theirs.close()
        # Not waited for: it was sent before the process was locked, or never, where the kernel cannot ask.
        self._ours.setblocking(False)
        said = b"?"
        while said not in (b"", LOCKED):
            try:
                said, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1)
            except BlockingIOError:
                break
            self.listener = descriptors[0] if descriptors else self.listener
        self.is_locked = said == LOCKED

    def grant(self) -> None:
        """Answer a question of the kernel if one waits to be heard; stop listening where the program has ended."""
        try:
            question = hear_question(self.listener)
            if question is None:
                return
            # Safe here: what the filter has looked at is in a register, where no other thread can change it.
            answer_question(self.listener, question)
        except EOFError:
            self._stop_listening()
            return
        except OSError:  # it has ended, or the kernel can only ask
            self._left = 0
        self._left -= 1
        if self._left <= 0:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self.listener >= 0:
            os.close(self.listener)
            self.listener = -1

    def close(self) -> None:
        self._stop_listening()
        self._ours.close()
        self.theirs.close()


def hear_question(listener: int) -> bytearray | None:
    """Return what the kernel asks a filter's listener, None if nobody asks. EOFError once all who could have ended."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    events = dict(poll.poll(0)).get(listener, 0)
    # Before Linux 6.11 hearing waits for ever where nobody asks, as when who asked was killed meanwhile.
    if not events & select.POLLIN:
        if events & select.POLLHUP:
            raise EOFError
        return None
    question = bytearray(QUESTION_BYTES)
    try:
        fcntl.ioctl(listener, HEAR_QUESTION, question)
    except FileNotFoundError:  # who asked was killed meanwhile
        return None
    return question


def answer_question(listener: int, question: bytearray, error: int = 0) -> None:
    """Let the call that was asked about go on, or fail with an error."""
    answer = struct.pack("<QqiI", *struct.unpack_from("<Q", question), 0, -error, 0 if error else GO_ON)
    with contextlib.suppress(FileNotFoundError):  # who asked was killed meanwhile
        fcntl.ioctl(listener, ANSWER_QUESTION, answer)


def ask_for_threads(libc: ctypes.CDLL, asked: socket.socket) -> bool:
    """Have the kernel ask for each thread who gets the listener through `asked`; False where it cannot."""
    steps = asking_steps()
    program = Program(len(steps), (Instruction * len(steps))(*steps))
    listener = libc.syscall(ctypes.c_long(SECCOMP), SET_FILTER, NEW_LISTENER, ctypes.byref(program))
    if listener < 0:
        return False
    socket.send_fds(asked, [READY], [listener])
    os.close(listener)
    return True


def lock(*, parent: int, time_s: float, memory_bytes: int, threads: socket.socket | None = None) -> None:
    """Take from this process all that text must not do, for good. It dies with its parent.

    threads: the end that its Threads have for it; None allows no thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_ulong(0)
    header, no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), nothing, nothing, nothing)
    # It may have died before the kernel was told to watch it.
    if os.getppid() != parent:
        os._exit(1)
    # Root's own would open files whatever their modes say.
    libc.capset(header, no_capabilities)
    # A process without capabilities is given Landlock and filters only so: they could trick a setuid program.
    libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), nothing, nothing, nothing)
    if hides_files():
        hide_files()
    # All limits before the filter, which refuses to change them.
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NOFILE, MOST_OPEN_FILES)
    # The parent's deadline counts; this one ends what a parent is too busy to end.
    limit(resource.RLIMIT_CPU, cpu_limit_s(time_s))
    limit(resource.RLIMIT_AS, memory_bytes)
    # The listener's filter first: the whole one allows neither a further filter nor to send anything.
    steps = filter_steps(os.getpid(), has_threads=threads is not None and ask_for_threads(libc, threads))
    program = Program(len(steps), (Instruction * len(steps))(*steps))
    if libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(program), nothing, nothing):
        os._exit(1)  # better no verdict than one beside free text
    if threads is not None:
        os.write(threads.fileno(), LOCKED)  # all that the filter allows to be done with a socket


def cpu_limit_s(time_s: float) -> int:
    """Return the seconds of processor time after which a locked process is killed."""
    return math.ceil(time_s) + 1


def landlock(call: int, *arguments: Any) -> int:
    """Return what one of Landlock's system calls gives: -1 where it fails, as on a kernel without them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    # An int would be passed in 32 bits, and the call reads 64.
    as_given = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(libc.syscall(ctypes.c_long(call), *as_given))


def hides_files() -> bool:
    return landlock(CREATE_RULESET, 0, 0, ASK_VERSION) >= 1


def readable() -> list[str]:
    """The paths that locked text may open: the interpreter, installed packages and the system's libraries."""
    programs = os.path.dirname(sys.executable)
    python = [sys.base_prefix, sys.base_exec_prefix, programs, os.path.join(os.path.dirname(programs), "pyvenv.cfg")]
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
    # A Python that is installed under / would open everything.
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


def address_space() -> int:
    """Bytes of address space that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@functools.cache
def check_lockable() -> None:
    """Raise RuntimeError where this host cannot lock a process."""
    host = f"{sys.platform} on {platform.machine()}"
    if host != "linux on x86_64":
        raise RuntimeError(
            f"this reward runs what the model writes, which can be locked in on Linux on x86_64 alone, and this is "
            f"{host}; take a reward that compares text."
        )
    parent, pid = os.getpid(), os.fork()  # whether it works is known once it has been tried
    if pid == 0:
        try:
            lock(parent=parent, time_s=10, memory_bytes=1 << 46)
            os.kill(parent, 0)  # harmless, and not allowed: a kernel may take a filter and not heed it
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


def become_program() -> None:
    """Lock this process in, say so, and become the Python program that stdin holds. The launcher of a tool's calls.

    Arguments: the parent's process id, seconds of processor time, bytes of address space, and the descriptor of the end
    that its Threads have for it.
    """
    parent, time_s, memory_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    with socket.socket(fileno=int(sys.argv[4])) as threads:
        lock(parent=parent, time_s=time_s, memory_bytes=memory_bytes, threads=threads)
    os.write(1, READY)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-"])


if __name__ == "__main__":
    become_program()
