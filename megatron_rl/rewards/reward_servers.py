"""HTTP client for the servers that rewards query, with retries on other servers and a circuit breaker per server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson

from megatron_rl.api import InfrastructureFailure
from megatron_rl.launch.run_token import token_in

T = TypeVar("T")

ATTEMPTS = 4
FIRST_RETRY_S = 0.1
FAILURES_TO_OPEN = 3
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
CONNECT_S = 5.0
MOST_ANSWER_BYTES = 16 << 20
REFUSALS = (400, 413, 422)
"""HTTP status codes with which a server says that the request is at fault."""


class RemoteFailure(InfrastructureFailure):
    """A server did not return a valid answer."""

    KIND = "service"


class RemoteRefusal(RemoteFailure):
    """A server rejected this request, so every other server would reject it too."""


@dataclass
class Circuit:
    """Circuit breaker of one server.

    After several failures in a row, the server gets no requests for a pause. After the pause, the server gets one
    request at a time until one succeeds.
    """

    url: str
    in_flight: int = 0
    failures: int = 0
    rests_until: float = 0.0

    def is_open(self) -> bool:
        return self.failures >= FAILURES_TO_OPEN and (self.rests() or self.in_flight > 0)

    def rests(self) -> bool:
        return time.monotonic() < self.rests_until

    def succeed(self) -> None:
        self.failures, self.rests_until = 0, 0.0

    def fail(self) -> None:
        if self.failures >= FAILURES_TO_OPEN and self.rests():  # a request sent before the pause
            return
        self.failures += 1
        rest_s = FIRST_REST_S * 2 ** max(0, self.failures - FAILURES_TO_OPEN)
        self.rests_until = time.monotonic() + min(LONGEST_REST_S, rest_s)


class Servers:
    """Client for interchangeable servers. Use and `close` it in one event loop.

    servers = Servers(["http://a:8000/score", "http://b:8000/score"], concurrent=4, timeout_s=30)
    scores = await servers.ask({"items": items}, lambda answer: answer["scores"])
    """

    def __init__(self, urls: Sequence[str], *, concurrent: int, timeout_s: float, token_file: str = "") -> None:
        """concurrent: maximum number of simultaneous requests per server. timeout_s: time limit of one request.

        token_file: file with the servers' bearer token.
        """
        if not urls:
            raise ValueError("args.urls = []: no server to ask; give at least one URL.")
        self._circuits = [Circuit(url) for url in urls]
        self._concurrent, self._token_file = concurrent, token_file
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._has_room = asyncio.Event()

    async def ask(
        self, body: dict[str, Any], read: Callable[[Any], T], is_wanted: Callable[[], bool] = lambda: True
    ) -> T:
        """Post `body` to a server and return `read(its JSON answer)`. Make at most ATTEMPTS attempts.

        If all attempts fail, RemoteFailure says why the last one did. `read` must raise ValueError, TypeError, KeyError
        or IndexError for an invalid answer. A request that waits for a server is dropped once `is_wanted` returns
        False. Otherwise unwanted requests would accumulate while all circuits are open, and would delay the requests
        that are still wanted.
        """
        for attempt in range(1, ATTEMPTS + 1):
            circuit = await self._choose(is_wanted)
            # No await since it was chosen, so no other task has taken the same slot.
            circuit.in_flight += 1
            try:
                found = await self._post(circuit.url, body, read)
                circuit.succeed()
                return found
            except RemoteRefusal:
                circuit.succeed()
                raise
            except RemoteFailure:
                circuit.fail()
                if attempt == ATTEMPTS:
                    raise
            finally:
                circuit.in_flight -= 1
                self._has_room.set()
            await asyncio.sleep(FIRST_RETRY_S * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    async def reach(self, patience_s: float) -> None:
        """Wait until a server accepts a connection.

        RemoteFailure names the first server if none does within `patience_s`. The check only connects. A request might
        cost money, and the answer to a made-up request would prove nothing.
        """
        deadline = time.monotonic() + patience_s
        while faults := [fault for circuit in self._circuits if (fault := await unreachable(circuit.url))]:
            if len(faults) < len(self._circuits):
                return
            if time.monotonic() >= deadline:
                raise RemoteFailure(f"{faults[0]}; start the server, or correct its URL.")
            await asyncio.sleep(FIRST_RETRY_S)

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _choose(self, is_wanted: Callable[[], bool]) -> Circuit:
        """Return the usable server with the fewest requests. While all are busy or pausing, wait for one."""
        while is_wanted():
            free = [it for it in self._circuits if it.in_flight < self._concurrent and not it.is_open()]
            if free:
                return min(free, key=lambda it: (it.in_flight, it.failures))
            # One event for all waiters: another may clear it before this one wakes, which then looks again after the
            # timeout.
            self._has_room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_RETRY_S):  # nothing signals the end of a pause
                    await self._has_room.wait()
        raise RemoteFailure("nobody waits for the answer any more.")

    async def _post(self, url: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        content = orjson.dumps(body, default=str)
        try:
            async with self._opened().post(url, data=content, headers={"Content-Type": "application/json"}) as answer:
                status, said = answer.status, bytearray()
                async for part in answer.content.iter_any():
                    said += part
                    if len(said) > MOST_ANSWER_BYTES:
                        raise RemoteFailure(f"{answer.url}: gave more than {MOST_ANSWER_BYTES} bytes.")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RemoteFailure(f"{url}: {type(error).__name__}: {error}; is the server up?") from error
        if status != 200:
            failure = RemoteRefusal if status in REFUSALS else RemoteFailure
            raise failure(f"{url}: status {status}: {said[:300].decode('utf-8', 'replace')}")
        try:
            return read(orjson.loads(said))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise RemoteFailure(f"{url}: gave no answer that can be read ({type(error).__name__}: {error}).") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            token = token_in(self._token_file, key="args.token_file") if self._token_file else ""
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=0),  # the circuits bound the requests
                headers={"Authorization": f"Bearer {token}"} if token else None,
            )
        return self._session


async def unreachable(url: str) -> str:
    """Return why nothing accepts a connection at a URL; empty if something does."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname or "", port)
        writer.close()
    except TimeoutError:
        return f"{url}: takes no connection within {CONNECT_S:g} s"
    except (OSError, ValueError) as error:
        return f"{url}: {error}"
    return ""
