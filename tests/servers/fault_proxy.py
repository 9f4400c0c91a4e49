"""A real HTTP proxy before a real server that spoils some of the answers to /generate."""

from __future__ import annotations

import asyncio
import socket
from collections import deque

import aiohttp
from aiohttp import web

from megatron_rl.rollout.event_loop import EventLoopThread

FAULTS = ("delay", "drop", "truncate", "error", "garbage")
DELAY_S = 0.3


class FaultProxy:
    """Forwards to `upstream`. Each call of /generate takes the next of `faults`; None, and an empty queue, is none."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.faults: deque[str | None] = deque()
        self.met: list[str] = []
        self.answers_left: int | None = None
        """Calls of /generate until it answers none; None is no end."""
        self._thread = EventLoopThread("fault proxy")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread.run(self._start())

    def stop(self) -> None:
        self._thread.run(self._end())
        self._thread.stop()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, http: web.Request) -> web.StreamResponse:
        if http.path == "/generate" and self.answers_left is not None:
            if self.answers_left == 0:
                await asyncio.Event().wait()
            self.answers_left -= 1
        fault = self.faults.popleft() if http.path == "/generate" and self.faults else None
        if fault is not None:
            self.met.append(fault)
        if fault == "error":
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        if fault == "garbage":
            return web.Response(body=b'{"text": "\xff\xfe', content_type="application/json")
        if fault == "delay":
            await asyncio.sleep(DELAY_S)
        body, headers = (
            await http.read(),
            {"Content-Type": http.content_type, "Authorization": http.headers.get("Authorization", "")},
        )
        async with self._session.request(http.method, self.upstream + http.path_qs, data=body, headers=headers) as up:
            status, content = up.status, await up.read()
        if fault == "drop":  # after the work was done
            assert http.transport is not None
            http.transport.close()
        if fault == "truncate":
            response = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
            response.content_length = len(content)
            await response.prepare(http)
            await response.write(content[: len(content) // 2])
            assert http.transport is not None
            http.transport.close()
            return response
        return web.Response(status=status, body=content, content_type="application/json")
