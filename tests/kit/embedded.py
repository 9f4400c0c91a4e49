"""Embedded servers with a test's own options: in a process, or in a thread of this one, where it can look into them."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.tools.embedded_server import server
from megatron_rl.tools.embedded_server.listening import listen
from megatron_rl.tools.embedded_server.server import RolloutServer, build_server, open_to_clients
from tests.kit import programs
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.waiting import LIMIT_S, wait_until

READY = "rollout server ready at "


class Process:
    """A server in a process, until this block is left."""

    def __init__(self, process: programs.Forked, output: Path) -> None:
        self.process, self.output = process, output
        wait_until(lambda: self.said() or process.poll() is not None, "the server says nothing")
        line = self.said().partition("\n")[0]
        assert line.startswith(f"{READY}http://127.0.0.1:"), output.read_text()
        self.url = line.removeprefix(READY).split()[0]

    def said(self) -> str:
        """Return its whole lines so far."""
        return "".join(line for line in self.output.read_text().splitlines(keepends=True) if line.endswith("\n"))


@contextmanager
def in_a_process(model: Path, *options: str, token_file: str | None = TOKEN_FILE) -> Iterator[Process]:
    """Start a server by a fork."""
    command = [sys.executable, "-m", "megatron_rl.tools.embedded_server.server", str(model), "--port", "0", *options]
    command += ["--token-file", token_file] if token_file else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.NamedTemporaryFile() as output:
        process = programs.start(command, stdout=output, env=environment)
        try:
            yield Process(process, Path(output.name))
        finally:
            process.terminate()
            process.wait(LIMIT_S)


class InAThread:
    """A server in this process."""

    def __init__(self, rollout_server: RolloutServer, port: int) -> None:
        self.server, self.port, self.url = rollout_server, port, f"http://127.0.0.1:{port}"


@contextmanager
def in_a_thread(model: Path, token: str | None) -> Iterator[InAThread]:
    args = server.parser().parse_args([str(model), "--port", "0"])
    rollout_server, listener = build_server(model, args), listen("127.0.0.1", 0)
    ready, stop = threading.Event(), []

    async def run() -> None:
        async with open_to_clients(rollout_server, listener, host="127.0.0.1", token=token) as over:
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(over.set))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(LIMIT_S)
    try:
        yield InAThread(rollout_server, listener.getsockname()[1])
    finally:
        stop[0]()
        thread.join(LIMIT_S)
