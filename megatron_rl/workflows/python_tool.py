"""A Python interpreter as a tool. The policy's program is sandboxed (sandbox/lock.py): it can only compute and print.

Each call runs in a new process, which is killed at its deadline. No state is kept between calls.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from megatron_rl.api import InfrastructureFailure
from megatron_rl.sandbox import lock
from megatron_rl.workflows.tools import Tool, ToolError, middle_left_out

LAUNCHER = str(Path(lock.__file__))
MOST_PRINTED_BYTES = 1 << 20
START_S = 30.0
"""Time limit for starting the interpreter, separate from the program's limit because the host may be busy."""

AT_ONCE: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""Slots for running programs: one per core in each event loop. Time limits start when a program has its slot."""


class Python(Tool):
    """Runs a program and returns its output, with the traceback if it raised. Linux on x86_64 only.

    await Python(time_s=2.0)(code="print(sum(range(10)))")  # "45"
    """

    name = "python"
    description = "Runs a Python program with the standard library and returns what it prints. No files, no network."
    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the whole program; print what you want to see"}},
        "required": ["code"],
    }

    def __init__(self, time_s: float = 5.0, memory_mib: int = 512, characters: int = 4000) -> None:
        """characters: maximum number of characters shown to the policy. The middle of a longer output is left out."""
        self.time_s, self.memory_bytes, self.characters = time_s, memory_mib << 20, characters

    async def __call__(self, code: Any) -> str:
        """Run the program and return its output. ToolError if it exceeds its time or output limit."""
        async with AT_ONCE.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1)):
            with closing(lock.Threads()) as threads:
                printed = await self._run(threads, str(code))
        return middle_left_out(printed.strip(), self.characters) or "(the program printed nothing)"

    async def _run(self, threads: lock.Threads, code: str) -> str:
        loop, given = asyncio.get_running_loop(), threads.theirs.fileno()
        limits = [str(os.getpid()), str(self.time_s), str(self.memory_bytes), str(given)]
        # Isolated from user settings, without site-packages or bytecode files: only the standard library is available.
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-B", LAUNCHER, *limits),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={},
                pass_fds=[given],
            )
        except OSError as error:
            raise failed(f"cannot be started: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        listener = -1

        def grant() -> None:
            threads.grant()
            if threads.listener < 0:  # closed; use the copy: the number may soon be another file's
                loop.remove_reader(listener)

        try:
            # Send the program only after its process is locked down; its time limit starts then.
            await self._wait_until_ready(process.stdout)
            threads.take_listener()
            listener = threads.listener
            if listener >= 0:
                loop.add_reader(listener, grant)
            async with asyncio.timeout(self.time_s):
                process.stdin.write(code.encode("utf-8", "replace"))
                process.stdin.write_eof()
                begun = loop.time()
                printed = await self._read(process.stdout)
                # Its CPU-time limit also kills with SIGKILL, but only after all cores together could have used it.
                least_s = lock.cpu_limit_s(self.time_s) / (os.cpu_count() or 1)
                if await process.wait() == -signal.SIGKILL and loop.time() - begun < least_s:
                    raise failed("was killed by the host; look for a lack of memory, in the kernel's log")
                return printed.decode("utf-8", "replace")
        except TimeoutError as error:
            raise ToolError(f"the program did not end within {self.time_s:g} s") from error
        finally:
            if threads.listener >= 0:
                loop.remove_reader(threads.listener)
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)  # process.kill() would reap the process before asyncio does
                # asyncio waits for the pipes to end, and nobody else would drain a full one.
                while await process.stdout.read(1 << 16):
                    pass
                await process.wait()

    async def _wait_until_ready(self, stream: asyncio.StreamReader) -> None:
        """Wait for the interpreter to start. InfrastructureFailure if it does not, because the host is to blame."""
        try:
            async with asyncio.timeout(START_S):
                said = await stream.read(1)
        except TimeoutError as error:
            raise failed(f"was not ready within {START_S:g} s; the host has too much to do") from error
        if said != lock.READY:
            rule = "which takes Linux on x86_64 with seccomp; run there, or leave the tool out"
            raise failed(f"ended before it was locked in, {rule}")

    async def _read(self, stream: asyncio.StreamReader) -> bytes:
        content = bytearray()
        while part := await stream.read(1 << 16):
            content += part
            if len(content) > MOST_PRINTED_BYTES:
                raise ToolError(f"the program printed more than {MOST_PRINTED_BYTES >> 20} MiB")
        return bytes(content)


def failed(what: str) -> InfrastructureFailure:
    return InfrastructureFailure(f"the Python tool's process {what}.", kind="sandbox")
