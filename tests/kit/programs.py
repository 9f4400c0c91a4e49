"""Starts the programs of a run, `python -m megatron_rl...`, as forks of the process that asks for them.

What such a program imports takes it three to five seconds, and whoever uses this has imported it. A fork is given what
a command line would have: arguments, environment, open files, a session of its own. That the programs start from a
command line is proven by the runs of test_stopping.py and test_training.py that a launcher and torchrun start, by
those of tests/slurm, and by the servers of tests/servers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.kit.forked import Forked
from tests.kit.ranks import start_up  # which prepares the platform first

with start_up.importing():
    import megatron_rl.rollout.__main__
    import megatron_rl.rollout.rollout_rank
    import megatron_rl.run.rl_run
    import megatron_rl.run.run
    import megatron_rl.tools.report.report  # noqa: F401
    from megatron_rl import cli, train
    from megatron_rl.launch import local
    from megatron_rl.replay import replay_command
    from megatron_rl.rollout import process as rollout_process
    from megatron_rl.servers import server_process
    from tests.kit.pace import paced_server

ROOT = Path(__file__).resolve().parents[2]


def script() -> None:
    """Run the Python file that the first argument names, with the arguments behind it."""
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def serve_training() -> None:
    """Run a training server. Its process may be a fork of one that does not wait for its children."""
    from megatron_rl.training_server import training_command

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    training_command.main()


PROGRAMS: dict[str, Callable[[], object]] = {
    "megatron_rl.cli": cli.main,
    "megatron_rl.launch": local.main,
    "megatron_rl.replay": replay_command.main,
    "megatron_rl.rollout": megatron_rl.rollout.__main__.main,
    "megatron_rl.tools.embedded_server.server": paced_server,
    "megatron_rl.train": train.main,
    "megatron_rl.training_server": serve_training,
    "script": script,
}
STARTERS = (local, rollout_process, server_process, megatron_rl.run.run)
"""The modules that start them."""
STARTED = "TESTS_STARTED_PROGRAMS"
"""Environment variable with the path of a file. Each start of one of PROGRAMS adds a line: pid, rank and command."""
COMMAND = """#!{python} -SE
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect({address!r})
socket.send_fds(asked, [b"."], [1, 2])
asked.sendall(json.dumps([{program!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
asked.shutdown(socket.SHUT_WR)
sys.exit(int(asked.recv(8) or 1))
"""
"""The file of a command, which asks for a fork and ends as that does. It imports next to nothing."""


def fork_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process, and all that are forked from it, start those programs by a fork."""
    forking = SimpleNamespace(**vars(subprocess) | {"Popen": start, "run": run})
    for module in STARTERS:
        monkeypatch.setattr(module, "subprocess", forking)


def start(command: list[str], **options: Any) -> Forked | subprocess.Popen[bytes]:
    """Start a command as subprocess.Popen does, one of PROGRAMS by a fork."""
    module = command[command.index("-m") + 1] if "-m" in command else ""
    if module not in PROGRAMS:
        return subprocess.Popen(command, **options)
    is_ready, says_so = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(module, command, says_so, **options)
    os.close(says_so)
    os.read(is_ready, 1)  # it has its session by now, in which its owner may kill it
    os.close(is_ready)
    if STARTED in os.environ:
        with open(os.environ[STARTED], "a") as file:
            file.write(json.dumps([pid, options["env"].get("RANK"), command]) + "\n")
    return Forked(pid, command)


def started_programs(file: Path) -> dict[int, tuple[str | None, list[str]]]:
    """Return rank and command of what was started while STARTED named that file, by pid."""
    lines = map(json.loads, file.read_text().splitlines())
    return {pid: (rank, command) for pid, rank, command in lines}


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """The part of subprocess.run that captures text, by a fork for one of PROGRAMS."""
    if "-m" not in command or command[command.index("-m") + 1] not in PROGRAMS:
        return subprocess.run(command, **options)
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        code = start(command, env=options["env"], stdout=stdout, stderr=stderr).wait()
        said = [file.seek(0) or file.read() for file in (stdout, stderr)]
    return subprocess.CompletedProcess(command, code, *said)


@contextlib.contextmanager
def forked_commands(folder: Path, commands: Mapping[str, str]) -> Iterator[None]:
    """Put commands into `folder` that run programs of PROGRAMS in a fork, while this lasts."""
    address = str(folder / "asked")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            _answer(listener)
    for name, program in commands.items():
        command = folder / name
        command.write_text(COMMAND.format(python=sys.executable, address=address, program=program))
        command.chmod(0o755)
    try:
        yield
    finally:
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            process.kill()
        os.waitpid(pid, 0)


def _answer(listener: socket.socket) -> None:
    """Run one command after the other."""
    try:
        while True:
            asked, _ = listener.accept()
            _, files, _, _ = socket.recv_fds(asked, 1, 2)
            program, words, cwd, env = json.loads(asked.makefile().read())
            os.chdir(cwd)
            command = [sys.executable, "-m", program, *words]
            with os.fdopen(files[0], "w") as stdout, os.fdopen(files[1], "w") as stderr:
                process = start(command, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
            asked.sendall(str(process.wait()).encode())
            asked.close()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become(
    module: str,
    command: list[str],
    says_so: int,
    *,
    env: dict[str, str],
    cwd: Path | None = None,
    stdin: int | None = None,
    stdout: Any = None,
    stderr: Any = None,
    pass_fds: Collection[int] = (),
    start_new_session: bool = False,
) -> None:
    """Be what the command's interpreter would be: alone, with its own files, environment and arguments, and run it."""
    code = 1
    try:
        if start_new_session:
            os.setsid()
        if stdin == subprocess.DEVNULL:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if stdout is not None:
            os.dup2(stdout.fileno(), 1)
        if stderr is not None:
            os.dup2(1 if stderr == subprocess.STDOUT else stderr.fileno(), 2)
        _let_go_of_files({*pass_fds, says_so})
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
        logging.getLogger().handlers.clear()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd or os.getcwd())
        sys.argv = [module, *command[command.index(module) + 1 :]]
        _forget_modules_of_tests()
        # A fork lacks the OpenMP threads that its parent has used, and would wait for them.
        torch.set_num_threads(1)
        if "-P" not in command:
            sys.path.insert(0, os.getcwd())
        os.write(says_so, b".")
        os.close(says_so)
        PROGRAMS[module]()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_modules_of_tests() -> None:
    """Forget the modules of folders that an earlier test has made: the command may find others of their names."""
    known = tuple(map(str, (ROOT, sys.prefix, sys.base_prefix, Path(sys.prefix).resolve())))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not str(file).startswith(known):
            del sys.modules[name]


def _let_go_of_files(kept: Collection[int]) -> None:
    """Close the parent's files. Their numbers stay in use, as its objects may yet close them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept and number != nothing:
            try:
                os.fstat(number)
            except OSError:  # the listing's own
                continue
            os.dup2(nothing, number, inheritable=False)
