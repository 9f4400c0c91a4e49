"""HTTP/1.1 connections to servers. A connection carries one request at a time and is kept for the next one.

A run sends thousands of small requests a second, for which a general HTTP client takes half of the rollout process's
CPU time. httptools parses the answers. Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from base64 import b64encode
from typing import Protocol, cast
from urllib.parse import unquote, urlsplit

import httptools

MAX_HEAD_BYTES = 64 * 1024
"""Maximum bytes of an answer's status line, headers and trailers."""
WITHOUT_BODY = (204, 304)
"""Statuses of answers that never have a body."""
SMALL_BYTES = 64 * 1024


class AnswerTooLong(Exception):
    """The body of an answer, or one event of a streamed answer, exceeds its limit."""


class Stream(Protocol):
    """Receiver of an answer's body, piece by piece, as it arrives."""

    rest: bytearray
    """Bytes of an event that has not arrived completely."""

    def take(self, piece: bytes) -> None:
        """Parse a piece. An exception ends the exchange, and `Exchange.wait` raises it."""


class Origin:
    """A server's base URL, the headers that this URL implies for every request, and the connections to the server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.is_secure = parts.scheme == "https"
        self.host, self.port = parts.hostname or "", parts.port or (443 if self.is_secure else 80)
        self.path = parts.path.rstrip("/")
        self.head = f"Host: {parts.netloc.rpartition('@')[2].encode('idna').decode()}\r\n"
        if parts.username is not None:
            words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self.head += f"Authorization: Basic {b64encode(words.encode()).decode()}\r\n"
        self.open: set[Connection] = set()
        self.idle: list[Connection] = []
        """Open connections without a request, the most recently used last."""
        self.connected_s = 0.0
        """Monotonic time at which the last new connection was made."""


class Exchange:
    """A request and the part of its answer that has arrived so far."""

    def __init__(self, at_most: int, stream: Stream | None = None) -> None:
        """Prepare an exchange, which `Connections.send` begins.

        at_most: maximum bytes of the body, or of each event if a stream receives it. stream: receives the body if the
        status is 200.
        """
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """{name in lower case: value} of the answer's headers."""
        self.pieces: list[bytes] = []
        """The body's bytes in the order of arrival; empty if a stream receives them."""
        self.error: Exception | None = None
        self.is_over = False
        self.connection: Connection | None = None
        self.is_reused = False
        """True if the connection has carried earlier exchanges. The server may then have been about to close it."""
        self._at_most, self._stream, self._size = at_most, stream, 0
        self._waiter: asyncio.Future[None] | None = None
        self._connecting: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Wait for the whole answer. Raises the error if the exchange fails.

        May be called again, also after a cancellation.
        """
        if not self.is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Close the connection unless the answer is complete, so that the server stops working on it."""
        if not self.is_over:
            self.fail(ConnectionAbortedError("the call was given up"))

    def fail(self, error: Exception) -> None:
        """Make `wait` raise `error` from now on. Close the connection unless the answer is complete."""
        self.error = self.error or error
        if not self.is_over:
            connection, connecting = self.connection, self._connecting
            self.finish()
            if connection is not None:
                connection.transport.abort()
            elif connecting is not None:
                connecting.cancel()

    def connect(self, connecting: asyncio.Task[None]) -> None:
        """Note the task that makes the connection. It is cancelled if the exchange fails before it is done."""
        self._connecting = connecting
        connecting.add_done_callback(self._connected)

    def _connected(self, connecting: asyncio.Task[None]) -> None:
        self._connecting = None
        if connecting.cancelled():
            self.fail(ConnectionAbortedError("the connection was given up"))
        elif (error := connecting.exception()) is not None:
            self.fail(error if isinstance(error, Exception) else ConnectionAbortedError(str(error)))

    def finish(self) -> None:
        self.is_over, self.connection = True, None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self, piece: bytes) -> None:
        """Store a piece of the body, or pass it to the stream. An exception of the stream ends the exchange."""
        try:
            if self._stream is not None and self.status == 200:
                self._stream.take(piece)
                if len(self._stream.rest) > self._at_most:
                    raise AnswerTooLong(f"an event of more than {self._at_most} bytes.")
                return
            self.pieces.append(piece)
            self._size += len(piece)
            if self._size > self._at_most:
                raise AnswerTooLong(f"answered more than {self._at_most:,} bytes.")
        except Exception as error:
            self.fail(error)


