"""The processes that compute rewards: python -m megatron_rl.rewards --control FD [--stacks FD]

One process imports the rewards' modules and forks a worker whenever the service asks for one, so that a killed worker
is replaced within milliseconds. It ends, with all its workers, as soon as the other end of its control socket is gone.

A frame is its length in 4 bytes and its content. Requests are pickled, as they come from the run itself. Answers are
JSON, as what a worker says may be what a model wrote: `{"values": [[value, seconds], ..]}`, one for each reward, a
value being a number or an object of those of its parts, or `{"error": [reward, words, traceback, file:line]}`.
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
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_rl.config.import_path import resolve
from megatron_rl.rewards.faults import as_score, place_of, words_of
from megatron_rl.rewards.sandbox import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, address_space, limit

LENGTH = struct.Struct("<I")
THE_TRAINERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that the service gives its processes at their start."""

    rewards: list[tuple[str, str, dict[str, Any]]]
    """Each reward's name, import path and further arguments."""
    import_from: list[str] | None
    sys_path: list[str]
    folder: str
    """The folder in which each worker has one of its own."""
    memory_bytes: int
    """Most memory that a worker may take beside what its imports have taken."""


def main() -> None:
    parser = argparse.ArgumentParser("megatron_rl.rewards", description="Workers of a reward service.")
    parser.add_argument("--control", type=int, required=True, help="open end of a socket pair")
    parser.add_argument("--stacks", type=int, help="open file for the stacks of workers")
    args = parser.parse_args()
    for number in THE_TRAINERS:  # not SIG_IGN, which programs that a reward starts would inherit
        signal.signal(number, lambda *_: None)
    for descriptor in filter(None, (args.control, args.stacks)):
        os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=args.control)
    setup: Setup = pickle.load(sys.stdin.buffer)
    sys.path[:] = setup.sys_path
    rewards = {
        name: with_args(resolve(path, key="reward", kind="reward", import_from=setup.import_from), arguments)
        for name, path, arguments in setup.rewards
    }
    # What a model wrote may run in a child of a worker; it cannot read a worker's memory then, where the answers are.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    if args.stacks is not None:  # here, so that no worker is without it when the signal comes
        faulthandler.register(signal.SIGUSR2, file=args.stacks, all_threads=True)
    Parent(control, rewards, setup).run()


def with_args(reward: Callable[..., Any], args: dict[str, Any]) -> Callable[..., Any]:
    """Give a reward its further arguments; a class, whose objects are the rewards, takes them itself."""
    return reward(**args) if inspect.isclass(reward) else functools.partial(reward, **args)


class Parent:
    """Forks workers, kills them and removes their folders, as the service says."""

    def __init__(self, control: socket.socket, rewards: dict[str, Callable[..., Any]], setup: Setup) -> None:
        self._control, self._rewards, self._setup = control, rewards, setup
        self._workers: dict[str, tuple[int, str]] = {}

    def run(self) -> NoReturn:
        # Without threads of our own: a fork would take along whatever lock another one holds.
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
            if not message:
                break
            verb, _, number = message.decode().partition(" ")
            if verb == "start":
                self._start(number, descriptors[0])
            elif verb == "end":
                self._end(number)
            else:
                for pid, _ in self._workers.values():
                    os.kill(pid, signal.SIGUSR2)
        for number in list(self._workers):
            self._end(number)
        shutil.rmtree(self._setup.folder, ignore_errors=True)
        os._exit(0)

    def _start(self, number: str, end: int) -> None:
        folder, parent = tempfile.mkdtemp(dir=self._setup.folder), os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                os.set_inheritable(end, False)
                work(socket.socket(fileno=end), folder, self._rewards, self._setup.memory_bytes, parent)
            finally:
                os._exit(1)
        os.close(end)
        try:
            # Here and in the worker, whoever is first: it may be killed, with its group, before it has run at all.
            os.setpgid(pid, pid)
        except (PermissionError, ProcessLookupError):
            pass  # it has done so itself
        self._workers[number] = (pid, folder)

    def _end(self, number: str) -> None:
        pid, folder = self._workers.pop(number)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def work(
    end: socket.socket, folder: str, rewards: dict[str, Callable[..., Any]], memory_bytes: int, parent: int
) -> None:
    """Answer requests until the service hangs up. The first frame says that this worker is ready."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the kernel was told to watch it.
    if os.getppid() != parent:
        return
    os.chdir(folder)
    limit(resource.RLIMIT_CORE, 0)
    # Beside what it has: a module such as torch maps gigabytes that it never touches.
    limit(resource.RLIMIT_AS, address_space() + memory_bytes)
    send(end, {"ready": os.getpid()})
    while (request := receive(end)) is not None:
        send(end, answer(rewards, pickle.loads(request)))
        del request  # which may be large


def answer(rewards: dict[str, Callable[..., Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    values = []
    for name, reward in rewards.items():
        begin = time.monotonic()
        try:
            value = as_score(reward(**arguments))
        except (Exception, SystemExit) as error:  # users' code may raise anything
            words = [name, words_of(error)[:2000], traceback.format_exc()[-8000:], place_of(error, reward)]
            return {"error": [word.encode("utf-8", "replace").decode() for word in words]}
        values.append([value, time.monotonic() - begin])
    return {"values": values}


def send(end: socket.socket, message: dict[str, Any]) -> None:
    content = json.dumps(message).encode()
    end.sendall(LENGTH.pack(len(content)) + content)


def receive(end: socket.socket) -> bytearray | None:
    """Return the next frame's content; None where the service is gone."""
    length = read(end, LENGTH.size)
    return None if length is None else read(end, LENGTH.unpack(length)[0])


def read(end: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        received = end.recv_into(view)
        if received == 0:
            return None
        view = view[received:]
    return content
