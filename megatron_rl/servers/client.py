"""One rollout server as this client knows it: its facts, its requests under way, and the commands that it is given.

Servers speak SGLang's protocol, of 0.5.6 to 0.5.23; older ones without pause modes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any

import aiohttp

from megatron_rl.api import ChecksumForm, HeldWeights, RequestRefused
from megatron_rl.servers.reply_check import SPANS_SINCE, Asked, ReplyPart, as_object, member
from megatron_rl.servers.server_http import Busy, CommandRefused, NotFound, ServerError, ServerHttp
from megatron_rl.servers.server_info import ServerInfo, server_info, start_of
from megatron_rl.telemetry.spans import Spans

PAUSE_MODES_SINCE = (0, 5, 6)
RETRACTED_FLUSH_SINCE = (0, 5, 21)
"""Before, requests that wait keep the cache from being flushed, and so do those that a pause has put back (0.5.19)."""
FLUSH_POLL_S = 0.05
REMEMBERED_VERSIONS = 256
ADAPTERS = "policy"
"""The name under which servers have a policy's adapters."""


class CacheAge:
    """How many publications the oldest keys in a server's cache have outlived, now and under its last versions."""

    def __init__(self) -> None:
        self.age = 0
        self._under: OrderedDict[str, int] = OrderedDict()

    def publish(self, version: str, *, flushed: bool) -> None:
        self.age = 0 if flushed else self.age + 1
        self._under[version] = self.age
        if len(self._under) > REMEMBERED_VERSIONS:
            self._under.popitem(last=False)

    def stale_tokens(self, part: ReplyPart) -> int:
        """Return how many tokens of a reply may have attended to keys that older weights computed; never too few.

        Keys found in the cache are of unknown age, so they count as old as the oldest. A request that runs through a
        publication keeps its keys unless that one flushed.
        """
        if not part.spans:  # before SGLang 0.5.19
            return len(part.sampled) if self.age else 0
        stale = 0
        for number, (version, tokens) in enumerate(part.spans):
            reuses = number > 0 or part.cached_tokens > 0
            stale += tokens if reuses and self._under.get(version, 0) > 0 else 0
        return stale


