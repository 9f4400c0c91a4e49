"""The processes of a worker pool: python -m megatron_rl.rewards --control FD [--stacks FD]

A parent process imports what the workers run, and forks a worker whenever the pool asks for one. So a killed worker is
replaced within milliseconds. The parent exits with all its workers as soon as the pool's end of the control socket
closes.

Requests and answers are frames as in multiprocessing.connection. Requests are pickled, since they come from the run
itself. Answers are JSON, since an answer may contain text that a model wrote.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import functools
import inspect
import json
import os
import pickle
import pkgutil
import resource
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from megatron_rl.api import infrastructure_in
from megatron_rl.config.import_path import resolve
from megatron_rl.launch.start_up import importing
from megatron_rl.rewards.faults import as_score, place_of, words_of
from megatron_rl.sandbox.lock import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, address_space, limit
from megatron_rl.telemetry import stats_tracker

LENGTH = struct.Struct("!i")
"""Format of the number in front of a frame's content: the content's length in bytes, up to 2 GiB."""
PR_SET_CHILD_SUBREAPER = 36
MOST_MESSAGE_BYTES = 8192
"""Maximum size of a control message, which may contain a file path."""
MOST_PRINTED_BYTES = 256 << 10
"""Maximum output copied to a worker's log file; later output is dropped."""
THE_TRAINERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
Answering = Callable[[Any], dict[str, Any]]
"""Function that takes a request and returns the answer."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings that a pool passes to its processes at start.

    prepare: import path of a function that is called with the arguments `given` before any fork, and returns the
    function that answers requests. folder: folder in which each worker gets a subfolder. memory_bytes: memory that a
    worker may allocate in addition to what it has at its start; 0 for no limit.
    """

    prepare: str
    given: dict[str, Any]
    sys_path: list[str]
    folder: str
    memory_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser("megatron_rl.rewards", description="Workers of a pool.")
    parser.add_argument("--control", type=int, required=True, help="open end of a socket pair")
    parser.add_argument("--stacks", type=int, help="open file for the stacks of workers")
    args = parser.parse_args()
    for number in THE_TRAINERS:  # not SIG_IGN, which the programs that a worker starts would inherit
        signal.signal(number, lambda *_: None)
    for descriptor in filter(None, (args.control, args.stacks)):
        os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=args.control)
    setup: Setup = pickle.load(sys.stdin.buffer)
    sys.path[:] = setup.sys_path
    with importing():
        answering = pkgutil.resolve_name(setup.prepare)(**setup.given)
    if args.stacks is not None:  # registered before the forks, so that every worker has it when the signal arrives
        faulthandler.register(signal.SIGUSR2, file=args.stacks, all_threads=False)  # see HangReport
    # Orphans of a worker become this process's children, which it can find and kill.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    Parent(control, answering, setup).run()


def computing(rewards: list[tuple[str, str, dict[str, Any]]], import_from: list[str] | None) -> Answering:
    """Load the rewards and return the function that answers requests.

    rewards: (name, import path, further arguments) of each reward.
    """
    functions = {
        name: with_args(resolve(path, key="reward", kind="reward", import_from=import_from), arguments)
        for name, path, arguments in rewards
    }
    # A worker's child may run model-written code. It must not read the worker's memory, which holds the answers.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    return functools.partial(answer, functions)


def with_args(reward: Callable[..., Any], args: dict[str, Any]) -> Callable[..., Any]:
    """Bind a reward to its further arguments. A class is instantiated with these arguments."""
    return reward(**args) if inspect.isclass(reward) else functools.partial(reward, **args)


