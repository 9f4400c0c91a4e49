"""Access control of the embedded server. It decides from a request's headers, before the body is read.

If the server has a token, clients must send it, except for OPEN_PATHS. Only a server on a loopback address may have no
token. Without a token, any process on the host may generate, but none may change the server. Requests from web pages
are then refused. They are recognized by the Origin header, which names the page, or after DNS rebinding by the Host
header, which names the page's host.
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
from megatron_rl.tools.embedded_server.listening import is_loopback
from megatron_rl.tools.embedded_server.responses import Handler, error_response, json_response

logger = logging.getLogger(__name__)

WINDOW_S = 60.0
MOST_IN_WINDOW = 20
MOST_KINDS = 256
"""Maximum number of different messages that LogRate counts. Each may pass MOST_IN_WINDOW times per WINDOW_S seconds."""
OPEN_PATHS = ("/health", "/health_generate", "/ready", "/metrics")
"""Paths that need no token."""
GENERATION_PATHS = (
    *("/generate", "/v1/chat/completions", "/v1/loads", "/v1/models"),
    *("/model_info", "/get_model_info", "/server_info", "/get_server_info"),
)
"""Paths that a server without a token allows in addition to OPEN_PATHS.

All other paths change the server or reveal its weights.
"""


def guard(token: str | None, host: str, connections: Connections) -> Callable:
    """Return the middleware that refuses forbidden requests and turns handlers' exceptions into responses."""

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
                    # A token makes a client known. Without tokens a complete request does. `Bodies`
                    # calls `welcome` for a request with a body.
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
            # A bug in the server: respond, log the traceback and keep running.
            except Exception as error:
                logger.exception("%s %s failed", http.method, http.path[:200])
                response = error_response(f"internal error: {type(error).__name__}: {str(error)[:500]}", 500)
            if not http.content.at_eof() and not response.prepared:
                response.force_close()  # the rest of the body is never read
            return response

    return check


async def invite_later(_: web.Request) -> None:
    """Send no `100 Continue` yet. `Bodies.raw` sends it, after the guard has accepted the request."""


def _refusal(http: web.Request, token: str | None) -> web.Response | None:
    if token is not None:
        # Compare in constant time, or an attacker could measure how many characters are right.
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
    """Refuse requests that a browser may have sent for a foreign web page."""
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
        name, _ = (parts.hostname or "").rstrip("."), parts.port  # ValueError if the port is not a number
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
    """Log filter that limits how often messages of the same wording pass, and reports how many were dropped.

    For example:

        handler.addFilter(LogRate())
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """Maps (logger, wording) to (start of its time window, number of messages in the window)."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, str(record.msg)[:200]), time.monotonic()
        if len(self._kinds) >= MOST_KINDS and kind not in self._kinds:
            self._kinds.clear()  # bounds the memory, at the cost of a few extra lines
        since, count = self._kinds.get(kind, (now, 0))
        if now - since > WINDOW_S:
            left_out = count - MOST_IN_WINDOW
            if left_out > 0:
                record.msg = f"{record.msg} ({left_out} more of these were left out)"
            since, count = now, 0
        self._kinds[kind] = (since, count + 1)
        return count < MOST_IN_WINDOW
