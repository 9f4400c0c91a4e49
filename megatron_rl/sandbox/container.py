"""A container without Docker for commands that a model runs.

It shows the host's programs, read-only, and has a disk in memory. A keeper process creates the container and stays
outside. The keeper takes requests on stdin and answers on stdout, each a line of JSON. Processes inside have no
capabilities and have their own namespaces: users, processes, files, and a network without a way out. A seccomp filter
refuses system calls that would regain rights. The user that runs these processes owns nothing outside.

The container's processes run in phases, one phase after another. Processes of one phase see each other, and the kernel
kills them all at the phase's end, however they were started. Only their files remain for later phases.

This works on Linux on x86_64, as root or if users may create namespaces. Memory is limited per process, not in total.
System calls for memory that no process limit counts are refused. This file only imports the standard library, because
the keeper is started without packages.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import functools
import io
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from megatron_rl.sandbox.lock import (
    ALLOW,
    ANY_BIT,
    ARCHITECTURE_AT,
    ASK,
    ASKED_ARGUMENTS_AT,
    CLONE,
    CLONE3,
    EQUAL,
    FAIL,
    KILL_PROCESS,
    LOAD,
    NEW_LISTENER,
    NUMBER_AT,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PR_SET_SECCOMP,
    RETURN,
    SECCOMP,
    SET_FILTER,
    X86_64,
    Instruction,
    Program,
    Step,
    answer_question,
    argument,
    hear_question,
    limit,
    refuse,
)

NOBODY = 65534
MOST_PROCESSES, MOST_OPEN_FILES = 256, 1024
MOST_FILE_BYTES = 1 << 16
"""Maximum number of bytes of a file that the keeper returns."""
DRAIN_S, LATE_S = 0.2, 10.0
"""DRAIN_S: time for which output is still read after a command ends, since its children may hold the pipe open.

LATE_S: time that the keeper waits for the phase's answer in addition to a command's longest time.
"""
SLOWEST, LOOK_S = 10, 0.05
"""SLOWEST: a command that has to wait for a CPU may take this many times its time limit.

LOOK_S: seconds between checks whether it is waiting.
"""

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl")
DEVICES = {name: name for name in ("null", "full", "random", "urandom")} | {"zero": "full"}
"""Name of a device in the container -> name of the host's device that it shows.

The container's /dev/zero is the host's /dev/full, which also reads as zeros. Unlike /dev/zero, /dev/full cannot be
mapped, and such a mapping would bypass the memory limit.
"""
RESERVED = ("tests", "logs", "solution")
"""Folders that are empty and read-only until a phase mounts a fresh disk on them."""
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NEWCGROUP = 0x2000000
ANY_NAMESPACE = 0x7E020000 | 0x80  # CLONE_NEWTIME is 0x80
RDONLY, NOSUID, NODEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH, PIVOT_ROOT, SUBREAPER, DROP_BOUND = 2, 155, 36, 24
AT_LEAST, SOCKET, X32 = 0x35, 41, 0x40000000
FAMILIES = (1, 2, 10, 16)
"""Allowed socket families: UNIX, IPv4, IPv6, netlink. Others, such as vsock, ignore network namespaces."""
REFUSED = (
    *(103, 135, 153, 155, 159, 161, 163, 164, 165, 166, 167, 168, 169, 172, 173, 175, 176, 179, 180, 212, 227, 246),
    *(248, 249, 250, 272, 298, 303, 304, 305, 308, 313, 320, 321, 323, 425, 426, 427, 428, 429, 430, 431, 432, 433),
    *(442, 443, 467),
)
"""Refused system calls of x86_64: mounts, namespaces, keys, modules, clocks, kernel tracing, io_uring."""
UNLIMITED = (29, 64, 68, 240, 278, 319, 444, 447)
"""System calls for memory that no process limit counts. They fail with ENOSYS, as on a kernel that lacks them.

