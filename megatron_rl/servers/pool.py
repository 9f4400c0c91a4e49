"""The servers of one client, commanded together: pause, resume, whatever a publication needs. Coroutines of one loop.

A server that fails a command is dropped and the others go on. After an update that did not reach every server that
takes part, none of them gets requests until a later one is whole. One that comes back between publications is brought
to the current weights, where this client has published them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp

from megatron_rl.api import HeldWeights, NoServerLeft, RequestRefused
from megatron_rl.config import RolloutConfig
from megatron_rl.launch.run_token import token_in
from megatron_rl.launch.server_registry import registered_urls
from megatron_rl.routes import RouteForm
from megatron_rl.servers.catch_up import Current, catch_up, source_for
from megatron_rl.servers.client import ServerClient
from megatron_rl.servers.membership import Membership
from megatron_rl.servers.reply_check import Asked, ReplyPart, newest_of
from megatron_rl.servers.router import Router
from megatron_rl.servers.server_http import (
    BadReply,
    Busy,
    CommandRefused,
    ServerError,
    UnknownLogprob,
    noting_connections,
)
from megatron_rl.servers.server_memory import ServerMemory
from megatron_rl.telemetry.spans import Spans

logger = logging.getLogger(__name__)

KEEPALIVE_S = 2.0
"""Shorter than uvicorn's 5 s: a connection that the server is just closing would lose a control call half way."""
PROBE_TIMEOUT_S = 30.0
FIRST_HEALTH_S = 5.0
"""A paused SGLang takes 20 s to say that it is not healthy; to tell one to go on that is only slow does no harm."""
REGISTRY_EVERY_S = 2.0
ROUTER_TIMEOUT_S = 60.0
ROUTER_RETRY_S = 1.0
HEARSAY_S, HEARSAY_POLL_S = 30.0, 0.05
"""How long a reply with the next version waits where another client publishes, which this one hears of later."""
REPLY_READERS = 2
"""Threads that read long replies; one of them reads some millions of tokens a second."""
FILES_FOR_OTHERS = 256
"""Of the files that this process may have open: what is not for requests, such as control calls, rewards and logs."""


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """What a client of rollout servers is told beside its config."""

    seed: int | None = None
    """The run's: sampling seeds are derived from it and a sample's name. None: the servers choose."""
    on_drop: Callable[[str, str], None] | None = None
    """on_drop(url, reason) is called, on the event loop, for a server that failed a publication, or whose replies are
    not to be believed."""
    run_name: str = ""
    """Servers that register for this run in rollout.registry come and go. The client that publishes needs it; others
    follow that one, by `mark_published`."""
    vocab_size: int | None = None
    """The model's, if it is known."""
    routes: RouteForm | None = None
    """The form in which servers tell the experts of tokens, if the trainer replays them."""
    rank: int = 0
    """This client's number among the `ranks` that send requests to the same servers."""
    ranks: int = 1


ALONE = ClientOptions()


