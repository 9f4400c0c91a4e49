"""A real HTTP proxy before a real server that spoils some of the answers to /generate."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web

from megatron_rl.servers.event_loop import EventLoopThread

FAULTS = ("delay", "drop", "truncate", "error", "garbage")
DELAY_S = 0.3


def _triples(answer: dict[str, Any]) -> list[list[Any]]:
    return answer["meta_info"]["output_token_logprobs"]


def _logprob(value: object) -> Callable[[dict[str, Any]], None]:
    def spoil(answer: dict[str, Any]) -> None:
        for triple in _triples(answer):
            triple[0] = value

    return spoil


def _version(value: str) -> Callable[[dict[str, Any]], None]:
    def spoil(answer: dict[str, Any]) -> None:
        answer["meta_info"]["weight_version"] = value
        for span in answer["meta_info"].get("weight_versions", []):
            span["version"] = value

    return spoil


def _another_token(answer: dict[str, Any]) -> None:
    if answer["output_ids"]:
        answer["output_ids"][0] += 1


def _too_many_tokens(answer: dict[str, Any]) -> None:
    answer["output_ids"] = answer["output_ids"] * 40
    answer["meta_info"]["output_token_logprobs"] = _triples(answer) * 40
    answer["meta_info"]["completion_tokens"] = len(answer["output_ids"])


def _no_such_token(answer: dict[str, Any]) -> None:
    answer["output_ids"] = [10**6 for _ in answer["output_ids"]]
    for triple in _triples(answer):
        triple[1] = 10**6


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "log-probs are no numbers": _logprob("NaN"),
    "log-probs are infinite": _logprob(-1e308),
    "log-probs are truth values": _logprob(False),
    "a version that was never published": _version("999"),
    "a version before the first": _version("-1"),
    "weights of no version": _version("default"),
    "another token than in the triples": _another_token,
    "more tokens than were asked for": _too_many_tokens,
    "tokens outside the vocabulary": _no_such_token,
    "no log-probs": lambda answer: answer["meta_info"].pop("output_token_logprobs"),
    "no reason why it ended": lambda answer: answer["meta_info"].update(finish_reason={"type": "tired"}),
}
"""Faults of whole answers that no HTTP client can see, by what is wrong with them."""


class FaultProxy:
    """Forwards to `upstream`. Each call of /generate takes the next of `faults`; None, and an empty queue, is none.

    With `chance`, a share of `fault_share` of the others takes one of FAULTS or LIES.
    """

    def __init__(self, upstream: str, *, chance: random.Random | None = None, fault_share: float = 0.0) -> None:
        self.upstream, self.chance, self.fault_share = upstream, chance, fault_share
        self.faults: deque[str | None] = deque()
        self.met: list[str] = []
        self.answers_left: int | None = None
        """Calls of /generate until it answers none; None is no end."""
        self.unanswered = 0
        """Calls of /generate that were left without an answer after that."""
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
                self.unanswered += 1
                await asyncio.Event().wait()
            self.answers_left -= 1
        fault = self._next_fault() if http.path == "/generate" else None
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
        url = self.upstream + http.path_qs
        try:
            async with self._session.request(http.method, url, data=body, headers=headers) as up:
                status, content = up.status, await up.read()
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": f"upstream: {error}"}}, status=502)
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
        if fault in LIES and status == 200:
            answer = json.loads(content)
            LIES[fault](answer)
            content = json.dumps(answer).encode()
        return web.Response(status=status, body=content, content_type="application/json")

    def _next_fault(self) -> str | None:
        if self.faults:
            return self.faults.popleft()
        if self.chance is not None and self.chance.random() < self.fault_share:
            return self.chance.choice([*FAULTS, *LIES])
        return None
