"""Reads request bodies, with limits on size, time, total memory and the cost of parsing.

A body is refused if its announced or actual size is too large, or if it arrives too slowly. If all bodies together need
too much memory, the largest of those still being read is dropped. JSON is parsed in separate threads, two bodies at a
time, so that the event loop stays responsive. A body with too many lists and objects is refused before parsing, because
Python's garbage collector would block all threads for seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from aiohttp import HttpVersion11, web
from aiohttp.web import RequestPayloadError

from megatron_rl.tools.embedded_server.connections import Connections

MAX_BODY_BYTES = 16 * 1024**2
"""Maximum size of a body that carries no weights. It is enough for dozens of prompts of the longest context."""
ALL_BODIES_BYTES = 512 * 1024**2
"""Maximum total size of all bodies that are being read or are in use."""
FIRST_S = 20.0
SLOWEST_BYTES_PER_S = 1024**2
"""Lowest accepted rate of a body: it must arrive within FIRST_S plus its size divided by this rate."""
MOST_CONTAINERS = 200_000
MOST_VALUES = 2_000_000
MOST_QUOTES = 1_000_000
"""Limits on the opening brackets (containers), commas (values) and quotes in a body.

These characters are counted before parsing, to estimate how many Python objects would be created.
"""

Result = TypeVar("Result")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class RequestFailed(Exception):
    """Exception that ends a request with this message and this HTTP status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class _Held:
    """A body that is being read or is still in use."""

    deadline: asyncio.Timeout
    size: int = 0
    is_whole: bool = False
    is_dropped: bool = False


class Bodies:
    """Reader of request bodies, one per application. Runs in the event loop's thread.

    For example:

        call = await http.app[BODIES].json(http, lambda body: parse_generate(body, limits, text))
        async with http.app[BODIES].raw(http, most=2**27) as content:
            ...
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._held: set[_Held] = set()
        self._readers, self._slow = ThreadPoolExecutor(2, "json"), ThreadPoolExecutor(1, "text")

    async def json(
        self, http: web.Request, use: Callable[[Any], Result], *, is_slow: Callable[[Any], bool] = lambda _: False
    ) -> Result:
        """Parse the body and return `use(body)`; both run in a worker thread.

        ValueError if the body is not JSON, or if `use` raises it. is_slow: function of the parsed body that returns
        True if `use` may take seconds, for example to tokenize text. Slow bodies are processed one at a time in another
        thread, so that they do not delay others.
        """

        def read() -> tuple[bool, Any]:
            body = parse(raw)
            return (True, None) if is_slow(body) else (False, use(body))

        loop = asyncio.get_running_loop()
        async with self.raw(http) as raw:
            must_wait, result = await loop.run_in_executor(self._readers, read)
            if must_wait:  # parse again later: a waiting body then holds no parsed objects
                result = await loop.run_in_executor(self._slow, lambda: use(parse(raw)))
            return result

    async def object(self, http: web.Request) -> dict[str, Any]:
        """Return the body's JSON object; an empty dict if there is no body."""
        async with self.raw(http) as raw:
            body = await asyncio.get_running_loop().run_in_executor(self._readers, parse, raw or b"{}")
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        return body

    @asynccontextmanager
    async def raw(self, http: web.Request, most: int = MAX_BODY_BYTES) -> AsyncIterator[bytes]:
        """Read a body of at most `most` bytes. It counts towards ALL_BODIES_BYTES until the `async with` block ends.

        RequestFailed if the body is too large, too slow or dropped. ValueError if it is cut off.
        """
        too_large = f"{http.method} {http.path}: the body must have at most {most:,} bytes; send several requests"
        announced = http.content_length
        if announced is not None and announced > most:
            raise RequestFailed(too_large, 413)
        if http.version >= HttpVersion11 and http.headers.get("Expect", "").lower() == "100-continue":
            await http.writer.write(CONTINUE)
            http.writer.output_size = 0  # aiohttp must not take these bytes for a started response
        pieces, allowed_s = [], FIRST_S + (most if announced is None else announced) / SLOWEST_BYTES_PER_S
        held = _Held(asyncio.timeout(allowed_s))
        self._held.add(held)
        try:
            async with held.deadline:
                while piece := await http.content.readany():
                    pieces.append(piece)
                    held.size += len(piece)
                    if held.size > most:
                        raise RequestFailed(too_large, 413)
                    self._make_room()
                held.is_whole = True
            self._connections.welcome(http)
            yield b"".join(pieces)
        except TimeoutError:
            if held.is_whole:
                raise
            if held.is_dropped:
                raise RequestFailed("too many large bodies are under way; send it again later", 503) from None
            raise RequestFailed(f"the body did not come within {allowed_s:.0f} s", 408) from None
        except RequestPayloadError as error:
            raise ValueError(f"the body broke off or is not what its headers say: {error}") from None
        finally:
            self._held.discard(held)

    def _make_room(self) -> None:
        if sum(held.size for held in self._held) > ALL_BODIES_BYTES:
            largest = max((held for held in self._held if not held.is_whole), key=lambda held: held.size)
            largest.is_dropped, largest.size = True, 0
            largest.deadline.reschedule(0)  # times out in its own coroutine, which reports the reason


BODIES = web.AppKey("bodies", Bodies)


def parse(raw: bytes) -> Any:
    containers, values, quotes = raw.count(b"[") + raw.count(b"{"), raw.count(b","), raw.count(b'"')
    if containers > MOST_CONTAINERS or values > MOST_VALUES or quotes > MOST_QUOTES:
        raise ValueError(
            f"the body has {containers:,} opening brackets, {values:,} commas and {quotes:,} quotes; it must have at "
            f"most {MOST_CONTAINERS:,}, {MOST_VALUES:,} and {MOST_QUOTES:,}: send several requests"
        )
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {str(error)[:200]}") from None