class ServerClient(ServerHttp):
    """Knows and commands one server.

    server = ServerClient(url, session, freezes_steps=False, vocab_size=None, spans=Spans())
    print((await server.probe(timeout_s=30.0)).version)
    await server.command("/continue_generation", {}, timeout_s=30.0)
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        freezes_steps: bool,
        uses_adapters: bool = False,
        vocab_size: int | None,
        spans: Spans,
    ) -> None:
        """freezes_steps: updates come while a step is under way, because requests are paused in place. uses_adapters:
        requests are for the adapters that it has by the name ADAPTERS. vocab_size: the model's, as this side knows it;
        the server may say less, and nothing above.
        """
        super().__init__(url, session, spans)
        self.freezes_steps, self.vocab_size, self.uses_adapters = freezes_steps, vocab_size, uses_adapters
        self.calls: set[asyncio.Task[ReplyPart]] = set()
        """Generation requests of this client that are under way."""
        self.info: ServerInfo | None = None
        self.cache = CacheAge()
        self.keeps_cache = False
        """The pause under way, or the last one, flushed nothing."""
        self.last_reply_s = 0.0
        """On the monotonic clock, as the next ones: when it last gave a reply, whatever of."""
        self.busy_since = 0.0
        """Since when there always was a call under way."""
        self._known_s = 0.0
        """When it was last asked which start of it this is."""
        self._start: str | None = None
        """The start that has the current weights; None until it is asked."""
        self._asking: asyncio.Task[None] | None = None

    # -- requests

    def asked(self, rid: str, input_ids: list[int], sampling_params: dict[str, Any], *, version: int) -> Asked:
        """Return what a reply to this request is held against; the version is the policy's now."""
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
            # SGLang starts a step before it has booked the last one; the embedded server does not.
            late=int(self.freezes_steps and info is not None and not info.is_embedded),
        )

    def open_call(self, call: asyncio.Task[ReplyPart]) -> None:
        """Note that it is under way; once it is over, it is taken out of `calls`."""
        if not self.calls:
            self.busy_since = time.monotonic()
        self.calls.add(call)

    def abandon_calls(self) -> None:
        """Cancel what it is generating; whoever waits for it asks another server."""
        for call in self.calls:
            call.cancel()

    # -- signs of life

    async def check_health(self, *, timeout_s: float) -> None:
        """Raise ServerError where it is not healthy. SGLang generates a token for that, which a paused one cannot."""
        await self.call("GET", "/health", timeout_s=timeout_s)

    async def check_generation(self, *, timeout_s: float) -> None:
        """Raise ServerError where it generates nothing, be it that it answers everything else."""
        try:
            await self.call("GET", "/health_generate", timeout_s=timeout_s)
        except NotFound:
            await self.check_health(timeout_s=timeout_s)

    async def give_sign_of_life(self, *, timeout_s: float) -> str | None:
        """Return the name of its weights, None where it does not say; ServerError where it does not answer at all.

        A paused or busy server does.
        """
        try:
            model = await self.call_json("GET", "/model_info", timeout_s=timeout_s)
        except (RequestRefused, Busy):
            return None
        weights: str | None = self.checked("/model_info", lambda: member(model, "weight_version", str, optional=True))
        return weights

    def forget_start(self) -> None:
        """It has new weights: whichever start of it is asked next is the one that has them."""
        self._start, self._known_s = None, 0.0

    @property
    def has_same_start(self) -> bool:
        """True where `info` is of the start that has the weights, as far as it was asked."""
        return self._start is None or (self.info is not None and self.info.start == self._start)

    async def check_start(self, *, timeout_s: float) -> None:
        """Raise ServerError where the server was started since it got the weights, whatever it calls them.

        It is asked where a connection was made since the last time, once for all that wait to know.
        """
        while self.info is not None and self.info.start is not None and self._known_s <= self.connected_s:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._learn_start(timeout_s))
            await asyncio.shield(self._asking)  # of all who wait, one may be cancelled

    async def _learn_start(self, timeout_s: float) -> None:
        try:
            start = start_of(await self._server_info(timeout_s=timeout_s))
        except RequestRefused as refusal:
            raise ServerError(str(refusal)) from refusal
        if self._start is not None and start != self._start:
            raise ServerError(f"{self.url}: was started anew, and no longer has the weights that were published to it.")
        self._start, self._known_s = start, time.monotonic()

    async def _server_info(self, *, timeout_s: float) -> dict[str, Any]:
        try:
            return await self.call_json("GET", "/server_info", timeout_s=timeout_s)
        except NotFound:  # before 0.5.6
            return await self.call_json("GET", "/get_server_info", timeout_s=timeout_s)

    async def probe(self, *, timeout_s: float) -> ServerInfo:
        """Ask what it says of itself, which a paused server answers too; the answer is kept in `info`."""
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
        """Ask for the version and, where it has a form, the checksums of the weights in use."""
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
        """Stop generating until `resume`; `flush` drops all keys and values, those of running requests too.

        mode: `abort` ends running requests, `retract` puts them back into the queue, `in_place` freezes them with their
        keys, which cannot be flushed. Servers before 0.5.6 know only abort; before 0.5.21 a flush needs it.
        """
        assert self.info is not None
        if flush and self.info.version < RETRACTED_FLUSH_SINCE:
            mode = "abort"  # what it ends is asked for again, with the tokens that it had
        body = {"mode": mode} if self.info.version >= PAUSE_MODES_SINCE else {}
        await self.command("/pause_generation", body, timeout_s=timeout_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while flush:
            try:
                await self.call("POST", "/flush_cache", {}, timeout_s=timeout_s)
                return
            except RequestRefused as error:  # its scheduler was told to put requests away, and is still at it
                if asyncio.get_running_loop().time() > deadline:
                    raise CommandRefused(f"{error} The cache could not be flushed within {timeout_s:g} s.") from error
            await asyncio.sleep(FLUSH_POLL_S)
