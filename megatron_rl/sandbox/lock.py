"""Locks a process that runs model-written code: it can compute, read installed files and print, and nothing else.

A kernel filter (seccomp) allows a fixed list of system calls. The process cannot start another process, open a socket,
open a file for writing, remove or rename a file, or signal other processes. Since it has no children, killing it ends
everything that it does. `Threads` grants the process a limited number of threads. On Linux before 5.5 it gets none,
because the kernel cannot ask for permission. Landlock (Linux 5.13) restricts opening files to the interpreter,
installed packages and the system's libraries.

This works on Linux on x86_64 only; elsewhere model-written code is not run at all. Sandboxed code can still find out
which files exist, and on a kernel without Landlock it can read them. Code that is evaluated in the same process as its
scorer can forge the scorer's verdict.

`locked.py` runs programs in locked processes. This file is also the script of a tool's launcher, so it only imports the
standard library.
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
"""Maximum number of threads that a program may start in total, in addition to its main thread.

RLIMIT_NPROC does not serve this purpose: it counts all processes of a user, and does not bind root.
"""
READY, LOCKED = b"+", b"!"
"""Bytes that a process sends to its supervisor. LOCKED: the process is locked.

READY: sent together with the file descriptor of a filter's listener. A tool's launcher also writes READY to stdout
after locking itself.
"""

FREE = (
    *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 32, 33, 34),
    *(35, 36, 37, 38, 39, 59, 60, 61, 63, 78, 79, 80, 81, 89, 95, 96, 97, 98, 99, 100, 102, 104, 107, 108, 110, 111),
    *(115, 121, 124, 127, 130, 131, 158, 186, 201, 202, 204, 217, 218, 219, 228, 229, 230, 231, 232, 233, 262, 267),
    *(269, 270, 271, 273, 274, 281, 290, 291, 292, 293, 295, 309, 318, 324, 332, 334, 436, 439),
)
"""System calls of x86_64 allowed with any arguments: reading, memory, time, waiting, thread support, exec, exit.

Writing is also allowed. It only reaches the pipes that the process was given, since no file can be opened for writing.
"""
OPEN, IOCTL, CLONE, KILL, FCNTL, TGKILL, OPENAT, PRLIMIT, CLONE3 = 2, 16, 56, 62, 72, 234, 257, 302, 435
FOR_WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
IS_THREAD = 0x10000  # CLONE_THREAD
HARMLESS_FCNTL = (0, 1, 2, 3, 4, 1030)  # duplicate, and get or set flags; none that sends a signal
HARMLESS_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # of terminals and pipes: query, block, close on exec

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
BENEATH, ASK_VERSION = 1, 1
EXECUTE_FILE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 2, 1 << 3
ALL_RIGHTS = (1 << 13) - 1
"""Bit mask of all access rights in Landlock's first version. Later versions know these rights too."""

# From <linux/prctl.h>, <linux/bpf_common.h> and <linux/seccomp.h>. Python has no names for them.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, KILL_PROCESS, FAIL, ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
SECCOMP, SET_FILTER, NEW_LISTENER = 317, 1, 1 << 3
HEAR_QUESTION, ANSWER_QUESTION, GO_ON = 0xC0502100, 0xC0182101, 1
QUESTION_BYTES, ASKED_ARGUMENTS_AT = 80, 32
"""Size of `struct seccomp_notif`, and the offset in it of the system call's arguments.

The struct holds the kernel's question about a call and begins with the question's id.
"""
X86_64 = 0xC000003E
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16


