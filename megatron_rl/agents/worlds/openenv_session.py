"""Client for a session on an OpenEnv server.

It implements the websocket protocol of the package openenv-core, without needing the package.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import aiohttp

from megatron_rl.api import InfrastructureFailure
from megatron_rl.workflows.tools import ToolError

MOST_BYTES = 64 << 20
"""Maximum size of a server's message."""
PAUSE_S = 0.2
"""Interval between retries while a server has no free session."""


class OpenEnvFailed(InfrastructureFailure):
    """The server cannot be reached, has failed or died, or did not answer in time."""

    KIND = "openenv"


class NoSession(Exception):
    """All sessions of the server are in use."""


class Session:
    """An environment instance on a server. The server ends it when the connection closes.

    For example:

        session = Session("http://127.0.0.1:8000", session_timeout_s=60.0, call_timeout_s=60.0)
        found = await session.reset({"seed": 3})  # {"observation": {..}, "reward": None, "done": False}
        found = await session.step({"message": "hello"})
    """

    def __init__(self, url: str, *, session_timeout_s: float, call_timeout_s: float) -> None:
        """session_timeout_s: maximum wait for a free session. call_timeout_s: time limit of each answer."""
        self.url = f"{url.rstrip('/').replace('http', 'ws', 1)}/ws"
        self.session_timeout_s, self.call_timeout_s = session_timeout_s, call_timeout_s
        self._client: aiohttp.ClientSession | None = None

    async def reset(self, content: dict[str, Any]) -> dict[str, Any]:
        """Connect and begin an episode."""
        self._client = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(self.session_timeout_s):
                while True:
                    self._socket = await self._client.ws_connect(self.url, max_msg_size=MOST_BYTES)
                    with suppress(NoSession):
                        return await self._ask("reset", content)
                    await self._socket.close()
                    await asyncio.sleep(PAUSE_S)
        except aiohttp.ClientError as error:
            raise OpenEnvFailed(f"{self.url}: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise OpenEnvFailed(f"{self.url}: gave no session within {self.session_timeout_s:g} s.") from error

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Return the result of an action. Raises ToolError if the action does not match the schema.

        The caller must wait for the result before the next action.
        """
        return await self._ask("step", action)

    async def _ask(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.call_timeout_s):
                with suppress(ConnectionResetError):  # its last message may still be read
                    await self._socket.send_json({"type": kind, "data": content})
                answer = json.loads(await self._socket.receive_str())
        except TimeoutError as error:
            raise OpenEnvFailed(f"{self.url}: {kind} took longer than {self.call_timeout_s:g} s.") from error
        except (aiohttp.ClientError, OSError, TypeError, ValueError) as error:  # a message without text: it was closed
            raise OpenEnvFailed(f"{self.url}: {kind}: the server is gone: {error}") from error
        found: dict[str, Any] = answer["data"]
        if answer["type"] != "error":
            return found
        if found["code"] == "CAPACITY_REACHED":
            raise NoSession
        if found["code"] == "VALIDATION_ERROR" and kind == "step":
            faults = [f"{'.'.join(map(str, it['loc']))}: {it['msg']}" for it in found.get("errors", ())]
            raise ToolError("; ".join(faults) or found["message"])
        raise OpenEnvFailed(f"{self.url}: {kind}: {found['code']}: {found['message']}")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
