"""A training server in processes of its own, and one that is started again whenever it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import yaml

from megatron_rl.launch.ports import free_port
from megatron_rl.life.process_exit import is_alive
from tests.kit import programs
from tests.kit.runs import ROOT, environment, family
from tests.kit.waiting import wait_until

RANK, ALPHA = 4, 8.0
"""Of the server's adapters."""
MODULE = "megatron_rl.training_server"
STARTS_S, RUNS_S = 2.0, 0.5
"""A kill is drawn from so many seconds after a start, or after a result that came after it."""


def command(folder: Path, model: Path, *arguments: str, port: int = 0) -> list[str]:
    """Write the config of a server and return its command. Its files are in `folder`, those of its run in `run`."""
    config = folder / "config.yaml"
    sections = {
        "model": {"path": str(model)},
        "lora": {"rank": RANK, "alpha": ALPHA},
        "rollout": {"backend": "embedded", "server_restarts": 100},
        "batch": {"tokens_per_microbatch": 64},
        "run": {"folder": str(folder / "run"), "threads_per_rank": 1},
    }
    config.write_text(yaml.safe_dump(sections))
    (folder / "url").unlink(missing_ok=True)
    ready = ["--model-name", "tiny", "--ready-file", str(folder / "url")]
    return ["-m", MODULE, str(config), "--port", str(port), *ready, *arguments]


@contextlib.contextmanager
def serving(
    folder: Path, model: Path, *arguments: str, port: int = 0, ranks: int = 1
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the URL of a server that a command line starts, and the process that started it."""
    ready, log = folder / "url", folder / "log"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = [sys.executable, *launcher, *command(folder, model, *arguments, port=port)]
    with log.open("ab") as output:
        started = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=output, stderr=output)
    try:
        wait_until(lambda: ready.exists() or started.poll() is not None, log.read_text)
        assert ready.exists(), log.read_text()
        yield ready.read_text(), started
    finally:
        end(started.pid)
        started.wait()


def end(pid: int) -> None:
    """Kill a process and all that descend from it."""
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


Start = Callable[[list[str], dict[str, str], Path], int]
"""(a server's command, what its environment has besides, its log) -> process id"""


@contextlib.contextmanager
def forking_server() -> Iterator[Start]:
    """Yield a function that starts ranks of training servers in a second each, by forks of one process.

    That process has imported everything, and is forked itself before the test has any thread.
    """
    import megatron_rl.training_server.http_api
    import megatron_rl.training_server.slot_memory  # noqa: F401

    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _fork_on_demand(theirs)
    theirs.close()
    answers = ours.makefile("r")

    def start(words: list[str], surroundings: dict[str, str], log: Path) -> int:
        ours.sendall(json.dumps([words, surroundings, str(log)]).encode() + b"\n")
        return int(answers.readline())

    try:
        yield start
    finally:
        end(pid)
        os.waitpid(pid, 0)
        answers.close()
        ours.close()


def _fork_on_demand(asked: socket.socket) -> None:
    """Start what the other end of the socket asks for, until it is closed. Ends the process."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers that end are gone at once
        for line in asked.makefile("r"):
            words, surroundings, log = json.loads(line)
            with open(log, "ab") as output:
                streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
                options = {"cwd": ROOT, "env": environment() | surroundings, "start_new_session": True}
                server = programs.start([sys.executable, *words], **options, **streams)
            asked.sendall(f"{server.pid}\n".encode())
    finally:
        os._exit(0)


class MortalServer:
    """A server on some ranks, which is killed at random moments and started again with the same folder and port.

    For example:

        with MortalServer(start, folder, model, "--checkpoint-every", "3", ranks=2) as server:
            server.up()
            while server.kills < 10:
                server.kill_something(lambda: len(results))
    """

    def __init__(self, start: Start, folder: Path, model: Path, *arguments: str, ranks: int = 1, seed: int = 0) -> None:
        self.folder, self.ranks, self.kills = folder, ranks, 0
        self._start, self._model, self._arguments = start, model, arguments
        self._port, self._random = free_port("127.0.0.1"), random.Random(seed)
        self._pids: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> MortalServer:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids:
            end(pid)

    def begin(self) -> None:
        """Start the ranks, without waiting for them."""
        words = command(self.folder, self._model, *self._arguments, port=self._port)
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
        world |= {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        places = [world | {"RANK": str(n), "LOCAL_RANK": str(n)} if self.ranks > 1 else {} for n in range(self.ranks)]
        self._pids = [self._start(words, place, self.folder / "log") for place in places]

    def up(self) -> None:
        """Return once the server answers; start it if need be, again and again if a rank ends."""
        while not (self._is_whole() and (self.folder / "url").exists()):
            if not self._is_whole():
                self._end()
                self.begin()
            wait_until(lambda: (self.folder / "url").exists() or not self._is_whole(), (self.folder / "log").read_text)

    def kill_something(self, progress: Callable[[], int]) -> None:
        """Kill a rank or a rollout server at a random moment: while the server starts, or while it has work.

        progress: a number that rises with each result.
        """
        if not self._is_whole():
            self._end()
            self.begin()
        if self._random.random() < 0.25:
            time.sleep(self._random.uniform(0.0, STARTS_S))
        else:
            self.up()
            before = progress()
            wait_until(lambda: progress() > before or not self._is_whole(), (self.folder / "log").read_text)
            time.sleep(self._random.uniform(0.0, RUNS_S))
        servers = [child.pid for pid in self._pids for child in family(pid)[1:] if _is_rollout_server(child)]
        victim = self._random.choice([*self._pids, *servers])
        with contextlib.suppress(ProcessLookupError):  # it has ended, as another rank or its server has
            os.kill(victim, signal.SIGKILL)
            self.kills += 1
        if victim in self._pids:
            # What is left may go on for a moment, as under torchrun.
            time.sleep(self._random.uniform(0.0, 0.3))
            self._end()

    def kill(self) -> None:
        """Kill all ranks."""
        self._end()

    def _is_whole(self) -> bool:
        return bool(self._pids) and all(map(is_alive, self._pids))

    def _end(self) -> None:
        """Kill the ranks. What else they have started ends by itself."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, self._pids)), "a killed rank is still there")
        self._pids = []


def _is_rollout_server(process: psutil.Process) -> bool:
    """Return True for a child of a rank that has a session of its own, which no writer of a checkpoint has."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(process.pid) == process.pid
    return False