class Instruction(ctypes.Structure):
    """`struct sock_filter`: an instruction of classic BPF."""

    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class Program(ctypes.Structure):
    """`struct sock_fprog`: a program of classic BPF."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction))]


Step = tuple[int, int, int, int]
"""One instruction: operation, steps to skip if its test is true, steps to skip if it is false, operand."""


def allow_if(test: int, value: int) -> list[Step]:
    """Return steps that allow the call if the loaded value passes a test, and otherwise continue with the next step.

    test, value: operation and operand of the test's instruction.
    """
    return [(test, 0, 1, value), (RETURN, 0, 0, ALLOW)]


def refuse(error: int) -> list[Step]:
    return [(RETURN, 0, 0, FAIL | error)]


def argument(index: int, *, high: bool = False) -> list[Step]:
    """Return the step that loads the low half, or if `high` the high half, of a system call's argument.

    Flags, commands and process ids fit into the low half.
    """
    return [(LOAD, 0, 0, ARGUMENTS_AT + 8 * index + 4 * high)]


def asking_steps() -> list[Step]:
    """Return the filter that asks a listener about each new thread and allows all other system calls."""
    # `filter_steps` is installed too. The stricter verdict wins, so calls that it refuses are never asked about.
    steps: list[Step] = [(LOAD, 0, 0, NUMBER_AT), (EQUAL, 0, 3, CLONE), *argument(0)]
    return [*steps, (ANY_BIT, 0, 1, IS_THREAD), (RETURN, 0, 0, ASK), (RETURN, 0, 0, ALLOW)]


def filter_steps(pid: int, *, has_threads: bool) -> list[Step]:
    """Return the filter of all system calls for the process `pid`, which may only send signals to itself.

    has_threads: True if the filter allows new threads, because `asking_steps` is installed, too.
    """
    of_thread = [(RETURN, 0, 0, ALLOW)] if has_threads else refuse(errno.EAGAIN)
    only_reading = [(ANY_BIT, 0, 1, FOR_WRITING), *refuse(errno.EPERM), (RETURN, 0, 0, ALLOW)]
    # A process may not send itself SIGKILL, so SIGKILL shows that the host killed it.
    to_itself = [*argument(0), *allow_if(EQUAL, pid), *refuse(errno.EPERM)]
    no_kill = [(EQUAL, 0, 1, signal.SIGKILL), *refuse(errno.EPERM)]
    # A filter cannot see clone3's flags. Without clone3, glibc starts threads by clone.
    # Each block ends in a verdict. Otherwise the next block would compare an argument with a system call number.
    decided: dict[int, list[Step]] = {
        OPEN: [*argument(1), *only_reading],
        OPENAT: [*argument(2), *only_reading],
        CLONE: [*argument(0), (ANY_BIT, 0, 1, IS_THREAD), *of_thread, *refuse(errno.EPERM)],
        CLONE3: refuse(errno.ENOSYS),
        KILL: [*argument(1), *no_kill, *to_itself],
        TGKILL: [*argument(2), *no_kill, *to_itself],
        FCNTL: [*argument(1), *sum((allow_if(EQUAL, it) for it in HARMLESS_FCNTL), []), *refuse(errno.EPERM)],
        IOCTL: [*argument(1), *sum((allow_if(EQUAL, it) for it in HARMLESS_IOCTL), []), *refuse(errno.ENOTTY)],
        # Limits may only be read: then the pointer to new limits is null.
        PRLIMIT: [*argument(2), (EQUAL, 0, 3, 0), *argument(2, high=True), *allow_if(EQUAL, 0), *refuse(errno.EPERM)],
    }
    # The numbers mean other calls in 32-bit programs, which the kernel runs too.
    steps: list[Step] = [(LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, X86_64), (RETURN, 0, 0, KILL_PROCESS)]
    steps += [(LOAD, 0, 0, NUMBER_AT)]
    for number in FREE:
        steps += allow_if(EQUAL, number)
    for number, block in decided.items():
        steps += [(EQUAL, 0, len(block), number), *block]
    # Refuse all other calls, including those that later kernels add.
    return [*steps, *refuse(errno.EPERM)]


class Threads:
    """Grants a locked program its threads. The kernel asks the process that holds the listener about each new thread.

    After MOST_THREADS threads the listener is closed, and the kernel refuses further threads.

        with closing(Threads()) as threads:
            process = subprocess.Popen(command, preexec_fn=lambda: lock(..., threads=threads.theirs))
            threads.take_listener()
            poll.register(threads.listener, select.POLLIN)  # threads.grant() whenever it is readable, while it is >= 0
    """

    def __init__(self) -> None:
        """Create the sockets. `lock` sends the listener's descriptor through `theirs`."""
        self._ours, self.theirs = socket.socketpair()
        self._left, self.listener = MOST_THREADS, -1
        self.is_locked = False
        """Whether the process has reported that it is locked."""

    def take_listener(self) -> None:
        """Receive the descriptor by which the locked process asks for threads.

        Call this after that process was locked or has exited. Without a descriptor, the program cannot start threads.
        """
        self.theirs.close()
        # No need to wait: the listener was sent before the process was locked, or never, if the kernel cannot ask.
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
        """Grant a thread if the kernel asks for one. Close the listener once the program has exited."""
        try:
            question = hear_question(self.listener)
            if question is None:
                return
            # No race here: the filter checked a register, which no other thread can change.
            answer_question(self.listener, question)
        except EOFError:
            self._stop_listening()
            return
        except OSError:  # it has exited, or the kernel cannot let a call continue
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
    """Return a question that the kernel sent to a filter's listener; None if there is none.

    EOFError once all processes under the filter have exited.
    """
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    events = dict(poll.poll(0)).get(listener, 0)
    # Before Linux 6.11 the ioctl blocks for ever without a question, such as after the asker was killed.
    if not events & select.POLLIN:
        if events & select.POLLHUP:
            raise EOFError
        return None
    question = bytearray(QUESTION_BYTES)
    try:
        fcntl.ioctl(listener, HEAR_QUESTION, question)
    except FileNotFoundError:  # the asker was killed meanwhile
        return None
    return question


