"""Calls that tests make on a client of rollout servers: ask for replies, publish, look at its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import requests

from megatron_rl.config import GenerationConfig
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.types import LLMRequest, LLMResponse
from tests.kit.run_tokens import AUTHORIZED
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until

PROMPT = [11, 200, 37, 5]


def request_of(
    rid: str = "r", input_ids: Sequence[int] = (1,), metadata: dict[str, Any] | None = None, **gconfig: Any
) -> LLMRequest:
    options = GenerationConfig(**{"max_new_tokens": 2} | gconfig)
    return LLMRequest(rid=rid, input_ids=list(input_ids), gconfig=options, metadata=metadata or {})


def ask(engine: RemoteSGLangEngine, **request: Any) -> LLMResponse:
    """Return the reply to `request_of(**request)`."""
    return asyncio.run(engine.agenerate(request_of(**request)))


def start(engine: RemoteSGLangEngine, rid: str = "r", **request: Any) -> Future[LLMResponse]:
    """Ask, and return the reply's future."""
    return engine._thread.submit(engine.agenerate(request_of(rid, **request)))


def abort_all(engine: RemoteSGLangEngine) -> None:
    """Abort every request on the engine's servers, also those of others."""
    fleet = engine.service.client.fleet
    body = {"abort_all": True}
    engine._thread.run(fleet.on_all(lambda server: server.command("/abort_request", body, timeout_s=LATE_S)))


def greedy(engine: RemoteSGLangEngine, count: int = 12, prompt: Sequence[int] = PROMPT) -> LLMResponse:
    return ask(engine, input_ids=prompt, max_new_tokens=count, greedy=True, ignore_eos=True)


def load(engine: RemoteSGLangEngine, version: int) -> None:
    """Send one bucket to scripted servers."""
    loads = engine.load_bucket(names=["w"], dtypes=["float32"], shapes=[[2]], group="g", version=version)
    for answer in loads.values():
        answer.result(LIMIT_S)


def update(engine: RemoteSGLangEngine, version: int = 2) -> None:
    """Make one publication of one bucket to scripted servers, as the publisher makes it."""
    engine.pause()
    engine.begin_weight_update(version)
    load(engine, version)
    finish(engine, version)


def finish(engine: RemoteSGLangEngine, version: int, *, is_checked: bool = False) -> None:
    """End a publication that `begin_weight_update` began, with a look at what the servers hold where it is checked."""
    engine.end_weight_update(version)
    for held in engine.held_weights().values() if is_checked else ():
        held.result(LIMIT_S)
    engine.finish_update(version)
    engine.resume()


def publish_checked(engine: RemoteSGLangEngine, version: int) -> None:
    """Choose servers first, and compare what they hold: others can be brought to these weights afterwards."""
    engine.select_servers()
    engine.pause()
    engine.begin_weight_update(version)
    load(engine, version)
    finish(engine, version, is_checked=True)


def wait_until_selected(engine: RemoteSGLangEngine, count: int) -> None:
    """Return once so many servers take part in a publication; each comes back by itself."""
    wait_until(
        lambda: (engine.select_servers(), len(engine.server_ranks))[1] == count, lambda: str(engine.server_ranks)
    )


def wait_until_serving(engine: RemoteSGLangEngine, count: int, *, limit_s: float = LIMIT_S) -> None:
    wait_until(lambda: len(engine.serving) == count, lambda: str(engine.serving), limit_s=limit_s)


def lose(engine: RemoteSGLangEngine, url: str) -> None:
    """Let the client lose a server, as where a call to it failed."""
    members = engine.service.client.fleet.members
    (server,) = [server for server in members.serving if server.url == url]

    async def lose_it() -> None:
        members.lose(server, "restarted")

    engine._thread.run(lose_it())


def pid_of(supervisor: Supervisor, url: str) -> int:
    return next(server.process.pid for server in supervisor._servers if server.url == url)


def post(url: str, path: str, body: Any = None) -> requests.Response:
    return requests.post(f"{url}{path}", json={} if body is None else body, headers=AUTHORIZED, timeout=LATE_S)


def get(url: str, path: str) -> Any:
    return requests.get(f"{url}{path}", headers=AUTHORIZED, timeout=LATE_S).json()