class Connection(asyncio.Protocol):
    """One connection to a server. Its methods on_... are called by the parser."""

    transport: asyncio.Transport

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.idle_since = 0.0
        """Monotonic time at which the last exchange ended; 0 before the first one has ended."""
        self._exchange: Exchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        """Number of bytes received since the last piece of a body."""
        self._ends_with_connection = self._is_spoilt = False

    def send(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        self._exchange, exchange.connection, exchange.is_reused = exchange, self, self.idle_since > 0
        self._head_bytes = 0
        # Do not copy a large body. Send a small one in the same system call as the head.
        self.transport.write(head + body) if len(body) < SMALL_BYTES else self.transport.writelines((head, body))

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._origin.open.add(self)

    def data_received(self, data: bytes) -> None:
        is_asked, fault = self._exchange is not None, ""
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            fault = f"no valid HTTP answer ({error})"
        if self._head_bytes > MAX_HEAD_BYTES:
            fault = f"headers of more than {MAX_HEAD_BYTES} bytes"
        if fault or self._is_spoilt or not is_asked:
            self.transport.abort()
        if fault and self._exchange is not None:
            self._exchange.fail(ConnectionError(fault))

    def connection_lost(self, error: Exception | None) -> None:
        self._origin.open.discard(self)
        if self in self._origin.idle:
            self._origin.idle.remove(self)
        if self._exchange is not None and not self._exchange.is_over:
            if error is None and self._ends_with_connection:
                self._exchange.finish()
            else:
                self._exchange.fail(error or ConnectionResetError("the server closed the connection"))

    # -- called by the parser

    def on_message_begin(self) -> None:
        if self._exchange is None:  # a second answer, right after the first one
            self._is_spoilt = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            self._exchange.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            status, headers = self._parser.get_status_code(), self._exchange.headers
            self._exchange.status = status
            is_framed = b"content-length" in headers or b"transfer-encoding" in headers
            self._ends_with_connection = not (is_framed or status < 200 or status in WITHOUT_BODY)

    def on_body(self, piece: bytes) -> None:
        self._head_bytes = 0
        if self._exchange is not None and not self._exchange.is_over:
            self._exchange.take(piece)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or exchange.status < 200:  # 100 Continue: the answer follows
            return
        self._exchange = None
        # Keep the connection unless the server closes it or has answered before it received the whole request.
        if self._parser.should_keep_alive() and not self.transport.get_write_buffer_size():
            self.idle_since = time.monotonic()
            self._origin.idle.append(self)
        else:
            self.transport.close()
        exchange.finish()


class Connections:
    """All connections of one client.

    connections = Connections({"Authorization": "Bearer ..."}, keepalive_s=2.0)
    exchange = Exchange(at_most=1000)
    connections.send(exchange, connections.origin("http://127.0.0.1:30000"), "GET", "/health")
    await exchange.wait()  # exchange.status, exchange.pieces
    connections.close()
    """

    def __init__(self, headers: dict[str, str], *, keepalive_s: float) -> None:
        """headers: {name: value} sent with every request. keepalive_s: seconds for which an idle connection is kept."""
        assert not any(mark in word for pair in headers.items() for word in pair for mark in "\r\n"), headers.keys()
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._keepalive_s = keepalive_s
        self._origins: dict[str, Origin] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._context: ssl.SSLContext | None = None
        self._is_closed = False

    def origin(self, url: str) -> Origin:
        """Return the Origin of a base URL. Calls with the same URL return the same object."""
        return self._origins.setdefault(url, Origin(url))

    def send(
        self, exchange: Exchange, origin: Origin, method: str, path: str, body: bytes = b"", content_type: str = ""
    ) -> None:
        """Send a request on an idle connection, or on a new one. Returns at once; `exchange.wait` raises the errors."""
        if self._is_closed:
            exchange.fail(ConnectionAbortedError("the client is closed"))
            return
        kind = f"Content-Type: {content_type}\r\n" if content_type else ""
        size = f"Content-Length: {len(body)}\r\n" if body or method != "GET" else ""
        head = f"{method} {origin.path}{path} HTTP/1.1\r\n{origin.head}{self._head}{kind}{size}\r\n".encode()
        oldest = time.monotonic() - self._keepalive_s
        while origin.idle:
            connection = origin.idle.pop()
            if connection.idle_since >= oldest and not connection.transport.is_closing():
                connection.send(exchange, head, body)
                return
            connection.transport.close()
        task = asyncio.get_running_loop().create_task(self._connect(exchange, origin, head, body))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        exchange.connect(task)

    async def _connect(self, exchange: Exchange, origin: Origin, head: bytes, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        if origin.is_secure and self._context is None:  # once, because it reads the certificates from the disk
            self._context = ssl.create_default_context()
        context = self._context if origin.is_secure else None
        _, connection = await loop.create_connection(lambda: Connection(origin), origin.host, origin.port, ssl=context)
        origin.connected_s = time.monotonic()
        if exchange.is_over:  # the exchange failed meanwhile
            connection.transport.close()
        else:
            connection.send(exchange, head, body)
        self._sweeping = self._sweeping or loop.call_later(self._keepalive_s, self._sweep)

    def _sweep(self) -> None:
        """Close connections that were idle for longer than keepalive_s.

        While connections exist, this runs once per keepalive_s.
        """
        oldest = time.monotonic() - self._keepalive_s
        for origin in self._origins.values():
            for connection in origin.idle:
                if connection.idle_since < oldest:
                    connection.transport.close()
        is_used = any(origin.open for origin in self._origins.values())
        again = asyncio.get_running_loop().call_later
        self._sweeping = again(self._keepalive_s, self._sweep) if is_used else None

    def close(self) -> None:
        """Close all connections. Exchanges on them fail, and later exchanges fail at once. May be called twice."""
        self._is_closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for task in self._connecting:
            task.cancel()
        for origin in self._origins.values():
            for connection in list(origin.open):
                connection.transport.abort()