def answer_question(listener: int, question: bytearray, error: int = 0) -> None:
    """Let the system call in question continue, or make it fail. error: the errno; 0 lets the call continue."""
    answer = struct.pack("<QqiI", *struct.unpack_from("<Q", question), 0, -error, 0 if error else GO_ON)
    with contextlib.suppress(FileNotFoundError):  # the asker was killed meanwhile
        fcntl.ioctl(listener, ANSWER_QUESTION, answer)


def ask_for_threads(libc: ctypes.CDLL, asked: socket.socket) -> bool:
    """Install the seccomp filter that asks the supervisor about each new thread. Return False if the kernel cannot.

    The file descriptor of the filter's listener is sent to the supervisor through `asked`.
    """
    steps = asking_steps()
    program = Program(len(steps), (Instruction * len(steps))(*steps))
    listener = libc.syscall(ctypes.c_long(SECCOMP), SET_FILTER, NEW_LISTENER, ctypes.byref(program))
    if listener < 0:
        return False
    socket.send_fds(asked, [READY], [listener])
    os.close(listener)
    return True


def lock(*, parent: int, time_s: float, memory_bytes: int, threads: socket.socket | None = None) -> None:
    """Irrevocably remove from this process all rights that model-written code must not have.

    The process is also killed when its parent dies. time_s: limit of CPU time, extended by `cpu_limit_s`.
    memory_bytes: limit of the address space. threads: the socket `Threads.theirs`; None allows no threads.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_ulong(0)
    header, no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), nothing, nothing, nothing)
    # The parent may have died before prctl took effect.
    if os.getppid() != parent:
        os._exit(1)
    # Root's capabilities would open files regardless of their modes.
    libc.capset(header, no_capabilities)
    # Without capabilities, Landlock and filters require no_new_privs, since they could trick a setuid program.
    libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), nothing, nothing, nothing)
    if hides_files():
        hide_files()
    # Set all limits first, because the filter refuses to change them.
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NOFILE, MOST_OPEN_FILES)
    # The parent's deadline is what counts. This limit acts if the parent is too busy to enforce it.
    limit(resource.RLIMIT_CPU, cpu_limit_s(time_s))
    limit(resource.RLIMIT_AS, memory_bytes)
    # Ask for threads first: the full filter allows neither installing another filter nor sending a descriptor.
    steps = filter_steps(os.getpid(), has_threads=threads is not None and ask_for_threads(libc, threads))
    program = Program(len(steps), (Instruction * len(steps))(*steps))
    if libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(program), nothing, nothing):
        os._exit(1)  # never run model-written code unlocked
    if threads is not None:
        os.write(threads.fileno(), LOCKED)  # the filter allows nothing but write on a socket


def cpu_limit_s(time_s: float) -> int:
    """Return the CPU time in seconds after which a locked process is killed."""
    return math.ceil(time_s) + 1


def landlock(call: int, *arguments: Any) -> int:
    """Make one of Landlock's system calls and return its result; -1 if the call fails or the kernel has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    # An int would be passed as 32 bits, but the call reads 64.
    as_given = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(libc.syscall(ctypes.c_long(call), *as_given))


