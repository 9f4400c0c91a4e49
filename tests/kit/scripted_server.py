"""A small real HTTP server that speaks SGLang's protocol well enough for the client, and misbehaves when told to.

Its model counts: the token after token t is t + 1. So a test sees at once whether a reply continues where it should.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from megatron_rl.servers.event_loop import EventLoopThread
from tests.kit.waiting import POLL_S, wait_until

EMBEDDED = {"embedded": True, "dtype": "float32"}
"""What an embedded server says of itself."""
Answer = Callable[[dict[str, Any]], web.Response | dict[str, Any]]


def counting(
    body: dict[str, Any], *, tokens: int | None = None, finish: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Answer with `tokens` tokens (default: all that were asked for)."""
    count = body["sampling_params"]["max_new_tokens"] if tokens is None else tokens
    first = body["input_ids"][-1] + 1
    return {
        "text": "",
        "output_ids": list(range(first, first + count)),
        "meta_info": {
            "id": body["rid"],
            "finish_reason": finish or {"type": "length", "length": count},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": count,
            "output_token_logprobs": [[-0.25, token, None] for token in range(first, first + count)],
        },
    }


def overloaded(_: dict[str, Any]) -> web.Response:
    return web.json_response({"error": {"message": "out of memory"}}, status=503)


async def never(_: dict[str, Any]) -> web.Response:
    """Answer only by hanging up: when the client does, or the server is stopped."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


PORTS = itertools.count(20_000 + os.getpid() * 97 % 9_000)
"""Below those that the system gives to clients."""


def listener() -> socket.socket:
    """Listen on a free port above all that this process has listened on: equals are chosen in the order of URLs."""
    for port in PORTS:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:  # it is another's
            continue


class ScriptedServer:
    """Answers /generate with the next of `script`, then by counting. Keeps every POST in `calls`."""

    def __init__(
        self,
        *,
        version: str = "0.5.21",
        api_key: str | None = None,
        info: dict[str, Any] | None = None,
        endpoints: set[str] | None = None,
    ) -> None:
        """`endpoints` are those it has, where it has not all."""
        self.endpoints = endpoints
        self.version = tuple(int(part) for part in version.split("."))
        self.info = (
            {"version": version, "tp_size": 1, "dp_size": 1, "context_length": 1000, "vocab_size": 1000}
            | {"startup_time": 1.0}
            | (info or {})
        )
        self.api_key = api_key
        self.script: deque[Answer] = deque()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.asked: Counter[str] = Counter()
        """How often each endpoint was asked, whether or not it was answered."""
        self.answered: Counter[str] = Counter()
        """How often each was answered."""
        self.refusals: dict[str, tuple[int, dict[str, Any]]] = {}
        """Endpoint -> (status, body) in place of success."""
        self.answers: dict[str, Answer] = {}
        """Control endpoint -> what makes its answer, or a coroutine of it."""
        self.hang_up_on: set[str] = set()
        """Endpoints at which it closes the connection, as a process does that dies."""
        self.weight_version = "default"
        """The live one, in /model_info and in replies that name none. Updates change it."""
        self.model_path = "/nowhere"
        self.on_call: Callable[[str], object] = lambda endpoint: None
        self.hangs = False
        """It takes requests and answers none."""
        self.scheduler_hangs = False
        """It generates nothing, and answers everything else."""
        self._thread = EventLoopThread("scripted server")
        self._listener = listener()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread.run(self._start())

    def generations(self) -> list[dict[str, Any]]:
        return [body for endpoint, body in self.calls if endpoint == "/generate"]

    def controls(self) -> list[str]:
        return [endpoint for endpoint, _ in self.calls if endpoint != "/generate"]

    def body_of(self, endpoint: str) -> dict[str, Any]:
        return next(body for called, body in self.calls if called == endpoint)

    def wait_for_looks(self, count: int = 2) -> None:
        """Return once a client has asked so many times more what this server is.

        A client that looks for the second time has made up its mind about what it saw the first time.
        """
        before = self.asked["/model_info"]
        wait_until(lambda: self.asked["/model_info"] >= before + count, f"nobody looks at {self.url}")

    def keep_name(self) -> None:
        """Go by the version that it was given last, also where its other answers to that are scripted."""

        def rename(body: dict[str, Any]) -> dict[str, Any]:
            self.weight_version = body.get("new_version") or body["weight_version"]
            return {"success": True}

        self.answers["/update_weight_version"] = self.answers["/update_weights_from_distributed"] = rename

    def restart(self, *, weight_version: str = "default") -> None:
        """What a new process on the same port leaves of the old one: no connection, and the weights of the start."""

        async def restart() -> None:
            assert self._runner.server is not None
            for handler in self._runner.server.connections:
                handler.force_close()

        self.weight_version = weight_version
        self.info["startup_time"] = self.info.get("startup_time", 0.0) + 1.0
        self._thread.run(restart())

    def stop(self) -> None:
        self._thread.run(self._runner.cleanup())
        self._thread.stop()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()

    async def _answer(self, http: web.Request) -> web.Response:
        raw = await http.read()
        self.asked[http.path] += 1
        answer = await self._answer_to(http, raw)
        self.answered[http.path] += 1
        return answer

    async def _answer_to(self, http: web.Request, raw: bytes) -> web.Response:
        path = http.path
        while self.hangs:
            await asyncio.sleep(POLL_S)
        if self.endpoints is not None and path not in self.endpoints:
            return web.json_response({"detail": "Not Found"}, status=404)
        while self.scheduler_hangs and path in ("/generate", "/health_generate"):
            await asyncio.sleep(POLL_S)
        if path in ("/health", "/health_generate"):
            return web.Response(status=self.refusals.get(path, (200, {}))[0])
        if self.api_key is not None and http.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        old = self.version < (0, 5, 6)
        if path == ("/get_server_info" if old else "/server_info"):
            return web.json_response(self.info)
        if path == ("/get_model_info" if old else "/model_info"):
            return web.json_response({"model_path": self.model_path, "weight_version": self.weight_version})
        if http.method != "POST" or (path.endswith("_weight_update") and self.version < (0, 5, 21)):
            return web.json_response({"detail": "Not Found"}, status=404)
        body = orjson.loads(raw) if raw else {}
        self.calls.append((path, body))
        self.on_call(path)
        if path in self.hang_up_on:
            assert http.transport is not None
            http.transport.close()
        if path in self.refusals:
            status, answer = self.refusals[path]
            return web.json_response(answer, status=status)
        if path == "/generate":
            answer = (self.script.popleft() if self.script else counting)(body)
        else:
            answer = self.answers.get(path, lambda _: {"success": True, "message": "done"})(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if path.startswith("/update_weight") and not isinstance(answer, web.Response):
            self.weight_version = body.get("new_version") or body.get("weight_version") or self.weight_version
        if path == "/generate" and not isinstance(answer, web.Response):
            self._name_weights(answer["meta_info"])
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    def _name_weights(self, meta: dict[str, Any]) -> None:
        meta.setdefault("weight_version", self.weight_version)
        if self.version >= (0, 5, 19) and (count := meta.get("completion_tokens")):
            span = {"version": meta["weight_version"], "start": 0, "end": count}
            meta.setdefault("weight_versions", [span])
