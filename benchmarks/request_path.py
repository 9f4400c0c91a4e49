"""The functions of the package between the training loop and an HTTP request, as a real run passes them.

python benchmarks/readability.py --path

A run of one step is traced: in the trainer the stack at the call that leaves for the rollout process, and there the
stack at the first request for a reply. A task's stack goes on with that of the code which started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_rl"
OUT = "MEGATRON_RL_REQUEST_PATH"
"""The variable that names the file in which the rollout process leaves its part."""
SETTINGS = ["run.steps=1", "warm_start.updates=0", "run.evaluate_every_steps=0", "run.save_at_end=false"]

Step = tuple[str, str]
"""A file of the package, and a function's qualified name in it."""


@dataclass(frozen=True)
class RequestPath:
    """The steps of each process, in order."""

    trainer: list[Step]
    rollout: list[Step]

    @property
    def functions(self) -> int:
        return len(self.trainer) + len(self.rollout)

    @property
    def files(self) -> int:
        return len({file for file, _ in self.trainer + self.rollout})


def stack() -> list[Step]:
    """Return the package's functions that are on this thread's stack, the outermost first."""
    steps: list[Step] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            steps.append((str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname))
        frame = frame.f_back
    return steps[::-1]


class Origins:
    """Remembers of each task the stack of the code that started it, tasks of other threads included."""

    def __init__(self) -> None:
        self._below = 0
        """Steps on the stack of the event loop itself, which starts a task's steps anew."""
        self._of: weakref.WeakKeyDictionary[asyncio.Task[Any], list[Step]] = weakref.WeakKeyDictionary()

    def here(self) -> list[Step]:
        """Return the stack of this code, behind that of whoever started its task."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs here
            return stack()
        return ([] if task is None else self._of.get(task, [])) + stack()[self._below :]

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note who starts which task from now on. Called by who made the loop and is going to run it."""
        self._below = len(stack())

        def start(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
            task = asyncio.Task(coroutine, loop=loop, **options)
            self._of.setdefault(task, self.here())
            return task

        loop.set_task_factory(start)
        threadsafe: Callable[..., Any] = asyncio.run_coroutine_threadsafe

        def start_from_elsewhere(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
            origin = self.here()

            async def carried() -> Any:
                task = asyncio.current_task()
                assert task is not None
                self._of[task] = origin
                return await coroutine

            return threadsafe(carried(), loop)

        asyncio.run_coroutine_threadsafe = start_from_elsewhere


def run_rollout() -> None:
    """Be the rollout process, and write its part at the first request for a reply."""
    import uvloop

    from megatron_rl.servers.http_connections import Connections

    origins, out = Origins(), Path(os.environ[OUT])
    make_loop, send = uvloop.new_event_loop, Connections.send

    def new_event_loop() -> asyncio.AbstractEventLoop:
        loop = make_loop()
        origins.watch(loop)
        return loop

    def noted(connections: Any, exchange: Any, origin: Any, method: str, path: str, *rest: Any) -> None:
        if path.endswith("/generate") and not out.exists():
            steps = origins.here()
            if any(name.endswith("prepare_batch") for _, name in steps):  # and not an evaluation's
                out.write_text(json.dumps(steps))
        send(connections, exchange, origin, method, path, *rest)

    uvloop.new_event_loop = new_event_loop
    Connections.send = noted  # type: ignore[method-assign]
    runpy.run_module("megatron_rl.rollout", run_name="__main__")


def traced(config: str = "configs/count_grpo.yaml") -> RequestPath:
    """Run one step of a config and return the path of its first request."""
    from megatron_rl.config import load_config
    from megatron_rl.rollout import rpc
    from megatron_rl.train import train

    trainer: list[Step] = []
    send, start = rpc.RpcSocket.send, subprocess.Popen

    def noted(wire: Any, message: Any, **options: Any) -> None:
        if message[1] == "prepare_batch" and not trainer:
            trainer.extend(stack())
        send(wire, message, **options)

    class Started(start):  # type: ignore[misc,valid-type]
        def __init__(self, command: Any, **options: Any) -> None:
            if isinstance(command, list) and "megatron_rl.rollout" in command:
                place = command.index("megatron_rl.rollout")
                command = [*command[: place - 1], __file__, *command[place + 1 :]]
            super().__init__(command, **options)

    rpc.RpcSocket.send = noted
    subprocess.Popen = Started
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "path.json"
        os.environ[OUT] = str(out)
        train(load_config(ROOT / config, [*SETTINGS, f"run.folder={folder}/run"]))
        rollout = [(file, name) for file, name in json.loads(out.read_text())]
    first = next(n for n, (_, name) in enumerate(trainer) if name == "rl_steps")
    return RequestPath(trainer[first:], rollout)


if __name__ == "__main__":
    run_rollout()