def hides_files() -> bool:
    return landlock(CREATE_RULESET, 0, 0, ASK_VERSION) >= 1


def readable() -> list[str]:
    """Return the paths that sandboxed code may open: the interpreter, installed packages and the system's libraries."""
    programs = os.path.dirname(sys.executable)
    python = [sys.base_prefix, sys.base_exec_prefix, programs, os.path.join(os.path.dirname(programs), "pyvenv.cfg")]
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
    # A Python installed under / would make every file readable.
    return [path for path in (*python, *packages, *system) if os.path.realpath(path) != "/"]


def hide_files() -> None:
    """Irrevocably restrict this process to opening the paths of `readable`. The process must have set no_new_privs."""
    rules = landlock(CREATE_RULESET, ctypes.byref(ctypes.c_uint64(ALL_RIGHTS)), 8, 0)
    for path in readable():
        try:
            place = os.open(path, os.O_PATH)
        except OSError:
            continue  # not every system has all of these paths
        rights = READ_FILE | EXECUTE_FILE | (READ_FOLDER if stat.S_ISDIR(os.fstat(place).st_mode) else 0)
        landlock(ADD_RULE, rules, BENEATH, struct.pack("<Qi", rights, place), 0)
        os.close(place)
    if landlock(RESTRICT_SELF, rules, 0):
        os._exit(1)  # never run model-written code unlocked
    os.close(rules)


def limit(what: int, value: int) -> None:
    """Lower a resource limit. A limit that is already lower stays."""
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def address_space() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@functools.cache
def check_lockable() -> None:
    """Raise RuntimeError if this host cannot lock a process. Warn if the host's kernel has no Landlock."""
    host = f"{sys.platform} on {platform.machine()}"
    if host != "linux on x86_64":
        raise RuntimeError(
            f"this reward runs what the model writes, which can be locked in on Linux on x86_64 alone, and this is "
            f"{host}; take a reward that compares text."
        )
    parent, pid = os.getpid(), os.fork()  # only a trial shows whether it works
    if pid == 0:
        try:
            lock(parent=parent, time_s=10, memory_bytes=1 << 46)
            os.kill(parent, 0)  # harmless but forbidden: a kernel may accept a filter and not enforce it
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
    """Lock this process, report READY, and become the Python program on stdin. A tool's launcher uses this.

    Arguments: the parent's process id, CPU time in seconds, address space in bytes, and the file descriptor of the
    socket `Threads.theirs`.
    """
    parent, time_s, memory_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    with socket.socket(fileno=int(sys.argv[4])) as threads:
        lock(parent=parent, time_s=time_s, memory_bytes=memory_bytes, threads=threads)
    os.write(1, READY)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-"])


if __name__ == "__main__":
    become_program()
