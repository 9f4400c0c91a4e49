"""The servers of one client, controlled together: pause, resume and publication. All coroutines run on one loop.

A server that fails a command is dropped, and the others continue. After an update that did not reach every
participating server, none receives requests until a later update is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megatron_rl.api import HeldWeights, NoServerLeft, RequestRefused
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.launch import open_files
from megatron_rl.launch.run_token import token_in
from megatron_rl.launch.server_registry import registered_urls
from megatron_rl.routes import RouteForm
from megatron_rl.servers.catch_up import Current, catch_up, source_for
from megatron_rl.servers.client import ServerClient
from megatron_rl.servers.http_connections import Connections
from megatron_rl.servers.membership import Membership
from megatron_rl.servers.reply_check import Asked, ReplyPart, newest_of
from megatron_rl.servers.router import Router
from megatron_rl.servers.server_http import BadReply, Busy, CommandRefused, ServerError, UnknownLogprob
from megatron_rl.servers.server_memory import ServerMemory
from megatron_rl.support import NOT_ADJUSTED, Adjusting
from megatron_rl.telemetry.spans import Spans

logger = logging.getLogger(__name__)

KEEPALIVE_S = 2.0
"""Seconds for which an idle connection is kept. A server with uvicorn's default closes it after 5 s."""
PROBE_TIMEOUT_S = 30.0
FIRST_HEALTH_S = 5.0
"""Timeout in seconds of the first health check. If it fails, the server is resumed, in case it was paused. A paused
SGLang would take 20 s to report that it is unhealthy."""
REGISTRY_EVERY_S = 2.0
ROUTER_TIMEOUT_S = 60.0
ROUTER_RETRY_S = 1.0
HEARSAY_S, HEARSAY_POLL_S = 30.0, 0.05
"""Maximum wait, and poll interval, in seconds, if a reply has a newer version than this client knows. Another client
may have published it, and this client may hear of it soon."""
REPLY_READERS = 2
"""Number of threads that parse long replies."""
FILES_FOR_OTHERS = 256
"""Number of file descriptors that are not used for requests."""


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of a rollout client in addition to its config."""

    seed: int | None = None
    """The run's seed. Each sampling seed is derived from it and from the sample's name.

    None: the servers choose the sampling seeds.
    """
    on_drop: Callable[[str, str], None] | None = None
    """Function on_drop(url, reason), called for each server that failed a publication or cannot be trusted.

    It is called on the event loop.
    """
    run_name: str = ""
    """Name of the run, under which its servers register in rollout.registry. Only the publishing client needs it."""
    vocab_size: int | None = None
    routes: RouteForm | None = None
    """Form in which servers report the experts of tokens, if the trainer replays them."""
    trained_as: GenerationConfig | None = None
    """The run's sampling options, if the trainer computes the distribution from which tokens were sampled with them."""
    rank: int = 0
    """Number of this client among the `ranks` clients of the same servers."""
    ranks: int = 1


ALONE = ClientOptions()


