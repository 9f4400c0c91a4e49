"""HTTP calls to one server in SGLang's protocol. Each ends in an answer or in a specific error.

ServerError means that a retry may succeed. RequestRefused means that the server will always refuse. Both name the URL,
the endpoint and the server's message. If this process has no free file descriptors, or if the server is busy, the call
waits.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from megatron_rl.api import InfrastructureFailure, RequestRefused
from megatron_rl.servers.http_connections import AnswerTooLong, Connections, Exchange
from megatron_rl.servers.reply_check import shown
from megatron_rl.telemetry.spans import Spans

logger = logging.getLogger(__name__)
T = TypeVar("T")

JSON = "application/json"
MAX_ANSWER_BYTES = 256 * 1024**2
"""Maximum bytes of an answer. Even the longest answers, which are lists of checksums, are shorter."""
MAX_MESSAGE = 1000
"""Maximum number of characters of a server's message that an error shows."""
BUSY = (408, 425, 429)
"""Statuses of a server or router that is temporarily overloaded."""
FIRST_BUSY_S, LONGEST_BUSY_S = 0.1, 30.0
"""Bounds, in seconds, of the wait before a busy server is asked again. Retry-After is clamped to them."""
NO_FILES = (errno.EMFILE, errno.ENFILE)
FILES_WAIT_S = 0.2
FILES_WARNING_EVERY_S = 60.0


class ServerError(InfrastructureFailure):
    """The server is down, overloaded or sent an invalid answer. A retry may succeed."""

    KIND = "server"


class BadReply(ServerError):
    """The server's answer is invalid. The message names the field and the rule."""


class UnknownLogprob(BadReply):
    """A reply lacks the log-probability of a token. Healthy servers send this if the policy is nearly certain."""


