"""Tools of MCP servers, which run as programs over stdin and stdout or at a URL (streamable HTTP).

Each dialogue has its own connections. The policy sees the errors of its calls. If a server cannot be reached, dies or
hangs, the sample fails and is retried; the failure never becomes a reward.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from megatron_rl.api import InfrastructureFailure, together
from megatron_rl.workflows.environments import ToolUse
from megatron_rl.workflows.tools import Tool, ToolError, middle_left_out

T = TypeVar("T")

ENDING_S = 15.0
"""Time limit for closing a connection. The client kills the server's process before this limit is reached."""


class ServerFailed(InfrastructureFailure):
    """The server cannot be reached, has died, or sent an invalid answer."""

    KIND = "mcp"


class ServerLate(ServerFailed):
    """The server did not answer in time."""


class McpTools(ToolUse):
    """Lets the policy call the tools of MCP servers. The reward function scores the answer: a reply without calls.

    For example:

        MultiTurnWorkflow(reward, gconfig, tokenizer, McpTools, max_tokens=4096, environment_args={"servers": [
            {"command": ["python", "notes_server.py"]}, {"url": "http://127.0.0.1:8000/mcp"},
        ]})
    """

    def __init__(
        self, data: dict[str, Any], *, servers: list[dict[str, Any]], call_timeout_s: float = 60, characters: int = 4000
    ) -> None:
        """servers: dicts with either a `command` (and optional `env`), which is run for this dialogue, or a `url`.

        characters: maximum number of characters of one result shown to the policy.
        """
        super().__init__(data, tools=())
        self.characters = characters
        self._connections = [Connection(server, call_timeout_s) for server in servers]

    async def opening(self) -> dict[str, Any]:
        """Connect to all servers and return the prompt with their tools.

        Raises ServerFailed if a server cannot be reached, ValueError if two tools have the same name.
        """
        found = await together(connection.open() for connection in self._connections)
        for connection, tools in zip(self._connections, found, strict=True):
            for tool in tools:
                if tool.name in self.tools:
                    raise ValueError(f"servers: {connection.name} has a tool {tool.name}, as another has; run one.")
                self.tools[tool.name] = McpTool(connection, tool, self.characters)
        return self.data | {"tools": [tool.schema for tool in self.tools.values()]}

    async def close(self) -> None:
        await together(connection.close() for connection in self._connections)


class McpTool(Tool):
    """One tool of a server."""

    def __init__(self, connection: Connection, tool: Any, characters: int) -> None:
        self.name, self.description = tool.name, tool.description or ""
        self.parameters, self.connection, self.characters = tool.input_schema, connection, characters

    async def __call__(self, **arguments: Any) -> str:
        result = await self.connection.call(self.name, arguments)
        texts = [part.text if part.type == "text" else f"({part.type}, not shown)" for part in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content)]
        text = middle_left_out("\n".join(texts), self.characters)
        if result.is_error:
            raise ToolError(text)
        return text or "(the tool returned nothing)"


class Connection:
    """A connection to one server.

    One task opens and closes the connection, because the task that enters a client's context must also exit it.
    """

    def __init__(self, server: dict[str, Any], call_timeout_s: float) -> None:
        command, url = server.get("command"), server.get("url")
        if (command is None) == (url is None) or server.keys() - {"command", "env", "url"}:
            raise ValueError(f"servers: {server}: must have either a command, and maybe env, or a url.")
        self.name, self.call_timeout_s = f"MCP server {' '.join(command) if command else url}", call_timeout_s
        self._server, self._over = server, asyncio.Event()
        self._client: Any = None
        self._holder: asyncio.Task[None] | None = None

    async def open(self) -> list[Any]:
        """Connect and return the server's tools."""
        is_ready = asyncio.Event()
        self._holder = asyncio.create_task(self._hold(is_ready))
        await self._ask(is_ready.wait(), "connecting")
        page = await self._ask(self._client.list_tools(), "listing its tools")
        tools = list(page.tools)
        while page.next_cursor is not None:
            page = await self._ask(self._client.list_tools(cursor=page.next_cursor), "listing its tools")
            tools += page.tools
        return tools

    async def _hold(self, is_ready: asyncio.Event) -> None:
        try:
            from mcp import Client, StdioServerParameters
        except ImportError as error:
            raise RuntimeError("mcp 2 or newer is not installed; run pip install 'megatron-rl[worlds]'") from error
        server: Any = self._server.get("url")
        if server is None:
            program, *arguments = self._server["command"]
            server = StdioServerParameters(command=program, args=arguments, env=self._server.get("env"))
        async with Client(server) as self._client:
            is_ready.set()
            await self._over.wait()

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Return the tool's result. Raises ToolError if the call takes too long although the server still responds."""
        try:
            return await self._ask(self._client.call_tool(tool, arguments), f"calling {tool}")
        except ServerLate:
            # If the server answers another request it is alive, so the call itself was too slow.
            await self._ask(self._client.list_tools(cache_mode="bypass"), f"a sign of life after a late {tool}")
            raise ToolError(f"{tool} did not end within {self.call_timeout_s:g} s") from None

    async def _ask(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Await a request to the server. what: the request's name for error messages.

        Raises ServerFailed if the request fails or the connection ends, ServerLate if the answer comes too late.
        """
        assert self._holder is not None
        asking = asyncio.ensure_future(coroutine)
        try:
            either = {asking, self._holder}
            ended, _ = await asyncio.wait(either, timeout=self.call_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if asking in ended:
                return asking.result()
            if ended:
                self._holder.result()
        except Exception as error:  # from the client: a refusal, a closed pipe, a group of errors
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            raise ServerFailed(f"{self.name}: {what}: {type(error).__name__}: {error}") from error
        finally:
            asking.cancel()
        raise ServerLate(f"{self.name}: {what} took longer than {self.call_timeout_s:g} s.")

    async def close(self) -> None:
        self._over.set()
        if self._holder is not None:
            await asyncio.wait([self._holder], timeout=ENDING_S)
            self._holder.cancel()
            # If the task's error mattered, `_ask` has raised it.
            await asyncio.gather(self._holder, return_exceptions=True)
