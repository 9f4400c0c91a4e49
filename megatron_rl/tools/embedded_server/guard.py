"""The guard of the embedded server: judges by the head of a request who may ask for what, before its body is read.

With a token, clients must send it, but for OPEN_PATHS. Without one, which only a server on this host's own address may
be, everybody on the host may generate and nobody may change anything; a web page may not even ask: what a browser sends
for one has another page's Origin or, where that page's name was made to lead here, another Host.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web

from megatron_rl.tools.embedded_server.batcher import Stopped
from megatron_rl.tools.embedded_server.bodies import RequestFailed
from megatron_rl.tools.embedded_server.connections import Connections
from megatron_rl.tools.embedded_server.fields import shown
from megatron_rl.tools.embedded_server.responses import Handler, error_response, json_response
from megatron_rl.tools.embedded_server.run_arguments import is_loopback

logger = logging.getLogger(__name__)

WINDOW_S = 60.0
MOST_IN_WINDOW = 20
MOST_KINDS = 256
"""Of log lines: how many of one wording pass in a window, and how many wordings are told apart."""
OPEN_PATHS = ("/health", "/health_generate", "/ready", "/metrics")
"""Open to everyone."""
GENERATION_PATHS = (
    *("/generate", "/v1/chat/completions", "/v1/loads", "/v1/models"),
    *("/model_info", "/get_model_info", "/server_info", "/get_server_info"),
)
"""Open too where a server has no token; whatever is left changes the server or shows its weights."""


def guard(token: str | None, host: str, connections: Connections) -> Callable:
    """Refuse what may not be asked, and turn what handlers raise into responses."""

    @web.middleware
    async def check(http: web.Request, handler: Handler) -> web.StreamResponse:
        with connections.request(http):
            try:
                if token is None:
                    _refuse_pages(http, host)
                if http.path not in OPEN_PATHS and (refusal := _refusal(http, token)) is not None:
                    response: web.StreamResponse = refusal
                else:
                    _refuse_head(http, token)
                    # Known by its token; without one by a whole request, which `Bodies` sees where there is a body.
                    is_known = not http.can_read_body if token is None else http.path not in OPEN_PATHS
                    if is_known:
                        connections.welcome(http)
                    response = await handler(http)
            except ValueError as error:
                response = error_response(str(error), 400)
            except RecursionError:
                response = error_response("the body is nested too deeply", 400)
            except RequestFailed as error:
                response = error_response(str(error), error.status)
            except Stopped as error:
                response = error_response(str(error), 503)
            except web.HTTPException as error:
                response = error_response(f"{http.method} {http.path[:200]}: {error.reason}", error.status)
                if "Allow" in error.headers:
                    response.headers["Allow"] = error.headers["Allow"]
            # A bug of ours: the client gets a response, the log the traceback, and the server lives on.
            except Exception as error:
                logger.exception("%s %s failed", http.method, http.path[:200])
                response = error_response(f"internal error: {type(error).__name__}: {str(error)[:500]}", 500)
            if not http.content.at_eof() and not response.prepared:
                response.force_close()  # nobody will read the rest
            return response

    return check


async def invite_later(_: web.Request) -> None:
    """Answer `Expect: 100-continue` when the body is read, and not before the guard has looked at the request."""


def _refusal(http: web.Request, token: str | None) -> web.Response | None:
    if token is not None:
        # In constant time, or a guesser could measure how many letters are right.
        sent = http.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(sent, f"Bearer {token}".encode()):
            return json_response({"error": "Unauthorized"}, 401)
    elif http.match_info.http_exception is None and http.path not in GENERATION_PATHS:
        return error_response(
            f"{http.method} {http.path}: this server has no token and lets nobody change it; start it with "
            f"--token-file FILE, and name the file in the trainer's rollout.token_file",
            403,
        )
    return None


def _refuse_head(http: web.Request, token: str | None) -> None:
    if http.match_info.http_exception is not None:
        raise http.match_info.http_exception
    if "Content-Encoding" in http.headers:
        raise RequestFailed(
            f"Content-Encoding = {shown(http.headers['Content-Encoding'])}: send the body as it is, without one", 415
        )
    if not http.can_read_body:
        return
    if http.path in OPEN_PATHS:
        raise RequestFailed(f"{http.method} {http.path}: takes no body", 413)
    kind = http.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if token is None and kind != "application/json":
        raise RequestFailed(f"Content-Type = {shown(kind)}: a server without a token takes application/json only", 415)


def _refuse_pages(http: web.Request, host: str) -> None:
    """Refuse what a browser may have sent for a page of somebody else."""
    hosts = http.headers.getall("Host", [])
    if len(hosts) != 1 or not _leads_here(f"//{hosts[0]}", host):
        raise RequestFailed(
            f"Host = {shown(', '.join(hosts))}: a server without a token answers to its own address only, such as "
            f"{host}; use that, or start it with --token-file FILE",
            403,
        )
    for origin in http.headers.getall("Origin", []):
        if origin.partition("://")[2].lower() != hosts[0].lower():
            raise RequestFailed(f"Origin = {shown(origin)}: a server without a token serves no web page", 403)
    if http.headers.get("Sec-Fetch-Site", "none").lower() not in ("none", "same-origin"):
        raise RequestFailed("Sec-Fetch-Site: a server without a token serves no web page", 403)


def _leads_here(url: str, host: str) -> bool:
    try:
        parts = urlsplit(url)
        name, _ = (parts.hostname or "").rstrip("."), parts.port  # ValueError where it is no number
    except ValueError:
        return False
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return False
    return name == host.lower() or is_loopback(name) or _is_mapped_loopback(name)


def _is_mapped_loopback(name: str) -> bool:
    try:
        mapped = ipaddress.IPv6Address(name).ipv4_mapped
    except ValueError:
        return False
    return mapped is not None and mapped.is_loopback


class LogRate(logging.Filter):
    """Lets a message of one wording through so many times a minute, and says how often it was left out after that.

    handler.addFilter(LogRate())
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """(logger, wording) -> when its window began, and how many came in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, str(record.msg)[:200]), time.monotonic()
        if len(self._kinds) >= MOST_KINDS and kind not in self._kinds:
            self._kinds.clear()  # some lines more than allowed, but no memory without end
        since, count = self._kinds.get(kind, (now, 0))
        if now - since > WINDOW_S:
            left_out = count - MOST_IN_WINDOW
            if left_out > 0:
                record.msg = f"{record.msg} ({left_out} more of these were left out)"
            since, count = now, 0
        self._kinds[kind] = (since, count + 1)
        return count < MOST_IN_WINDOW