class Parent:
    """Forks workers, kills them and removes their folders, on the pool's commands."""

    def __init__(self, control: socket.socket, answering: Answering, setup: Setup) -> None:
        self._control, self._answering, self._setup = control, answering, setup
        self._workers: dict[str, tuple[int, str]] = {}
        self._printed: dict[str, Printed] = {}

    def run(self) -> NoReturn:
        # No threads in this process: a fork would copy any lock that another thread holds.
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._control, selectors.EVENT_READ)
            while all(self._hear(key) for key, _ in self._selector.select()):
                pass
        for number in list(self._workers):
            self._end(number)
        self._kill_strays()
        shutil.rmtree(self._setup.folder, ignore_errors=True)
        os._exit(0)

    def _hear(self, key: selectors.SelectorKey) -> bool:
        """Handle a command from the pool, or a worker's output. Return False once the pool is gone."""
        if key.data is not None:
            if key.data in self._printed and not self._printed[key.data].read():
                self._forget_printed(key.data)
            return True
        message, descriptors, _, _ = socket.recv_fds(self._control, MOST_MESSAGE_BYTES, 1)
        verb, number, log = [*message.decode().split(" ", 2), "", ""][:3]
        if verb == "start":
            self._start(number, descriptors[0], log)
        elif verb in ("end", "sweep"):
            self._end(number)
            if verb == "sweep":
                self._kill_strays()
        elif verb:
            for pid, _ in self._workers.values():
                os.kill(pid, signal.SIGUSR2)
        return bool(message)

    def _forget_printed(self, number: str) -> None:
        if printed := self._printed.pop(number, None):
            self._selector.unregister(printed.reader)
            os.close(printed.reader)

    def _start(self, number: str, end: int, log: str) -> None:
        folder, parent = tempfile.mkdtemp(dir=self._setup.folder), os.getpid()
        reader, writer = os.pipe() if log else (-1, -1)
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                if log:
                    os.dup2(writer, 1)
                    os.dup2(writer, 2)
                    os.closerange(reader, writer + 1)
                os.set_inheritable(end, False)
                work(Connection(end), folder, self._answering, self._setup.memory_bytes, parent)
            finally:
                os._exit(1)
        os.close(end)
        if log:
            os.close(writer)
            self._printed[number] = Printed(reader, log)
            self._selector.register(reader, selectors.EVENT_READ, number)
        # Both here and in the worker, whoever is first: its group may be killed before the worker has run at all.
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        self._workers[number] = (pid, folder)

    def _end(self, number: str) -> None:
        pid, folder = self._workers.pop(number)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if number in self._printed:
            while self._printed[number].read():  # read the rest of its output
                pass
            self._forget_printed(number)
        shutil.rmtree(folder, ignore_errors=True)

    def _kill_strays(self) -> None:
        """Kill processes that dead workers started and that had left their worker's process group."""
        known = {pid for pid, _ in self._workers.values()}
        # Living workers adopt their own orphans, so any other child here stems from a dead worker. Killing it may
        # reparent more.
        while strays := children_here() - known:
            for pid in strays:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


class Printed:
    """Output of a worker and its children, copied to a log file. The file is created when the first output arrives."""

    def __init__(self, reader: int, log: str) -> None:
        self.reader, self._log, self._left = reader, log, MOST_PRINTED_BYTES
        os.set_blocking(reader, False)

    def read(self) -> bool:
        """Copy the available output to the log file. Return False if there is none, or if the output has ended."""
        try:
            part = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return False
        if part[: self._left]:
            with suppress(OSError), open(self._log, "ab") as file:  # a full disk must not end an agent
                file.write(part[: self._left])
        self._left = max(0, self._left - len(part))
        return bool(part)


def children_here() -> set[int]:
    """Return the process ids of this process's children, including zombies."""
    found, here = set(), str(os.getpid())
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            if file.read().rpartition(")")[2].split()[1] == here:  # the field after the state
                found.add(int(name))
    return found


def work(end: Connection, folder: str, answering: Answering, memory_bytes: int, parent: int) -> None:
    """Tell the pool that this worker is ready, then answer requests until EOFError: the pool has closed its end."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before prctl took effect.
    if os.getppid() != parent:
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.chdir(folder)
    limit(resource.RLIMIT_CORE, 0)
    if memory_bytes:  # on top of its present size, since a module such as torch maps gigabytes that it never touches
        limit(resource.RLIMIT_AS, address_space() + memory_bytes)
    end.send_bytes(json.dumps({"ready": os.getpid()}).encode())
    while True:
        end.send_bytes(json.dumps(answering(end.recv())).encode())


def answer(rewards: dict[str, Callable[..., Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return `{"values": [[value, seconds], ..]}` with one entry per reward. A value may be an object of parts.

    If a reward raises, return `{"error": [reward, message, traceback, file:line, kind]}`, where kind is the kind of
    infrastructure failure; it is empty for any other error.
    """
    values = []
    stats_tracker.take()  # leftovers of a failed call
    for name, reward in rewards.items():
        begin = time.monotonic()
        try:
            value = as_score(reward(**arguments))
        except (Exception, SystemExit) as error:  # users' code may raise anything
            words = [name, words_of(error)[:2000], traceback.format_exc()[-8000:], place_of(error, reward)]
            words.append(failure.kind if (failure := infrastructure_in(error)) is not None else "")
            return {"error": [word.encode("utf-8", "replace").decode() for word in words]}
        values.append([value, time.monotonic() - begin])
    return {"values": values} | logged()


def logged() -> dict[str, Any]:
    """Return the part of an answer that holds log_metric's sums and counts. They are strings: JSON has no NaN."""
    return {"logged": {name: list(map(repr, sums)) for name, sums in stats_tracker.take().items()}}
