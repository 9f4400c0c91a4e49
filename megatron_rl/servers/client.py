"""One rollout server as this client knows it: its properties, its requests in flight, and the commands sent to it.

Servers speak the protocol of SGLang 0.5.6 to 0.5.23. Servers with older versions have no pause modes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any

from megatron_rl.api import ChecksumForm, HeldWeights, RequestRefused
from megatron_rl.servers.http_connections import Connections, Exchange
from megatron_rl.servers.reply_check import SPANS_SINCE, Asked, ReplyPart, as_object, member
from megatron_rl.servers.server_http import Busy, CommandRefused, Dropped, NotFound, ServerError, ServerHttp
from megatron_rl.servers.server_info import ServerInfo, server_info, start_of
from megatron_rl.telemetry.spans import Spans

PAUSE_MODES_SINCE = (0, 5, 6)
RETRACTED_FLUSH_SINCE = (0, 5, 21)
"""First SGLang version that flushes its cache even if requests wait in its queue, as retracted ones do."""
FLUSH_POLL_S = 0.05
REMEMBERED_VERSIONS = 256
ADAPTERS = "policy"
"""Name under which servers hold a policy's adapters."""


class CacheAge:
    """Age of a server's KV cache: the number of publications since it was last flushed.

    It is known for now, and for the time at which each recent version arrived.
    """

    def __init__(self) -> None:
        self.age = 0
        self._under: OrderedDict[str, int] = OrderedDict()

    def publish(self, version: str, *, flushed: bool) -> None:
        self.age = 0 if flushed else self.age + 1
        self._under[version] = self.age
        if len(self._under) > REMEMBERED_VERSIONS:
            self._under.popitem(last=False)

    def stale_tokens(self, part: ReplyPart) -> int:
        """Return how many tokens of a reply may have attended to keys that older weights computed.

        The result is never too low, but may be too high: keys that were found in the cache have an unknown age and
        count as its oldest entries. A request that spans a publication keeps its keys unless that publication flushed
        the cache.
        """
        if not part.spans:  # SGLang before 0.5.19
            return len(part.sampled) if self.age else 0
        stale = 0
        for number, (version, tokens) in enumerate(part.spans):
            reuses = number > 0 or part.cached_tokens > 0
            stale += tokens if reuses and self._under.get(version, 0) > 0 else 0
        return stale