class Fleet:
    """Made on the loop it runs on. `connect` before anything else, `close` at the end.

    await fleet.connect()
    await fleet.members.select_servers(timeout_s=60.0)
    await fleet.pause()
    fleet.begin_update()
    await fleet.on_all(lambda server: server.command("/update_weights_from_disk", body, timeout_s=60.0))
    fleet.finish_update(version=1)  # then `await fleet.resume()`: replies are of version 1
    """

    def __init__(
        self,
        config: RolloutConfig,
        urls: list[str],
        options: ClientOptions,
        *,
        spans: Spans,
        version: Callable[[], int],
        on_failure: Callable[[str], None] | None,
    ) -> None:
        """version() is the policy's now. on_failure(message) is told of what has ended that the run depends on."""
        headers = {"Authorization": f"Bearer {token_in(config.token_file)}"} if config.token_file else {}
        # Without a limit of its own, behind which control calls would wait for replies: `slots` are for these.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, trace_configs=[noting_connections()]
        )
        self.slots = asyncio.Semaphore(most_requests())
        """Requests that may be under way at once, each of which has a connection."""
        self.config, self.options, self._spans, self._version = config, options, spans, version
        self.reply_readers = ThreadPoolExecutor(REPLY_READERS, thread_name_prefix="reply-reader")
        self.servers = [self._client(url) for url in urls]
        self.router = Router(self._client(config.router)) if config.router else None
        self.members = Membership(
            self.servers,
            catch_up=self._catch_up,
            publication=config.publication,
            on_drop=options.on_drop,
            on_failure=on_failure,
        )
        self.open = asyncio.Event()
        """Clear while the servers are paused: a request sent then would be pinned to the version on its way out."""
        self.open.set()
        self.update_is_whole = True
        """False from the start of an update until every server that takes part has all of it."""
        self._published: int | None = None
        self._folder: str | None = None
        self._held: dict[ServerClient, HeldWeights] = {}
        """The weights that each server said it holds, in this publication."""
        self._current: Current | None = None
        """None until this client has published."""
        self._watchers: list[asyncio.Task[None]] = []
        # Of its own: users' blocking steps may have all threads of the loop's pool.
        self._registry_reader = ThreadPoolExecutor(1, thread_name_prefix="registry")
        self._memory = ServerMemory()

    def _client(self, url: str) -> ServerClient:
        return ServerClient(
            url,
            self._session,
            freezes_steps=self.config.interruption == "in_place",
            uses_adapters=self.config.publication == "adapters",
            vocab_size=self.options.vocab_size,
            spans=self._spans,
        )

    async def connect(self) -> None:
        """Ask all servers for health and facts; ServerError or RequestRefused names one that is not there."""

        async def greet(server: ServerClient) -> None:
            info = await server.probe(timeout_s=PROBE_TIMEOUT_S)
            if self.options.routes is not None and not info.gives_routes:
                raise RequestRefused(
                    f"{server.url}: algo.routing_replay needs servers that tell the experts of tokens; start it with "
                    f"--enable-return-routed-experts."
                )
            try:
                await server.check_health(timeout_s=FIRST_HEALTH_S)
            except ServerError:  # a trainer that was killed while it published has left it paused
                await server.command("/continue_generation", {}, timeout_s=PROBE_TIMEOUT_S)
                await server.check_health(timeout_s=PROBE_TIMEOUT_S)

        await asyncio.gather(*(greet(server) for server in self.servers))
        self.members.begin(self.config.health_timeout_s)
        if self.options.run_name:
            self._watchers.append(self.members.lasting(self._watch_registry(), "the watch over rollout.registry"))
        if self.router is not None:
            self.router.client.info = self.servers[0].info  # all serve one model
            await self._tell_router()
            self._watchers.append(self.members.lasting(self._keep_router(), "the watch over rollout.router"))

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        self.reply_readers.shutdown(wait=False)
        self._registry_reader.shutdown(wait=False)  # a network file system may keep it for minutes
        self.members.close()
        await self._session.close()

    # -- requests

    def asked(
        self, server: ServerClient, rid: str, tokens: list[int], params: dict[str, Any], routed: int = 0
    ) -> Asked:
        """Return what a reply to a request that is sent to `server` now is held against.

        routed: rows from the first on whose routes are not asked for.
        """
        asked = server.asked(rid, tokens, params, version=self._version())
        asked = dataclasses.replace(asked, routes=self.options.routes, routes_from=routed)
        weights = None if self.router is not None else self.members.weights_of(server)
        return dataclasses.replace(asked, weights=weights, is_routed=self.router is not None)

    async def accept(self, server: ServerClient, part: ReplyPart, asked: Asked) -> None:
        """A reply came; ServerError where the weights that it is of cannot be those that were published."""
        newest = newest_of(part, asked)
        if self.members.follows and newest == self._version() + 1:  # it may be right, and known here in a moment
            deadline = time.monotonic() + HEARSAY_S
            while newest > self._version() and time.monotonic() < deadline:
                await asyncio.sleep(HEARSAY_POLL_S)
        if newest > self._version():
            raise BadReply(
                f"{server.url}/generate: the reply cannot be used: weight_versions = {newest}: the newest that was "
                f"published is {self._version()}"
            )
        if self.router is None:
            if self.members.is_published(server):
                await server.check_start(timeout_s=self.config.control_timeout_s)
            self.members.record_success(server)

    def has_another(self, server: ServerClient) -> bool:
        """Return True where a request that this server refused can be sent to another one."""
        return self.router is None and any(other is not server for other in self.members.serving)

    def record_failure(self, server: ServerClient, error: ServerError) -> None:
        """A request failed at `server`."""
        if isinstance(error, Busy):  # it is well
            return
        if self.router is not None:  # which does not say whose failure it was
            self.members.suspect()
        elif isinstance(error, UnknownLogprob):
            self.members.record_unknown_logprob(server, str(error))
        elif isinstance(error, BadReply):
            self.members.distrust(server, str(error))
        else:
            self.members.lose(server, str(error))

    def note_overdue(self, server: ServerClient, since: float) -> None:
        """The deadline of a reply has passed that `server` was asked for at `since`, on the monotonic clock."""
        if self.router is not None:
            self.members.suspect()
        elif server.last_reply_s < since:  # else it works, and this reply is long
            self.members.lose(server, f"gave no reply at all for {time.monotonic() - since:.3g} s")

    async def _tell_router(self) -> None:
        """Let the router send requests to the servers that serve, and to no others."""
        assert self.router is not None
        self.members.changed.clear()  # before it is told: what changes meanwhile is told next
        try:
            await self.router.serve_with([server.url for server in self.members.serving], timeout_s=ROUTER_TIMEOUT_S)
        except (ServerError, asyncio.CancelledError):  # it has them in part, or not at all
            self.members.changed.set()
            raise

    async def _keep_router(self) -> None:
        while True:
            await self.members.changed.wait()
            try:
                await self._tell_router()
            except ServerError as error:
                logger.warning("%s", error)
                await asyncio.sleep(ROUTER_RETRY_S)

    # -- the registry

    async def _watch_registry(self) -> None:
        while True:
            await asyncio.sleep(REGISTRY_EVERY_S)
            try:
                urls = await asyncio.get_running_loop().run_in_executor(
                    self._registry_reader, registered_urls, self.config.registry, self.options.run_name
                )
            except OSError as error:
                logger.warning("rollout.registry = %r cannot be read: %s", self.config.registry, error)
            else:
                self.enlist(urls)

    def enlist(self, urls: list[str]) -> None:
        """Make the fleet these servers: new ones are caught up, those that are not among them are forgotten.

        In a publication nobody leaves, and where no server is named all stay: to forget them would gain nothing.
        """
        known, urls = {server.url: server for server in self.servers}, [url.rstrip("/") for url in urls]
        for url in urls:
            if url not in known:
                logger.info("%s is a new rollout server", url)
                self.servers.append(self._client(url))
                self.members.add(self.servers[-1])
        if urls and not self.members.is_publishing:
            for server in [server for url, server in known.items() if url not in urls]:
                logger.warning("%s has left the registry", server.url)
                self.servers.remove(server)
                self.members.forget(server)

    # -- control

    async def on_all(self, act: Callable[[ServerClient], Awaitable[Any]]) -> None:
        """Act on all servers that take part and drop those that fail; NoServerLeft where that leaves none.

        A server that is well and refuses is dropped only where another one did not; where all refuse, what they were
        asked is to blame, and CommandRefused is raised.
        """
        servers = list(self.members.publishing)  # which drop() below takes from
        results = await asyncio.gather(*(act(server) for server in servers), return_exceptions=True)
        failures = {s: result for s, result in zip(servers, results, strict=True) if isinstance(result, BaseException)}
        for server, error in failures.items():
            if not isinstance(error, ServerError):  # a bug of ours, or a cancellation: no server is to blame
                raise error
            if not isinstance(error, CommandRefused) or len(failures) < len(servers):
                self.members.drop(server, str(error))
        if not self.members.publishing:
            raise NoServerLeft("no rollout server is left. " + " ".join(map(str, failures.values())))
        if len(failures) == len(servers):
            raise next(iter(failures.values()))

    async def pause(self) -> None:
        """Stop generation as the config says. A cache that has outlived as many publications as it may is flushed."""
        self.open.clear()  # first: what is sent from here on would run into the pause
        await self.members.stop_catching_up()

        async def pause(server: ServerClient) -> None:
            mode = self.config.interruption
            server.keeps_cache = server.cache.age < self.config.max_cache_age
            if mode == "in_place" and not server.keeps_cache:
                mode = "retract"  # frozen requests would hold their keys
            timeout_s = self.config.control_timeout_s
            await server.pause(mode, flush=not server.keeps_cache, timeout_s=timeout_s)
            # Paused, it stays as it is: this start takes the weights, and another one could not have them.
            server.forget_start()
            await server.check_start(timeout_s=timeout_s)

        await self.on_all(pause)

    async def resume(self) -> None:
        """Let the servers go on, and get requests again unless the last update is not whole.

        Those that have lent memory to the trainer stay paused until `set_memory` gives it back.
        """
        timeout_s = self.config.control_timeout_s
        if not self.update_is_whole:
            # What they were generating would go on with a part of the new weights.
            await self.on_all(lambda server: server.command("/abort_request", {"abort_all": True}, timeout_s=timeout_s))
        if self._memory.is_whole:
            await self.on_all(lambda server: server.command("/continue_generation", {}, timeout_s=timeout_s))
        if self.update_is_whole:
            if self._published is not None:
                servers, version = self.members.publishing, self._published
                self._current = self._confirmed(servers, str(version))
                self.mark_published(servers, version)
                self._published = None
                if self.router is not None:
                    with contextlib.suppress(ServerError):  # it is told again, and again
                        await self._tell_router()
            if self._memory.is_whole:
                self.members.allow_catching_up()
                self.open.set()  # last: the router, and who else is told of servers, knows them by now
            else:  # mark_published has allowed it, and the trainer has the devices
                await self.members.stop_catching_up()

    async def set_memory(self, parts: frozenset[str], starts: dict[str, int]) -> list[str]:
        """Have all servers that answer hold these parts of their memory. With all of them they go on; with fewer they
        are paused, requests wait, and what was being generated is asked for again later.

        starts: by URL, what differs from one start of a server to the next. Servers that fail are dropped, and their
        URLs returned; CommandRefused where all refuse.
        """
        self._memory.wanted = parts
        if not self._memory.is_whole:  # requests wait before a server is paused for it
            self.open.clear()
            await self.members.stop_catching_up()
        timeout_s = self.config.start_timeout_s
        bring = (self._memory.bring(server, starts[server.url], timeout_s=timeout_s) for server in self.servers)
        failures: dict[str, ServerError] = {}
        for server, error in zip(self.servers, await asyncio.gather(*bring, return_exceptions=True), strict=True):
            if not isinstance(error, ServerError | None):
                raise error
            if error is not None:
                failures[server.url] = error
                self.members.drop(server, str(error))
        if len(failures) == len(self.servers) and all(isinstance(e, CommandRefused) for e in failures.values()):
            raise next(iter(failures.values()))
        if self._memory.is_whole:
            try:
                await self.resume()
            except NoServerLeft:  # replies wait for those that are started again, and these for a publication
                self.members.allow_catching_up()
                self.open.set()
        return list(failures)

    def check_publishable(self) -> None:
        """Raise RequestRefused for the first server that cannot be sent new weights."""
        for server in self.members.publishing:
            if server.info is not None and (why := server.info.refusal(self.config.publication)):
                raise RequestRefused(f"{server.url}: {why}")

    def begin_update(self, folder: str | None = None) -> None:
        """Servers are about to get new weights, from `folder` where they come over a disk."""
        self.check_publishable()
        self.update_is_whole, self._folder, self._held = False, folder, {}

    def note_held(self, server: ServerClient, held: HeldWeights) -> None:
        """A server has said what it holds; where that is wrong, the publisher drops it."""
        self._held[server] = held

    def _confirmed(self, servers: list[ServerClient], version: str) -> Current:
        checksums = {}
        for server in servers:
            form, held = server.info.checksum_form if server.info else None, self._held.get(server)
            # What it said under an earlier name is of the weights that it had before.
            if form is not None and held is not None and held.version in (None, version):
                checksums[form] = held.checksums
        return Current(version, checksums, self._folder)

    async def _catch_up(self, server: ServerClient) -> str | None:
        """Bring a server that does not serve to the current weights; None where there is no way to."""
        current = self._current
        source = source_for(server, self.members.serving, current) if current is not None else None
        if current is None or source is None:
            return None
        if self.router is not None:  # else what the server has begun and aborts now would pass as a reply's beginning
            await self._tell_router()
        server.forget_start()
        await server.check_start(timeout_s=self.config.control_timeout_s)  # the start that takes them, and no later one
        await catch_up(server, source, current, self.config)
        server.cache.publish(current.version, flushed=True)
        origin = source if isinstance(source, str) else source.url
        logger.info("%s has caught up with version %s, from %s", server.url, current.version, origin)
        return current.version

    def finish_update(self, version: int) -> None:
        """Every server that takes part has all weights of `version`; they serve it once resumed."""
        self.update_is_whole, self._published = True, version

    async def follow(self, urls: list[str], version: int) -> None:
        """Another client has published `version` to the servers at `urls`, of which some may be new to this one."""
        self.members.follows = True
        if self.config.registry:
            self.enlist(urls)
        servers = [server for server in self.servers if server.url in urls]

        async def meet(server: ServerClient) -> None:
            if server.info is None:
                await server.probe(timeout_s=PROBE_TIMEOUT_S)
            server.forget_start()
            await server.check_start(timeout_s=PROBE_TIMEOUT_S)

        for failure in await asyncio.gather(*map(meet, servers), return_exceptions=True):
            if isinstance(failure, BaseException) and not isinstance(failure, ServerError):
                raise failure
        self.mark_published([server for server in servers if server.info is not None], version)

    def mark_published(self, servers: list[ServerClient], version: int) -> None:
        """`servers` have `version` and serve; all others wait until they are caught up or take part in a later one."""
        for server in servers:
            server.cache.publish(str(version), flushed=not server.keeps_cache)
        if self.router is not None:
            self.router.client.cache.publish(str(version), flushed=not any(server.keeps_cache for server in servers))
        self.members.mark_published(servers, str(version))


def most_requests() -> int:
    """How many requests this process has files for at once, beside all else that it opens."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 2**31
    return max(1, limit // 4, limit - FILES_FOR_OTHERS)