class Fleet:
    """The servers of one client. Create it on its event loop, call `connect` first and `close` last.

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
        """Create the clients of the servers at `urls`, without contacting the servers.

        version: function that returns the current policy version. on_failure: called with a message if a permanent task
        has ended.
        """
        headers = {"Authorization": f"Bearer {token_in(config.token_file)}"} if config.token_file else {}
        # No limit of connections here, because control calls would then wait behind replies.
        self._connections = Connections(headers, keepalive_s=KEEPALIVE_S)
        self.slots = asyncio.Semaphore(most_requests())
        """Limits the number of concurrent requests, each of which has its own connection."""
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
        """Set while requests may be sent. A request sent during a pause would be recorded with the old version."""
        self.open.set()
        self.update_is_whole = True
        """False from the start of an update until every participating server has received all of it."""
        self._published: int | None = None
        self._folder: str | None = None
        self._held: dict[ServerClient, HeldWeights] = {}
        self._current: Current | None = None
        self._watchers: list[asyncio.Task[None]] = []
        # A separate pool, because users' blocking steps may occupy the whole pool of the loop.
        self._registry_reader = ThreadPoolExecutor(1, thread_name_prefix="registry")
        self._memory = ServerMemory()

    def _client(self, url: str) -> ServerClient:
        return ServerClient(
            url,
            self._connections,
            freezes_steps=self.config.interruption == "in_place",
            uses_adapters=self.config.publication == "adapters",
            vocab_size=self.options.vocab_size,
            spans=self._spans,
        )

    async def connect(self) -> None:
        """Query the properties of all servers, and start to watch them.

        If one of them fails, raises ServerError or RequestRefused, which names it.
        """

        async def greet(server: ServerClient) -> None:
            info = await server.probe(timeout_s=PROBE_TIMEOUT_S)
            if self.options.routes is not None and not info.gives_routes:
                raise RequestRefused(
                    f"{server.url}: algo.routing_replay needs servers that report the experts of each token; start it "
                    f"with --enable-return-routed-experts."
                )
            try:
                await server.check_health(timeout_s=FIRST_HEALTH_S)
            except ServerError:  # a trainer that was killed during a publication left it paused
                await server.command("/continue_generation", {}, timeout_s=PROBE_TIMEOUT_S)
                await server.check_health(timeout_s=PROBE_TIMEOUT_S)

        await asyncio.gather(*(greet(server) for server in self.servers))
        self.members.begin(self.config.health_timeout_s)
        if self.options.run_name:
            self._watchers.append(self.members.lasting(self._watch_registry(), "the watch over rollout.registry"))
        if self.router is not None:
            self.router.client.info = self.servers[0].info  # all servers have the same model
            await self._tell_router()
            self._watchers.append(self.members.lasting(self._keep_router(), "the watch over rollout.router"))

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        self.reply_readers.shutdown(wait=False)
        self._registry_reader.shutdown(wait=False)  # a network file system may block it for minutes
        self.members.close()
        self._connections.close()

    # -- requests

    def asked(
        self, server: ServerClient, rid: str, tokens: list[int], params: dict[str, Any], routed: int = 0,
        support: int = 0, adjusting: Adjusting = NOT_ADJUSTED, changed: int = 0,
    ) -> Asked:  # fmt: skip
        """Return the facts against which a reply is checked if the request for it is sent to `server` now.

        tokens: the prompt and the reply so far. params: sampling parameters under SGLang's names.
        routed: number of leading rows whose routes are not requested. Other arguments: see Asked.
        """
        is_routed = self.router is not None
        return server.asked(
            rid,
            tokens,
            params,
            version=self._version(),
            weights=None if is_routed else self.members.weights_of(server),
            is_routed=is_routed,
            routes=self.options.routes,
            routes_from=routed,
            support=support,
            adjusting=adjusting,
            changed=changed,
        )

    async def accept(self, server: ServerClient, part: ReplyPart, asked: Asked) -> None:
        """Accept a checked reply. Raises ServerError if it cannot come from weights that were published."""
        newest = newest_of(part, asked)
        if self.members.follows and newest == self._version() + 1:  # valid if this client hears of it soon
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
        """Return True if a request that `server` has refused can be sent to another server."""
        return self.router is None and any(other is not server for other in self.members.serving)

    def record_failure(self, server: ServerClient, error: ServerError) -> None:
        if isinstance(error, Busy):  # a busy server is healthy
            return
        if self.router is not None:  # the router does not say which server failed
            self.members.suspect()
        elif isinstance(error, UnknownLogprob):
            self.members.record_unknown_logprob(server, str(error))
        elif isinstance(error, BadReply):
            self.members.distrust(server, str(error))
        else:
            self.members.lose(server, str(error))

    def note_overdue(self, server: ServerClient, since: float) -> None:
        """Note that a reply did not arrive before its deadline. If no other reply came either, the server is LOST.

        since: monotonic time at which the request was sent to `server`.
        """
        if self.router is not None:
            self.members.suspect()
        elif server.last_reply_s < since:  # otherwise the server works, and the reply is long
            self.members.lose(server, f"gave no reply at all for {time.monotonic() - since:.3g} s")

    async def _tell_router(self) -> None:
        """If there is a router, tell it to send requests to the serving servers only."""
        if self.router is None:
            return
        self.members.changed.clear()  # cleared first, so that changes during the call are sent next
        try:
            await self.router.serve_with([server.url for server in self.members.serving], timeout_s=ROUTER_TIMEOUT_S)
        except (ServerError, asyncio.CancelledError):  # it may have only some of them
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
        """Make the servers at `urls` the fleet's servers: add new ones, and remove those that are not in the list.

        During a publication, or if the list is empty, no server is removed.
        """
        known, urls = {server.url: server for server in self.servers}, [url.rstrip("/") for url in urls]
        for url in urls:
            if url not in known:
                logger.info("%s is a new rollout server", url)
                self.servers.append(self._client(url))
                self.members.add(self.servers[-1])
        if urls and self.members.may_catch_up:
            for server in [server for url, server in known.items() if url not in urls]:
                logger.warning("%s has left the registry", server.url)
                self.servers.remove(server)
                self.members.forget(server)

    # -- control

    async def on_all(self, act: Callable[[ServerClient], Awaitable[Any]]) -> None:
        """Run `act` on all participating servers and drop those that fail. Raises NoServerLeft if none is left.

        If no server succeeds and some refuse the command, the command is at fault. Then the servers that refuse are
        kept, and CommandRefused is raised.
        """
        servers = list(self.members.publishing)  # a copy, because drop() below modifies the list
        results = await asyncio.gather(*(act(server) for server in servers), return_exceptions=True)
        failures = {s: result for s, result in zip(servers, results, strict=True) if isinstance(result, BaseException)}
        for server, error in failures.items():
            if not isinstance(error, ServerError):  # a bug of ours, or a cancellation
                raise error
            if not isinstance(error, CommandRefused) or len(failures) < len(servers):
                self.members.drop(server, str(error))
        if not self.members.publishing:
            raise NoServerLeft("no rollout server is left. " + " ".join(map(str, failures.values())))
        if len(failures) == len(servers):  # a refusal, if there is one: the servers that failed are dropped
            raise min(failures.values(), key=lambda error: not isinstance(error, CommandRefused))

    async def pause(self) -> None:
        """Pause generation on all participating servers as rollout.interruption says.

        A server's KV cache is flushed if it was kept for rollout.max_cache_age publications.
        """
        self.open.clear()  # first: requests sent from now on would hit the pause
        await self.members.stop_catching_up()

        async def pause(server: ServerClient) -> None:
            mode = self.config.interruption
            server.keeps_cache = server.cache.age < self.config.max_cache_age
            if mode == "in_place" and not server.keeps_cache:
                mode = "retract"  # frozen requests would hold their keys
            timeout_s = self.config.control_timeout_s
            await server.pause(mode, flush=not server.keeps_cache, timeout_s=timeout_s)
            # Query the instance while it is paused: it receives the weights, and a restarted one would lack them.
            server.forget_start()
            await server.check_start(timeout_s=timeout_s)

        await self.on_all(pause)

    async def resume(self) -> None:
        """Resume the servers, unless they have lent memory to the trainer.

        They receive requests again, unless the last update is incomplete.
        """
        timeout_s = self.config.control_timeout_s
        if not self.update_is_whole:
            # Otherwise their requests would continue with a part of the new weights.
            await self.on_all(lambda server: server.command("/abort_request", {"abort_all": True}, timeout_s=timeout_s))
        if self._memory.is_whole:
            await self.on_all(lambda server: server.command("/continue_generation", {}, timeout_s=timeout_s))
        if self.update_is_whole:
            if self._published is not None:
                servers, version = self.members.publishing, self._published
                self._current = self._confirmed(servers, str(version))
                self.mark_published(servers, version)
                self._published = None
                with contextlib.suppress(ServerError):  # it is told again later
                    await self._tell_router()
            if self._memory.is_whole:
                self.members.may_catch_up = True
                self.open.set()  # last: by now the router and other followers know the servers
            else:  # mark_published has allowed it, but the trainer has the devices
                await self.members.stop_catching_up()

    async def set_memory(self, parts: frozenset[str], starts: dict[str, int]) -> list[str]:
        """Make all servers hold exactly these parts of their memory. Drop servers that fail, and return their URLs.

        If `parts` are all parts, the servers are resumed. Otherwise they are paused, and requests wait.
        starts: {URL: number that changes with each restart of the server}. Raises CommandRefused if all servers refuse.
        """
        self._memory.wanted = parts
        if not self._memory.is_whole:  # requests must wait before a server is paused
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
            except NoServerLeft:  # replies wait for restarted servers, which wait for a publication
                self.members.may_catch_up = True
                self.open.set()
        return list(failures)

    def check_publishable(self) -> None:
        """Raise RequestRefused if a participating server cannot receive weights as rollout.publication says."""
        for server in self.members.publishing:
            if server.info is not None and (why := server.info.refusal(self.config.publication)):
                raise RequestRefused(f"{server.url}: {why}")

    def begin_update(self, folder: str | None = None) -> None:
        """Note that an update of the weights begins. folder: from which the servers load them; None if from no disk."""
        self.check_publishable()
        self.update_is_whole, self._folder, self._held = False, folder, {}

    def note_held(self, server: ServerClient, held: HeldWeights) -> None:
        """Note the version and checksums that a server reports. The publisher drops the server if they are wrong."""
        self._held[server] = held

    def _confirmed(self, servers: list[ServerClient], version: str) -> Current:
        checksums = {}
        for server in servers:
            form, held = server.info.checksum_form if server.info else None, self._held.get(server)
            # Checksums reported under an earlier name belong to the weights before.
            if form is not None and held is not None and held.version in (None, version):
                checksums[form] = held.checksums
        return Current(version, checksums, self._folder)

    async def _catch_up(self, server: ServerClient) -> str | None:
        """Bring a server to the current weights and return their name, or None if no source has them."""
        current = self._current
        source = source_for(server, self.members.serving, current) if current is not None else None
        if current is None or source is None:
            return None
        await self._tell_router()  # otherwise partial replies that the server aborts now could be accepted
        server.forget_start()
        await server.check_start(timeout_s=self.config.control_timeout_s)  # this instance takes the weights
        await catch_up(server, source, current, self.config)
        server.cache.publish(current.version, flushed=True)
        origin = source if isinstance(source, str) else source.url
        logger.info("%s has caught up with version %s, from %s", server.url, current.version, origin)
        return current.version

    def finish_update(self, version: int) -> None:
        """Note that every participating server has all weights of `version`. They serve it once they are resumed."""
        self.update_is_whole, self._published = True, version

    async def follow(self, urls: list[str], version: int) -> None:
        """Note that another client has published `version` to the servers at `urls`, some of which may be new here."""
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
        """Note that `servers` have `version` and serve. The others must catch up or join a later publication."""
        for server in servers:
            server.cache.publish(str(version), flushed=not server.keeps_cache)
        if self.router is not None:
            self.router.client.cache.publish(str(version), flushed=not any(server.keeps_cache for server in servers))
        self.members.mark_published(servers, str(version))


def most_requests() -> int:
    """Return the number of concurrent requests for which this process has file descriptors."""
    limit = open_files.limit()
    return max(1, limit // 4, limit - FILES_FOR_OTHERS)