class ServerClient(ServerHttp):
    """Client of one server: keeps track of what is known about the server, and controls it.

    For example:

        server = ServerClient(url, connections, freezes_steps=False, vocab_size=None, spans=Spans())
        print((await server.probe(timeout_s=30.0)).version)
        await server.command("/continue_generation", {}, timeout_s=30.0)
    """

    def __init__(
        self,
        url: str,
        connections: Connections,
        *,
        freezes_steps: bool,
        uses_adapters: bool = False,
        vocab_size: int | None,
        spans: Spans,
    ) -> None:
        """Create the client without contacting the server.

        freezes_steps: True if requests are paused in place, so that weights may change in the middle of a server's
        step.
        uses_adapters: True if requests use the server's adapters, which are named ADAPTERS.
        vocab_size: size of the model's vocabulary, or None if this client does not know it. If the server reports a
        smaller size, that one is used.
        """
        super().__init__(url, connections, spans)
        self.freezes_steps, self.vocab_size, self.uses_adapters = freezes_steps, vocab_size, uses_adapters
        self.calls: set[Exchange] = set()
        """This client's generation requests in flight."""
        self.info: ServerInfo | None = None
        self.cache = CacheAge()
        self.keeps_cache = False
        """True if the current or last pause did not flush the cache."""
        self.last_reply_s = 0.0
        """Monotonic time of the server's last valid reply."""
        self.busy_since = 0.0
        """Monotonic time since which at least one generation request has been in flight."""
        self._known_s = 0.0
        """Monotonic time at which the server last reported its instance ID."""
        self._start: str | None = None
        """Instance ID, which changes with each restart, of the server process that has the current weights. None until
        it was queried."""
        self._asking: asyncio.Task[None] | None = None

    # -- requests

    def asked(
        self, rid: str, input_ids: list[int], sampling_params: dict[str, Any], *, version: int, **further: Any
    ) -> Asked:
        """Return the facts against which the reply to a request is checked.

        version: the current policy version. further: those fields of Asked that only the caller knows.
        """
        info = self.info
        sizes = [size for size in (info.vocab_size if info else None, self.vocab_size) if size is not None]
        return Asked(
            rid=rid,
            prompt_tokens=len(input_ids),
            max_new_tokens=sampling_params["max_new_tokens"],
            stop=tuple(sampling_params.get("stop", ())),
            version=version,
            vocab_size=min(sizes, default=None),
            room=info.room if info else None,
            gives_spans=info is not None and info.version >= SPANS_SINCE,
            gives_text=info is None or info.gives_text,
            # SGLang starts a step before it has recorded the last one; the embedded server does not.
            late=int(self.freezes_steps and info is not None and not info.is_embedded),
            keeps_counts=info is None or info.is_embedded,
            **further,
        )

    def open_call(self, call: Exchange) -> None:
        if not self.calls:
            self.busy_since = time.monotonic()
        self.calls.add(call)

    def abandon_calls(self) -> None:
        """End the generation requests in flight. Their callers retry on another server."""
        for call in self.calls:
            call.fail(Dropped(f"{self.url}/generate: the server was dropped meanwhile."))

    # -- signs of life

    async def check_health(self, *, timeout_s: float) -> None:
        """Raise ServerError if the server is unhealthy.

        SGLang generates a token for this check, so it counts as unhealthy while paused.
        """
        await self.call("GET", "/health", timeout_s=timeout_s)

    async def check_generation(self, *, timeout_s: float) -> None:
        """Raise ServerError if the server generates nothing, even if it answers everything else."""
        try:
            await self.call("GET", "/health_generate", timeout_s=timeout_s)
        except NotFound:
            await self.check_health(timeout_s=timeout_s)

    async def give_sign_of_life(self, *, timeout_s: float) -> str | None:
        """Return the name of the server's weights, or None if it reports none.

        Raises ServerError if the server does not answer. Paused and busy servers do answer.
        """
        try:
            model = await self.call_json("GET", "/model_info", timeout_s=timeout_s)
        except (RequestRefused, Busy):
            return None
        weights: str | None = self.checked("/model_info", lambda: member(model, "weight_version", str, optional=True))
        return weights

    def forget_start(self) -> None:
        """Forget which instance of the server has the weights, because new weights are about to arrive or have arrived.

        The next call of `check_start` queries and stores the instance ID.
        """
        self._start, self._known_s = None, 0.0

    @property
    def has_same_start(self) -> bool:
        """True if `info` comes from the instance of the server that has the weights, or if that instance is unknown."""
        return self._start is None or (self.info is not None and self.info.start == self._start)

    async def check_start(self, *, timeout_s: float) -> None:
        """Raise ServerError if the server was restarted since it received the weights.

        A restarted server may report the right name for wrong weights. The server is queried only if a connection to it
        was made since the last query. Concurrent callers share one query.
        """
        while self.info is not None and self.info.start is not None and self._known_s <= self.connected_s:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._learn_start(timeout_s))
            await asyncio.shield(self._asking)  # one caller's cancellation must not affect the others

    async def _learn_start(self, timeout_s: float) -> None:
        try:
            start = start_of(await self._server_info(timeout_s=timeout_s))
        except RequestRefused as refusal:
            raise ServerError(str(refusal)) from refusal
        if self._start is not None and start != self._start:
            raise ServerError(f"{self.url}: was restarted, and no longer has the weights that were published to it.")
        self._start, self._known_s = start, time.monotonic()

    async def _server_info(self, *, timeout_s: float) -> dict[str, Any]:
        try:
            return await self.call_json("GET", "/server_info", timeout_s=timeout_s)
        except NotFound:  # SGLang before 0.5.6
            return await self.call_json("GET", "/get_server_info", timeout_s=timeout_s)

    async def probe(self, *, timeout_s: float) -> ServerInfo:
        """Query the server's properties and keep them in `info`. Works for paused servers, too."""
        try:
            server = await self._server_info(timeout_s=timeout_s)
        except NotFound as error:
            raise NotFound(
                f"{self.url}/server_info: not found. This is no SGLang server, or a router before some, which "
                f"forwards no control calls: name the servers themselves in rollout.servers."
            ) from error
        try:
            model = await self.call_json("GET", "/model_info", timeout_s=timeout_s)
        except NotFound:
            model = await self.call_json("GET", "/get_model_info", timeout_s=timeout_s)
        self.info = self.checked("/server_info and /model_info", lambda: server_info(self.url, server, model))
        return self.info

    async def held_weights(self, *, form: ChecksumForm | None, timeout_s: float) -> HeldWeights:
        """Return the version of the server's weights and, if `form` is given, their checksums in this form."""
        model = await self.call_json("GET", "/model_info", timeout_s=timeout_s)
        version = self.checked("/model_info", lambda: member(model, "weight_version", str, optional=True))
        if form is None:
            return HeldWeights(version, {})
        answer = await self.call_json("POST", "/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)

        def checksums() -> dict[str, str]:
            found: dict[str, str] = {}
            for rank, part in zip(range(form.ranks), member(answer, "ranks", list), strict=True):
                sums = member(as_object(f"ranks[{rank}]", part), "checksums", dict)
                found |= {form.name_on(name, rank): member(sums, name, str) for name in sums}
            return found

        return HeldWeights(version, self.checked("/weights_checker", checksums))

    async def pause(self, mode: str, *, flush: bool, timeout_s: float) -> None:
        """Stop generation until the command /continue_generation.

        mode: `abort` ends running requests. `retract` puts them back into the queue. `in_place` freezes them with their
        KV cache, which then cannot be flushed. SGLang before 0.5.6 always aborts, and before 0.5.21 it aborts if
        `flush` is True.
        flush: True to drop all KV-cache entries, including those of running requests.
        """
        assert self.info is not None
        if flush and self.info.version < RETRACTED_FLUSH_SINCE:
            mode = "abort"  # aborted requests are sent again, with their tokens so far
        body = {"mode": mode} if self.info.version >= PAUSE_MODES_SINCE else {}
        await self.command("/pause_generation", body, timeout_s=timeout_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while flush:
            try:
                await self.call("POST", "/flush_cache", {}, timeout_s=timeout_s)
                return
            except RequestRefused as error:  # its scheduler is still retracting requests
                if asyncio.get_running_loop().time() > deadline:
                    raise CommandRefused(f"{error} The cache could not be flushed within {timeout_s:g} s.") from error
            await asyncio.sleep(FLUSH_POLL_S)
