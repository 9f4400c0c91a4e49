"""The connections of the embedded server, kept so that nobody can shut the others out.

A connection is a stranger's until a whole request came on it that the guard let in. There may be so many strangers and
so many connections; whoever comes then takes the place of the oldest stranger of the peer that has most of them, or of
a client between two requests. A stranger has HEADERS_S to ask for something, and whoever does not read a response is
cut off. So the run's own clients, which ask at once and have the token, always get in.

asyncio's own accept loop tries a thousand times at once where the process has no file left, and logs each.
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
"""File descriptors that are left for everything but clients."""
MOST_CONNECTIONS = 16_384
MOST_STRANGERS = 512
HEADERS_S = 10.0
PROMPT_S = 1.0
"""Whoever came within it may only not have been heard yet."""
LOOK_EVERY_S = 1.0
FIRST_RESPONSE_S = 30.0
SLOWEST_BYTES_PER_S = 1024**2
"""A response has to be taken within FIRST_RESPONSE_S and what it takes at this rate."""
NO_FILE_LEFT_S = 0.2


@dataclass(eq=False)
class _Connection:
    peer: str
    transport: asyncio.Transport
    since_s: float
    """The time at which it was accepted, or last began or ended a request."""
    is_known: bool = False
    requests: int = 0
    """Under way: 1 or 0."""
    is_heard: bool = False
    """The request that is under way needs no body and is being answered."""
    response_until_s: float | None = None


class Connections:
    """Lives in the event loop's thread.

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
        """Accept connections for as long as it is not cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except ConnectionError:
                continue
            except OSError as error:  # no file or no memory is left
                logger.error("cannot accept a connection: %s", error)
                self._close_one(strangers_only=False)
                await asyncio.sleep(NO_FILE_LEFT_S)
                continue
            try:
                transport, _ = await loop.connect_accepted_socket(make, client)
            except OSError:  # it is gone again
                client.close()
                continue
            self._open[transport] = _Connection(str(address[0]), transport, time.monotonic())
            await self._keep_within_bounds()

    async def look_after(self) -> None:
        """Cut off who says nothing or reads nothing, for as long as it is not cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            for connection in self._living():
                pending = connection.transport.get_write_buffer_size()
                if not pending or connection.requests:  # a stream has a deadline for each piece
                    connection.response_until_s = None
                elif connection.response_until_s is None:
                    connection.response_until_s = now + FIRST_RESPONSE_S + pending / SLOWEST_BYTES_PER_S
                is_silent = not (connection.is_known or connection.requests) and now - connection.since_s > HEADERS_S
                if is_silent or now > (connection.response_until_s or now):
                    connection.transport.abort()

    @contextmanager
    def request(self, http: web.Request) -> Iterator[None]:
        """Within this block a request is under way on its connection."""
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
        """This client is no stranger any more."""
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
        """Close what is least of a loss; False where everyone is being answered."""
        # Of too many strangers a silent one goes first. Of too many in all one that is late and silent, and then a
        # client between two requests, which only has to connect again.
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
            # Of the peer that has most: one host cannot push out the others.
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
