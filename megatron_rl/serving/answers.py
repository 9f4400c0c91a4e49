"""What all endpoints share: reading bodies, SGLang's answer shapes, errors as JSON, the token."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import orjson
from aiohttp import web

from megatron_rl.serving.request import Request

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/health_generate", "/ready", "/metrics")
"""Open to everyone."""
GENERATION_PATHS = (
    *("/generate", "/v1/chat/completions", "/v1/loads", "/v1/models"),
    *("/model_info", "/get_model_info", "/server_info", "/get_server_info"),
)
"""Open too where a server has no token; whatever is left changes the server or shows its weights."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def read_json(http: web.Request) -> Any:
    raw = await http.read()
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from None


async def read_object(http: web.Request) -> dict[str, Any]:
    body = await read_json(http) if http.can_read_body else {}
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


_REQUIRED: Any = object()


def field(body: dict[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """The field, or its default where it is missing or null; ValueError where it is required or of another type."""
    value = body.get(name)
    if value is None:
        if default is _REQUIRED:
            raise ValueError(f"{name}: required, must be of type {kind.__name__}")
        return default
    if type(value) is not kind:
        raise ValueError(f"{name} = {value!r}: must be of type {kind.__name__}")
    return value


async def wait(future: Future) -> Any:
    return await asyncio.wrap_future(future)


def json_answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


class RequestFailed(Exception):
    """A request ended with an abort that carries an HTTP status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def raise_failed(request: Request) -> None:
    reason = request.finish_reason
    if reason["type"] == "abort" and reason["status_code"] is not None:
        raise RequestFailed(reason["message"], reason["status_code"])


@web.middleware
async def answer_errors(http: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(http)
    except ValueError as error:
        return error_answer(str(error), 400)
    except RequestFailed as error:
        return error_answer(str(error), error.status)
    except web.HTTPException as error:
        return error_answer(f"{http.method} {http.path}: {error.reason}", error.status)
    # A bug of ours: the client gets an answer, the log the traceback, and the server lives on.
    except Exception as error:
        logger.exception("%s %s failed", http.method, http.path)
        return error_answer(f"internal error: {type(error).__name__}: {error}", 500)


def error_answer(message: str, status: int) -> web.Response:
    return json_answer({"error": {"message": message}}, status)


def require_token(token: str | None) -> Callable:
    """Refuse whoever does not send the token. A server that has none lets nobody change it."""

    @web.middleware
    async def check(http: web.Request, handler: Handler) -> web.StreamResponse:
        if http.path in OPEN_PATHS:
            return await handler(http)
        if token is not None:
            sent = http.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(sent, f"Bearer {token}".encode()):
                return json_answer({"error": "Unauthorized"}, 401)
        elif http.path not in GENERATION_PATHS:
            return error_answer(
                f"{http.method} {http.path}: this server has no token and lets nobody change it; start it with "
                f"--token-file FILE, and name the file in the trainer's rollout.token_file",
                403,
            )
        return await handler(http)

    return check
