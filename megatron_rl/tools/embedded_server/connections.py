"""The connections of the embedded server, limited so that no client can lock out the others.

A connection is a stranger until the guard has accepted a complete request on it. The number of strangers is limited,
and so is the number of all connections. Above a limit, a new connection replaces the oldest stranger from the host with
the most strangers, or an idle known client. A stranger must send a request within HEADERS_S. A client that does not
read its response is disconnected. The run's own clients have the token and send at once, so they always get in.

asyncio's own accept loop is not used. Without a free file descriptor, it would retry a thousand times at once and log
each failure.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from megatron_rl.launch import open_files

logger = logging.getLogger(__name__)

OTHER_FILES = 160
"""File descriptors reserved for everything except client connections."""
MOST_CONNECTIONS = 16_384
MOST_STRANGERS = 512
HEADERS_S = 10.0
PROMPT_S = 1.0
"""Seconds after connecting during which a stranger is closed only if there are too many strangers.

A stranger's first request may have arrived, but not been read yet.
"""
LOOK_EVERY_S = 1.0
FIRST_RESPONSE_S = 30.0
SLOWEST_BYTES_PER_S = 1024**2
"""A client must read a response within FIRST_RESPONSE_S plus the unread size divided by this rate."""
NO_FILE_LEFT_S = 0.2


@dataclass(eq=False)
class _Connection:
    peer: str
    transport: asyncio.Transport
    since_s: float
    """Time of the latest event: the connection was accepted, or a request on it started or finished."""
    is_known: bool = False
    requests: int = 0
    """Requests in progress: 0 or 1."""
    is_heard: bool = False
    """True while a request without a body is being answered. The server then waits for nothing more from the client."""
    response_until_s: float | None = None


class Connections:
    """All open connections. Use this object only in the event loop's thread.

    For example:

        connections = Connections()
        tasks = [asyncio.create_task(connections.accept(listener, runner.server))]
        tasks.append(asyncio.create_task(connections.look_after()))
        with connections.request(http):  # in the guard
            connections.welcome(http)
    """

    def __init__(self) -> None:
        self.most = min(MOST_CONNECTIONS, max(32, open_files.raise_limit() - OTHER_FILES))
        self.most_strangers = min(MOST_STRANGERS, max(16, self.most // 2))
        self._open: dict[asyncio.BaseTransport, _Connection] = {}

    async def accept(self, listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except ConnectionError:
                continue
            except OSError as error:  # out of file descriptors or memory
                logger.error("cannot accept a connection: %s", error)
                self._close_one(strangers_only=False)
                await asyncio.sleep(NO_FILE_LEFT_S)
                continue
            try:
                transport, _ = await loop.connect_accepted_socket(make, client)
            except OSError:  # the client has already disconnected
                client.close()
                continue
            self._open[transport] = _Connection(str(address[0]), transport, time.monotonic())
            await self._keep_within_bounds()

    async def look_after(self) -> None:
        """Close connections that send no request or do not read their response, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            for connection in self._living():
                pending = connection.transport.get_write_buffer_size()
                if not pending or connection.requests:  # a stream has a timeout per chunk
                    connection.response_until_s = None
                elif connection.response_until_s is None:
                    connection.response_until_s = now + FIRST_RESPONSE_S + pending / SLOWEST_BYTES_PER_S
                is_silent = not (connection.is_known or connection.requests) and now - connection.since_s > HEADERS_S
                if is_silent or now > (connection.response_until_s or now):
                    connection.transport.abort()

    @contextmanager
    def request(self, http: web.Request) -> Iterator[None]:
        """Mark the connection as handling a request inside the `with` block."""
        connection = self._open.get(http.transport) if http.transport is not None else None
        if connection is None:
            yield
            return
        connection.requests, connection.since_s = 1, time.monotonic()
        connection.is_heard = not http.can_read_body
        try:
            yield
        finally:
            connection.requests, connection.since_s, connection.is_heard = 0, time.monotonic(), False

    def welcome(self, http: web.Request) -> None:
        """Mark the request's connection as known, that is, no longer a stranger."""
        if http.transport in self._open:
            self._open[http.transport].is_known = True

    async def _keep_within_bounds(self) -> None:
        while len(self._open) > self.most_strangers:  # below that, neither bound is reached
            living = self._living()
            strangers = sum(not connection.is_known for connection in living)
            if strangers <= self.most_strangers and len(living) <= self.most:
                return
            if not self._close_one(strangers_only=len(living) <= self.most):
                await asyncio.sleep(LOOK_EVERY_S)  # all are busy: the next ones wait in the kernel's queue

    def _living(self) -> list[_Connection]:
        for transport in [transport for transport in self._open if transport.is_closing()]:
            del self._open[transport]
        return list(self._open.values())

    def _close_one(self, *, strangers_only: bool) -> bool:
        """Close the most expendable connection. Return False if no connection may be closed."""
        # If there are too many strangers, close a silent one first. If there are too many connections, close a late and
        # silent stranger, or else an idle known client, which can simply reconnect.
        living, now = self._living(), time.monotonic()
        strangers = [connection for connection in living if not connection.is_known]
        silent = [connection for connection in strangers if not connection.is_heard]
        late = [connection for connection in strangers if now - connection.since_s > PROMPT_S]
        late_and_silent = [connection for connection in late if not connection.is_heard]
        idle = [
            connection
            for connection in living
            if connection.is_known and not connection.requests and not connection.transport.get_write_buffer_size()
        ]
        for candidates in (silent, strangers) if strangers_only else (late_and_silent, idle, late):
            # Choose from the peer with most candidates, so that one host cannot displace the others.
            if candidates:
                crowd = Counter(connection.peer for connection in candidates)
                most = max(crowd.values())
                chosen = min(
                    (connection for connection in candidates if crowd[connection.peer] == most),
                    key=lambda connection: connection.since_s,
                )
                chosen.transport.abort()
                return True
        return False
