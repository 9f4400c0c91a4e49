"""Asyncio client of a container (sandbox/container.py), and the container's shell as a tool."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megatron_rl
from megatron_rl.api import InfrastructureFailure
from megatron_rl.workflows.tools import Tool, middle_left_out

KEEPER = "import sys; sys.path.insert(0, sys.argv[1]); from megatron_rl.sandbox.container import main; main()"
PACKAGES = str(Path(megatron_rl.__file__).parents[1])
MOST_BYTES = 1 << 20
"""Maximum size in bytes of a command, and of its output."""
LONGEST_LINE = 1 << 24
VMSTAT = Path("/proc/vmstat")


class ContainerFailed(InfrastructureFailure):
    """The container cannot be created, or its keeper process has died. Programs in the container are not to blame."""

    KIND = "container"


class ContainerFull(ContainerFailed):
    """No further process can be started in the container."""


class Container:
    """Client of a container's keeper process. Each method is one request to the keeper.

    For example:

        async with Container(writable=["app"], visible=[], disk_mib=64, memory_mib=512) as container:
            await container.begin()
            code, output = await container.run("echo 42 > answer; cat answer", "/app", {}, time_s=5.0)
    """

    def __init__(self, *, writable: Sequence[str], visible: Sequence[str], disk_mib: int, memory_mib: int) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="container-")
        self._kind = {"place": self._place.name, "writable": list(writable), "visible": list(visible)}
        self._kind |= {"disk_bytes": disk_mib << 20, "memory_bytes": memory_mib << 20}
        self._keeper: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Container:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-I", "-S", "-B", "-c", KEEPER, PACKAGES)
        options: dict[str, Any] = {"env": {}, "limit": LONGEST_LINE, "start_new_session": True}
        try:
            self._keeper = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, **options)
        except OSError as error:
            raise ContainerFailed(f"a container's keeper cannot be started: {error}.") from error
        await self._ask(do="make", **self._kind)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            if self._keeper.returncode is None:
                self._keeper.kill()  # this kills everything inside the container
            await self._keeper.wait()
        self._place.cleanup()

    @property
    def keeper_pid(self) -> int:
        """Process id of the container's keeper. If the keeper dies, everything in the container dies."""
        assert self._keeper is not None
        return self._keeper.pid

    async def _ask(self, **asked: Any) -> dict[str, Any]:
        assert self._keeper is not None and self._keeper.stdin is not None and self._keeper.stdout is not None
        try:
            self._keeper.stdin.write(json.dumps(asked).encode() + b"\n")
            await self._keeper.stdin.drain()
            answer = json.loads(await self._keeper.stdout.readline())
        except (OSError, ValueError) as error:
            raise ContainerFailed(f"a container's keeper is gone: {error}.") from error
        if "error" in answer and asked["do"] != "ask":
            raise ContainerFailed(
                f"a container could not {asked['do']}: {answer['error']}; it takes Linux on x86_64, and a host "
                f"that lets this user make namespaces."
            )
        return dict(answer)

    async def begin(self, fresh: Sequence[str] = ()) -> None:
        """Kill all processes in the container and begin a new phase.

        fresh: those of the folders `tests`, `logs` and `solution` that get a new, empty disk.
        """
        await self._ask(do="begin", fresh=list(fresh))

    async def run(self, command: str, cwd: str, env: dict[str, str], *, time_s: float) -> tuple[int | None, str]:
        """Run a bash command. Return its exit status and output.

        The exit status is None if the command exceeded `time_s` or ended the container's first process. Raises
        ContainerFull if no process can be started, because too many run in the container or on the host.
        """
        what = {"do": "run", "command": command, "cwd": cwd, "env": env, "time_s": time_s, "most_bytes": MOST_BYTES}
        answer = await self._ask(do="ask", what=what)
        if "error" in answer:  # the container's first process is gone: begin a new phase, with the same files
            await self.begin()
            return None, f"all processes were ended: {answer['error']}"
        if answer.get("is_full"):
            raise ContainerFull(f"a container: {answer['output']}.")
        return answer["code"], answer["output"]

    async def put(self, files: dict[str, Path], folder: str) -> None:
        """Copy files and whole folders of this host into a folder of the container.

        files: {name in that folder: path on this host}.
        """
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            for name, path in files.items():
                tar.add(path, name, filter=owned_by_root)
        archive = base64.b64encode(content.getvalue()).decode()
        answer = await self._ask(do="ask", what={"do": "put", "archive": archive, "folder": folder, "time_s": 60.0})
        if answer["code"] != 0:
            raise ContainerFailed(f"{answer['output']} {answer.get('error', '')}")

    async def end(self) -> None:
        """Kill all processes in the container."""
        await self._ask(do="end")

    async def read(self, path: str) -> str | None:
        """Return a file's text; None if it does not exist or its path contains a link."""
        return (await self._ask(do="read", path=path.strip("/").split("/")))["text"]


def memory_kills() -> int:
    """Return how many processes the host's kernel has killed for lack of memory since boot."""
    with VMSTAT.open(encoding="ascii") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))


def owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry


class Shell(Tool):
    """Shell of a container. Each call runs a new bash; its background processes continue after the call."""

    name = "bash"
    description = "Runs a command in bash and returns what it prints. Files and background processes stay."
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}

    def __init__(
        self, container: Container, cwd: str, env: dict[str, str], time_s: float, left_s: float, characters: int
    ) -> None:
        """time_s: time limit of one command. left_s: time limit of all commands together."""
        self.container, self.cwd, self.env = container, cwd, env
        self.time_s, self.left_s, self.characters = time_s, left_s, characters

    async def __call__(self, command: Any) -> str:
        clock = asyncio.get_running_loop()
        time_s, begin = min(self.time_s, self.left_s), clock.time()
        if time_s <= 0:
            return "error: the time of all commands together is over; give your final answer"
        if len(str(command)) > MOST_BYTES or "\0" in str(command):
            return "error: a command is at most 1 MiB of text without zeros"
        try:
            code, output = await self.container.run(str(command), self.cwd, self.env, time_s=time_s)
        except ContainerFull:  # because of background processes that the policy started
            return "error: no process can be started: too many are running"
        self.left_s -= clock.time() - begin
        text = middle_left_out(output.strip(), self.characters)
        if code is None:
            return f"{text}\nerror: did not end within {time_s:g} s".strip()
        return text if code == 0 and text else f"{text}\n(exit status {code})".strip()
