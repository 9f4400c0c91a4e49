"""Starts the processes that pools of workers have, `python -m megatron_rl.rewards`, as forks of one that imported that.

Its interpreter and imports take a third of a second, and a pool has a process of its own. What is forked is this
process's child, as what a pool starts is. Tests that are about the interpreter call `own_interpreters`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.launch.start_up import python_path
from megatron_rl.rewards import worker_pool
from tests.kit.forked import Forked

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
PROGRAM = Path(__file__).with_name("worker_forks.py")


class Forking:
    """The process that forks; it starts with the first that is asked for."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = os.getpid()
        self._asked: socket.socket
        self._asking = threading.Lock()

    def popen(self, command: list[str], **options: Any) -> Forked:
        """The part of subprocess.Popen that a pool uses."""
        assert command[1:4] == ["-P", "-m", "megatron_rl.rewards"] and options["start_new_session"]
        theirs, ours = os.pipe()
        numbers = [0, 1, 2, *options["pass_fds"]]
        asked = {"argv": command[3:], "env": dict(options["env"]), "cwd": os.getcwd(), "numbers": numbers}
        try:
            pid = self._fork(json.dumps(asked).encode(), [theirs, 1, 2, *options["pass_fds"]])
        finally:
            os.close(theirs)
        forked = Forked(pid, command)
        forked.stdin = open(ours, "wb", buffering=0)
        return forked

    def _fork(self, asked: bytes, files: list[int]) -> int:
        with self._asking, inheriting_orphans():
            if self._process is None or self._parent != os.getpid():  # a fork of the tests' process has its own
                self._parent = os.getpid()
                self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", str(PROGRAM), str(theirs.fileno())],
                        env=os.environ | {"PYTHONPATH": python_path()},
                        pass_fds=[theirs.fileno()],
                    )
            socket.send_fds(self._asked, [asked], files)
            return int(self._asked.recv(32))

    def close(self) -> None:
        if self._process is not None:
            self._asked.close()
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def inheriting_orphans() -> Iterator[None]:
    """Let this process be the parent of what its children leave."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value)


@pytest.fixture(scope="session")
def forking_workers() -> Iterator[Forking]:
    forking = Forking()
    yield forking
    forking.close()


@pytest.fixture
def forked_workers(forking_workers: Forking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process's pools fork their processes."""
    forked = SimpleNamespace(**vars(subprocess) | {"Popen": forking_workers.popen})
    monkeypatch.setattr(worker_pool, "subprocess", forked)


@pytest.fixture
def own_interpreters(forked_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let them start interpreters, as they do."""
    monkeypatch.setattr(worker_pool, "subprocess", subprocess)