These calls create System V shared memory, semaphores and queues, POSIX queues, memory files and Landlock rules, and
give pages to pipes.
"""
MMAP, IS_SHARED, IS_ANONYMOUS, IS_HUGE = 9, 0x1, 0x20, 0x40000
PR_SET_THP_DISABLE = 41
SETSOCKOPT, SOL_SOCKET, BUFFER_SIZES = 54, 1, (7, 8, 32, 33)
NET_LIMITS = {
    "core/somaxconn": "16",  # every connection not yet accepted holds the data sent to it
    "ipv4/tcp_rmem": "4096 65536 212992",
    "ipv4/tcp_wmem": "4096 65536 212992",
}
"""Settings under /proc/sys/net for the container's network namespace."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    done = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(done, f"mount {source} on {target}")


def bind(source: str, target: str, *, read_only: bool) -> None:
    mount(source, target, flags=BIND | RECURSIVE)
    if read_only:
        # Keep the source's mount flags: the kernel forbids dropping them if another user namespace owns the mount.
        kept = os.statvfs(target).f_flag & 0xF
        mount("none", target, flags=REMOUNT | BIND | RDONLY | NOSUID | kept)


class Keeper:
    """The process outside the container that creates and controls it.

    `place` is an empty folder, on which the keeper mounts the container's files in its own mount namespace.
    """

    def __init__(
        self, place: str, *, writable: list[str], visible: list[str], disk_bytes: int, memory_bytes: int
    ) -> None:
        """Create the container's file system.

        writable: names of folders under / that are on the disk. visible: further host paths shown read-only.
        """
        self.memory_bytes, self.root, disk = memory_bytes, f"{place}/root", f"{place}/disk"
        self.pid, self.phase = 0, socket.socket()
        self.fresh: list[str] = []
        check(libc.prctl(SUBREAPER, 1, 0, 0, 0), "prctl")
        self.user = enter_namespaces()
        mount("none", "/", flags=RECURSIVE | PRIVATE)
        mount("tmpfs", place, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
        os.mkdir(disk)
        os.mkdir(self.root)
        self.disk_bytes = disk_bytes
        self.new_disk(disk)
        mount("tmpfs", self.root, "tmpfs", NOSUID, "size=1m,mode=755")
        for path in (*SYSTEM, *visible):
            self.show(path)
        for name in ("proc", "dev", *RESERVED):
            os.mkdir(f"{self.root}/{name}")
        for name, device in DEVICES.items():
            self.show(f"/dev/{device}", f"/dev/{name}", read_only=False)
        for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
            os.symlink(f"/proc/self/fd{target}", f"{self.root}/dev/{name}")
        for name, text in FILES.items():
            with open(f"{self.root}/{name}", "w") as file:
                file.write(text)
        for name in ("dev/shm", *writable):
            os.makedirs(f"{disk}/{name}", mode=0o755)
            os.makedirs(f"{self.root}/{name}", exist_ok=True)
            os.chown(f"{disk}/{name}", self.user, self.user)
            bind(f"{disk}/{name}", f"{self.root}/{name}", read_only=False)
        mount("none", self.root, flags=REMOUNT | BIND | RDONLY | NOSUID)

    def new_disk(self, target: str) -> None:
        # Limit the number of files: even an empty one takes a kilobyte of kernel memory.
        files = min(100_000, self.disk_bytes >> 11)
        options = f"size={self.disk_bytes},mode=755,nr_inodes={files},uid={self.user},gid={self.user}"
        mount("tmpfs", target, "tmpfs", NOSUID | NODEV, options)

    def show(self, path: str, shown_as: str | None = None, *, read_only: bool = True) -> None:
        target = self.root + (shown_as or path)
        # On many systems, /bin is a link into /usr.
        if os.path.islink(path) and os.path.dirname(path) == "/":
            os.symlink(os.readlink(path), target)
        elif os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
            bind(path, target, read_only=read_only)
        elif os.path.exists(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
            bind(path, target, read_only=read_only)

    def begin(self, fresh: list[str]) -> None:
        """End the previous phase and begin a new one. Raises RuntimeError if the new one does not start.

        fresh: reserved folders on each of which an empty disk is mounted.
        """
        self.end()
        for name in fresh:
            self.new_disk(f"{self.root}/{name}")
        self.fresh = fresh
        self.phase, theirs = socket.socketpair()
        between = os.fork()
        if between == 0:
            self.phase.close()  # an inherited copy would keep the channel open after this process is killed
            leave_with(lambda: start_phase(theirs, self.root, self.user, self.memory_bytes))
        theirs.close()
        os.waitpid(between, 0)
        said = receive(self.phase, LATE_S)
        if "pid" not in said:
            raise RuntimeError(f"the container's phase did not begin: {said.get('error', said)}")
        self.pid = said["pid"]
        send(self.phase, {})
        receive(self.phase, LATE_S)  # now the phase is locked, and dies with this process

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Send the phase a request and return its answer. A phase that does not answer is ended."""
        try:
            send(self.phase, asked)
            return receive(self.phase, SLOWEST * asked["time_s"] + LATE_S)
        except OSError as error:
            self.end()
            return {"code": None, "output": "", "error": f"the container's first process is gone: {error}"}

    def end(self) -> None:
        """Kill all processes of the phase and wait until they are gone. The fresh disks stay until the next phase."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)  # the kernel reports the first process only once all others are gone
            self.phase.close()
            self.pid = 0

    def read(self, path: list[str]) -> str | None:
        """Return a regular file's text, up to MOST_FILE_BYTES; None if there is no such file.

        path: the parts of the file's path. Links are not followed.
        """
        place = os.open(self.root, os.O_PATH | os.O_DIRECTORY)
        try:
            for name in path[:-1]:
                inner = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
                os.close(place)
                place = inner
            file = os.open(path[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
        except OSError:
            return None
        finally:
            os.close(place)
        try:
            is_file = stat.S_ISREG(os.fstat(file).st_mode)
            return os.read(file, MOST_FILE_BYTES).decode("utf-8", "replace") if is_file else None
        finally:
            os.close(file)


def enter_namespaces() -> int:
    """Give this process its own mount namespace.

    Return the uid that the container's processes have in this process's user namespace.
    """
    if libc.unshare(NEWNS) == 0:
        return NOBODY if os.getuid() == 0 else os.getuid()
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(NEWUSER | NEWNS), "unshare: this host lets its users make no namespaces")
    map_to_root(uid, gid)
    return 0


def map_to_root(uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def start_phase(channel: socket.socket, root: str, user: int, memory_bytes: int) -> NoReturn:
    """Switch to the container's user and fork the phase's first process. This runs in a child of the keeper.

    The keeper adopts the first process when this child exits.
    """
    try:
        if os.getuid() != user:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # otherwise root would own its uid_map
        check(libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP), "unshare")
        map_to_root(user, user)
        pid = os.fork()
    except OSError as error:
        send(channel, {"error": str(error)})
        os._exit(1)
    if pid == 0:
        leave_with(lambda: be_first_process(channel, root, memory_bytes))
    send(channel, {"pid": pid})
    os._exit(0)


def be_first_process(channel: socket.socket, root: str, memory_bytes: int) -> None:
    """Lock this process, and serve the keeper's requests until it is killed."""
    receive(channel, LATE_S)  # from now on the keeper is the parent
    # If the keeper was killed before this line, no signal comes, but reading the channel below ends.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    rename_process("container")
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):  # the keeper's pipes, whose readers would otherwise wait for this process
        os.dup2(nothing, number)
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV)
    for name, value in NET_LIMITS.items():
        with suppress(OSError), open(f"{root}/proc/sys/net/{name}", "w") as file:
            file.write(value)
    for name in ("sys", "sysrq-trigger", "irq", "bus"):  # root may write these, and the container's user may be root
        if os.path.exists(f"{root}/proc/{name}"):
            bind(f"{root}/proc/{name}", f"{root}/proc/{name}", read_only=True)
    # Mount the root onto itself, because a mount inherited from outside cannot become the root.
    mount(root, root, flags=BIND | RECURSIVE)
    os.chdir(root)
    check(libc.syscall(PIVOT_ROOT, b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount2")
    os.chdir("/")
    with socket.socket() as any_socket:  # bring loopback up: its flags become UP and RUNNING
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x41))
    shared = SharedMemory(give_up_rights(memory_bytes), memory_bytes)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process inside may trace this one
    tasks: dict[str, Callable[..., dict[str, Any]]] = {"run": functools.partial(run, shared=shared), "put": put}
    send(channel, {})
    while True:
        shared.grant_until(channel)
        asked = receive(channel, None)
        send(channel, tasks[asked.pop("do")](**asked))


def rename_process(name: str) -> None:
    """Overwrite this process's command line, which names paths of the host and can be read in /proc."""
    with open("/proc/self/stat", "rb") as file:
        begin, end = (int(field) for field in file.read().rpartition(b")")[2].split()[45:47])
    text = name.encode()[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


class SharedMemory:
    """Grants a phase's shared memory mappings up to a total number of bytes.

    Process limits would not suffice. A process that has unmapped nearly all of a shared mapping still holds all of the
    mapping's memory, which no process limit counts.
    """

    def __init__(self, listener: int, left_bytes: int) -> None:
        """Prepare to grant mappings.

        listener: file descriptor on which the filter asks about each shared mapping; -1 if the filter refuses them all.
        left_bytes: total number of bytes that may be granted.
        """
        self.listener, self.left_bytes = listener, left_bytes

    def register(self, poll: select.poll) -> None:
        if self.listener >= 0:
            poll.register(self.listener, select.POLLIN)

    def grant(self) -> None:
        """Answer one process that waits for a mapping, if there is one."""
        with suppress(OSError, EOFError):
            question = hear_question(self.listener)
            if question is None:
                return
            (size,) = struct.unpack_from("<Q", question, ASKED_ARGUMENTS_AT + 8)
            size = -(-size // resource.getpagesize()) * resource.getpagesize()
            has_room = size <= self.left_bytes
            self.left_bytes -= size * has_room
            answer_question(self.listener, question, 0 if has_room else errno.ENOMEM)

    def grant_until(self, channel: socket.socket) -> None:
        """Grant mappings until the keeper sends something."""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        self.register(poll)
        while channel.fileno() not in (ready := dict(poll.poll())):
            if self.listener in ready:
                self.grant()


def give_up_rights(memory_bytes: int) -> int:
    """Drop all capabilities, set limits and install the seccomp filter, for this process and its children.

    Return the filter's listener, or -1 if the filter refuses shared mappings without asking.
    """
    for number in range(64):
        libc.prctl(DROP_BOUND, number, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, none), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    limit(resource.RLIMIT_CORE, 0)
    # Even if all open files are sockets, they hold no more memory than a process may take.
    limit(resource.RLIMIT_NOFILE, max(64, min(MOST_OPEN_FILES, memory_bytes // socket_bytes())))
    limit(resource.RLIMIT_NPROC, MOST_PROCESSES)
    limit(resource.RLIMIT_AS, memory_bytes)
    limit(resource.RLIMIT_MEMLOCK, 1 << 16)
    limit(resource.RLIMIT_SIGPENDING, MOST_OPEN_FILES)
    # A huge page occupies all of its memory even if only one small page is in use.
    libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    program = as_program(filter_steps(ASK))
    listener = libc.syscall(SECCOMP, SET_FILTER, NEW_LISTENER, ctypes.byref(program))
    if listener < 0:  # before Linux 5.5, or inside a container that already has a listener
        program = as_program(filter_steps(FAIL | errno.ENOMEM))
        check(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(program), 0, 0), "seccomp")
    return int(listener)


def socket_bytes() -> int:
    """Return the maximum number of bytes that the buffers of a socket hold if they have their default sizes."""
    sizes = []
    for name in ("rmem_default", "wmem_default"):
        with open(f"/proc/sys/net/core/{name}") as file:
            sizes.append(int(file.read()))
    return sum(sizes)


def as_program(steps: list[Step]) -> Program:
    return Program(len(steps), (Instruction * len(steps))(*steps))


def filter_steps(of_shared: int) -> list[Step]:
    """Return the filter that keeps processes inside the container.

    The filter refuses system calls that create namespaces or mounts, regain rights, or take memory past all limits. All
    other calls are allowed. of_shared: the filter's verdict on anonymous shared mappings.
    """
    steps: list[Step] = [(LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, X86_64), (RETURN, 0, 0, KILL_PROCESS)]
    steps += [(LOAD, 0, 0, NUMBER_AT), (AT_LEAST, 0, 1, X32), *refuse(errno.EPERM)]
    for number in REFUSED:
        steps += [(EQUAL, 0, 1, number), *refuse(errno.EPERM)]
    for number in UNLIMITED:
        steps += [(EQUAL, 0, 1, number), *refuse(errno.ENOSYS)]
    mapping = [*argument(3), (ANY_BIT, 0, 1, IS_HUGE), *refuse(errno.ENOMEM)]
    mapping += [(ANY_BIT, 0, 2, IS_SHARED), (ANY_BIT, 0, 1, IS_ANONYMOUS), (RETURN, 0, 0, of_shared)]
    mapping += [(RETURN, 0, 0, ALLOW)]
    steps += [(EQUAL, 0, len(mapping), MMAP), *mapping]
    # Setting a buffer size succeeds without an effect, because programs ask for larger buffers than they need.
    size = [*argument(1), (EQUAL, 0, 2 + 2 * len(BUFFER_SIZES), SOL_SOCKET), *argument(2)]
    for name in BUFFER_SIZES:
        size += [(EQUAL, 0, 1, name), *refuse(0)]
    size += [(RETURN, 0, 0, ALLOW)]
    steps += [(EQUAL, 0, len(size), SETSOCKOPT), *size]
    # A filter cannot see clone3's flags. Without clone3, glibc starts processes by clone.
    steps += [(EQUAL, 0, 1, CLONE3), *refuse(errno.ENOSYS)]
    steps += [(EQUAL, 0, 4, CLONE), *argument(0), (ANY_BIT, 0, 1, ANY_NAMESPACE & ~0x80), *refuse(errno.EPERM)]
    steps += [(RETURN, 0, 0, ALLOW), (EQUAL, 0, 2 + 2 * len(FAMILIES), SOCKET), *argument(0)]
    for family in FAMILIES:
        steps += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    return [*steps, *refuse(errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]


def run(
    *, command: str, cwd: str, env: dict[str, str], time_s: float, most_bytes: int, shared: SharedMemory
) -> dict[str, Any]:
    """Run a bash command and return its `output` and `code`: the exit status, or minus the number of a signal.

    `code` is None if the time limit was exceeded. A command that waits for a CPU may run for up to
    SLOWEST * time_s, until it has used `time_s` of CPU time. So a busy host does not cut off a command that would end
    in time on an idle host. If the result has `is_full`, the command was not run: no further process can start.

    most_bytes: maximum bytes of output to return; the middle of a longer output is left out. shared: object that grants
    the command's shared memory mappings.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        pid = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return {"code": None, "output": f"no process can be started: {error.strerror}", "is_full": True}
    if pid == 0:
        leave_with(lambda: become_bash(command, cwd, env, writer))
    os.close(writer)
    ended, begin, end = os.pidfd_open(pid), bytearray(), bytearray()
    half, is_cut = most_bytes // 2, False
    until, code, poll = time.monotonic() + time_s, None, select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(ended, select.POLLIN)
    shared.register(poll)
    latest = until + (SLOWEST - 1) * time_s
    while (left_s := until - time.monotonic()) > 0 or (
        code is None and time.monotonic() < latest and is_starved(pid, time_s)
    ):
        ready = dict(poll.poll(max(left_s, LOOK_S) * 1000))
        if shared.listener in ready:
            shared.grant()
        if reader in ready:
            try:
                part = os.read(reader, 1 << 16)
            except BlockingIOError:
                part = b""
            if not part and not ready[reader] & select.POLLIN:
                poll.unregister(reader)
            room = half - len(begin)
            begin += part[:room]
            end += part[room:]
            is_cut |= len(end) > half
            del end[:-half]
        elif ended in ready and code is None:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            poll.unregister(ended)
            until = time.monotonic() + DRAIN_S
        elif code is not None and not ready:
            break
    if code is None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(ended)
    os.close(reader)
    reap()
    output = begin + (b"\n...\n" if is_cut else b"") + end
    return {"code": code, "output": output.decode("utf-8", "replace")}


def is_starved(session: int, time_s: float) -> bool:
    """Return True if a process of a session is running or waits for a CPU or a disk, and its CPU time is not used up.

    The CPU time is used up when the session's processes together have used `time_s` seconds. A first process that has
    exited but has not been waited for counts as running.
    """
    ticks, could_run = 0, False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # the process may end meanwhile
            fields = stat_fields(f"/proc/{pid}/stat")
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))  # of the process and its children that have ended
                threads = (stat_fields(f"/proc/{pid}/task/{thread}/stat") for thread in os.listdir(f"/proc/{pid}/task"))
                could_run |= any(of_thread[0] in (b"R", b"D") for of_thread in threads)
                could_run |= int(pid) == session and fields[0] == b"Z"
    return could_run and ticks / os.sysconf("SC_CLK_TCK") < time_s


def stat_fields(path: str) -> list[bytes]:
    """Return the fields of a `stat` file in /proc, beginning with the process's state."""
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()


def become_bash(command: str, cwd: str, env: dict[str, str], writer: int) -> None:
    os.setsid()
    nothing = os.open("/dev/null", os.O_RDONLY)
    for number, target in enumerate((nothing, writer, writer)):
        os.dup2(target, number)
    os.closerange(3, MOST_OPEN_FILES)
    try:
        os.makedirs(cwd, exist_ok=True)
        os.chdir(cwd)
    except OSError as error:
        os.write(2, f"{cwd}: {error.strerror}\n".encode())
        return
    os.execve("/bin/bash", ["bash", "-c", command], env)


def put(*, archive: str, folder: str, time_s: float) -> dict[str, Any]:
    """Unpack a base64-encoded tar file into a folder, which is created if it is missing.

    Return `code`, which is 0 on success, and `output`, which says what failed.
    """
    pid = os.fork()
    if pid == 0:
        os.makedirs(folder, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
            for member in tar:
                tar.extract(member, folder, filter="fully_trusted", numeric_owner=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"code": code, "output": "" if code == 0 else f"{folder}: the files could not be written"}


def reap() -> None:
    """Reap exited orphans, which become children of the phase's first process."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def leave_with(call: Callable[[], Any]) -> NoReturn:
    try:
        call()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    channel.settimeout(LATE_S)
    channel.sendall(struct.pack("<Q", len(text)) + text)


def receive(channel: socket.socket, timeout_s: float | None) -> dict[str, Any]:
    channel.settimeout(timeout_s)
    (size,) = struct.unpack("<Q", receive_exactly(channel, 8))
    return dict(json.loads(receive_exactly(channel, size)))


def receive_exactly(channel: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = channel.recv(min(1 << 20, size - len(content)))
        if not part:
            raise ConnectionError("the other side has ended")
        content += part
    return bytes(content)


def main() -> None:
    """Keep one container. Each line on stdin is a request; the first one, `make`, creates the container."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    keeper: Keeper | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer: Any = {}
            match asked.pop("do"):
                case "make":
                    keeper = Keeper(**asked)
                case "begin" if keeper:
                    keeper.begin(**asked)
                case "ask" if keeper:
                    answer = keeper.ask(asked["what"])
                case "end" if keeper:
                    keeper.end()
                case "read" if keeper:
                    answer = {"text": keeper.read(**asked)}
        except (OSError, RuntimeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