class Busy(ServerError):
    """The server is healthy and asks the client to retry in `wait_s` seconds."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class OutOfFiles(Busy):
    """This process cannot open a connection, because it has no free file descriptors. The request was not sent."""


class Dropped(ServerError):
    """The client stopped using the server while it worked on the request. Membership logs the reason."""


class CommandRefused(ServerError):
    """The server is healthy and refused a control call."""


class NotFound(RequestRefused):
    """The server has no such endpoint."""


class ServerHttp:
    """HTTP client for the server at `url`. Its coroutines must run on the event loop to which `connections` belongs."""

    def __init__(self, url: str, connections: Connections, spans: Spans) -> None:
        self.url, self.spans = url.rstrip("/"), spans
        self.connections, self.origin = connections, connections.origin(self.url)
        self._warned_of_files_s = -FILES_WARNING_EVERY_S

    @property
    def connected_s(self) -> float:
        """Monotonic time at which the last new connection was made.

        The server may have been restarted just before that.
        """
        return self.origin.connected_s

    async def call(
        self,
        method: str,
        endpoint: str,
        body: dict[str, Any] | bytes | None = None,
        *,
        timeout_s: float | None,
    ) -> bytes:
        """Send a request and return the body of the answer. Raises ServerError or RequestRefused if there is none.

        Only the body of an answer with a status below 300 is returned.
        A busy server is asked again until `timeout_s` seconds have passed. If `timeout_s` is None, Busy is raised at
        once.
        """
        deadline, busy = None if timeout_s is None else time.monotonic() + timeout_s, 0
        while True:
            try:
                return b"".join(await self.call_once(method, endpoint, body, timeout_s=timeout_s))
            except OutOfFiles as error:  # retried without a deadline
                await asyncio.sleep(error.wait_s)
            except Busy as error:
                if deadline is None or time.monotonic() + error.wait_s > deadline:
                    raise
                await asyncio.sleep(max(error.wait_s, backoff(busy)))
                busy += 1

    async def call_once(
        self, method: str, endpoint: str, body: dict[str, Any] | bytes | None, *, timeout_s: float | None
    ) -> list[bytes]:
        """Send a request once, and return the answer's body in pieces. Raises like `call`, but Busy at once."""
        if isinstance(body, dict):
            data, content_type = orjson.dumps(body), JSON
        else:
            data, content_type = body or b"", "application/octet-stream" if body else ""
        while True:
            exchange = Exchange(MAX_ANSWER_BYTES)
            self.connections.send(exchange, self.origin, method, endpoint, data, content_type)
            try:
                async with asyncio.timeout(timeout_s):
                    return await self.answer(exchange, endpoint)
            except TimeoutError as error:
                raise ServerError(f"{self.url}{endpoint}: no answer within {timeout_s:g} s.") from error
            except ServerError:
                # The server may have closed a connection that was not in use. A GET changes nothing there.
                is_closed = isinstance(exchange.error, ConnectionResetError | BrokenPipeError)
                if method != "GET" or not exchange.is_reused or not is_closed:
                    raise
            finally:
                exchange.close()

    async def answer(self, exchange: Exchange, endpoint: str) -> list[bytes]:
        """Wait for the answer, and return its body in pieces. Raises like `call_once`.

        The result is empty if a stream receives the body.
        """
        try:
            await exchange.wait()
        except AnswerTooLong as error:
            raise BadReply(f"{self.url}{endpoint}: {error}") from error
        except OSError as error:
            if error.errno in NO_FILES:
                self._warn_of_files(error)
                raise OutOfFiles(str(error), FILES_WAIT_S) from error
            raise ServerError(f"{self.url}{endpoint}: {type(error).__name__}: {error}; is the server up?") from error
        status = exchange.status
        if status < 300:
            return exchange.pieces
        content = b"".join(exchange.pieces)
        if status in BUSY:  # before the other 4xx, as this is no refusal
            wait_s = seconds_of(exchange.headers.get(b"retry-after", b"").decode(errors="replace"))
            raise Busy(f"{self.url}{endpoint}: HTTP {status}: {message_of(content)}", wait_s)
        if status >= 500 or status < 400:
            # A redirect is an error, too: nothing was done, and following it would lead to an unknown server.
            raise ServerError(f"{self.url}{endpoint}: HTTP {status}: {message_of(content)}")
        kind = NotFound if status == 404 else RequestRefused
        hint = "; the server's token must be that in rollout.token_file" if status == 401 else ""
        raise kind(f"{self.url}{endpoint}: HTTP {status}: {message_of(content)}{hint}", status)

    def _warn_of_files(self, error: OSError) -> None:
        if time.monotonic() - self._warned_of_files_s >= FILES_WARNING_EVERY_S:
            self._warned_of_files_s = time.monotonic()
            logger.warning(
                "%s: requests to %s wait until files are closed. Raise the limit (ulimit -Hn), or lower "
                "rollout.max_concurrent_episodes.",
                *(error, self.url),
            )

    async def call_json(
        self, method: str, endpoint: str, body: dict[str, Any] | None = None, *, timeout_s: float | None
    ) -> dict[str, Any]:
        content = await self.call(method, endpoint, body, timeout_s=timeout_s)
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise ServerError(f"{self.url}{endpoint}: answered {content[:80]!r}, which is not JSON.") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}{endpoint}: answered {content[:80]!r}; a JSON object was expected.")
        return answer

    async def command(self, endpoint: str, body: dict[str, Any] | bytes, *, timeout_s: float) -> None:
        """Send a control request by POST.

        Raises CommandRefused if the server refuses it: by the status, or by `success: false` in the answer.
        """
        try:
            with self.spans("control", endpoint, place=self.url):
                content = await self.call("POST", endpoint, body, timeout_s=timeout_s)
        except RequestRefused as refusal:  # it has no user input, so no prompt is at fault
            raise CommandRefused(str(refusal)) from refusal
        try:
            answer = orjson.loads(content) if content else {}
        except orjson.JSONDecodeError:
            return  # some control endpoints answer with plain text
        if isinstance(answer, dict) and not answer.get("success", True):
            raise CommandRefused(f"{self.url}{endpoint}: refused: {message_of(content)}")

    def checked(self, endpoint: str, read: Callable[[], T]) -> T:
        """Return the result of `read`, which parses an answer of `endpoint`. If it fails, raise ServerError instead."""
        try:
            return read()
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{self.url}{endpoint}: the answer cannot be used: {error}") from error


def backoff(attempt: int) -> float:
    """Return the seconds to wait after failed attempt `attempt` (from 0).

    They double up to LONGEST_BUSY_S, and are partly random, so that clients do not all retry at the same time.
    """
    # The exponent is bounded, because a server may be busy for days and 2.0^1024 overflows.
    return min(LONGEST_BUSY_S, FIRST_BUSY_S * 2.0 ** min(attempt, 16)) * random.uniform(0.5, 1.0)


def seconds_of(retry_after: str) -> float:
    """Return the seconds that a Retry-After header requests, clamped to FIRST_BUSY_S and LONGEST_BUSY_S."""
    if re.fullmatch(r"[0-9]{1,9}", retry_after):
        seconds = float(retry_after)
    else:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            seconds = 0.0
    return min(LONGEST_BUSY_S, max(FIRST_BUSY_S, seconds))


def message_of(content: bytes) -> str:
    """Return the error message in the body of an answer, which has one of SGLang's formats."""
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content[:300].decode(errors="replace").strip() or "(empty answer)"
    error = answer.get("error", answer.get("message", answer)) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        error = error.get("message", error)
    return (error if isinstance(error, str) else shown(error))[:MAX_MESSAGE]
