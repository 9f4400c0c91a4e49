"""Helpers that all endpoints share: JSON responses, errors as JSON, and reading a body's object."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import orjson
from aiohttp import web

from megatron_rl.tools.embedded_server.bodies import BODIES

MOST_MESSAGE_LETTERS = 4000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def read_object(http: web.Request) -> dict[str, Any]:
    """Return the body's JSON object; an empty dict if there is no body."""
    return await http.app[BODIES].object(http)


async def wait(future: Future) -> Any:
    return await asyncio.wrap_future(future)


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_response(message: str, status: int) -> web.Response:
    return json_response({"error": {"message": message[:MOST_MESSAGE_LETTERS]}}, status)
