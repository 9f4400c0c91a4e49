"""One rollout server over HTTP, in SGLang's protocol (0.5.6 to 0.5.23; older ones without pause modes).

An HTTP 200 is not trusted: a reply is checked token by token before it is returned (reply_check.py). What can be tried
again raises ServerError, what the server will always refuse RequestRefused; both name URL, endpoint and the server's
message. Where this process is short of open files, or the server asks to wait, the call waits: nobody is to blame.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import json
import logging
import random
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
import orjson

from megatron_rl.api import ChecksumForm, HeldWeights, InfrastructureFailure, RequestRefused
from megatron_rl.config import GenerationConfig
from megatron_rl.config.rollout_section import shape_refusal
from megatron_rl.servers.reply_check import (
    SPANS_SINCE,
    Asked,
    NoLogprob,
    ReplyPart,
    as_object,
    member,
    read_reply,
    shown,
)
from megatron_rl.telemetry.spans import Spans

logger = logging.getLogger(__name__)
T = TypeVar("T")

SESSIONS_SINCE = (0, 5, 21)
PAUSE_MODES_SINCE = (0, 5, 6)
RETRACTED_FLUSH_SINCE = (0, 5, 21)
"""Before, requests that wait keep the cache from being flushed, and so do those that a pause has put back (0.5.19)."""
CHECKSUMS_SINCE = (0, 5, 17)
GPU_CHECKSUMS_UNTIL = (0, 5, 23)
"""Newest whose hash kernel was compared with what the trainer does."""
FLUSH_POLL_S = 0.05
MAX_ANSWER_BYTES = 256 * 1024**2
"""More than a list of checksums takes."""
MAX_MESSAGE = 1000
"""Characters of a server's message that are shown."""
REMEMBERED_VERSIONS = 256
READ_HERE_BYTES = 32 * 1024
"""Replies from this size on are read by another thread: to hand a smaller one over takes longer than to read it."""
BUSY = (408, 425, 429)
"""Statuses of a server, or of a router before it, that takes no more just now."""
ADAPTERS = "policy"
"""The name under which servers have a policy's adapters."""
OF_THE_REQUEST = (400, 413, 422)
"""Statuses with which a server refuses what it was asked to generate; others say that it, or its door, is not right."""
FIRST_BUSY_S, LONGEST_BUSY_S = 0.1, 30.0
"""How long a call waits that is asked to come again; what Retry-After says, within these."""
NO_FILES = (errno.EMFILE, errno.ENFILE)
FILES_WAIT_S = 0.2
MOST_EVENTS = 512
"""Of a streamed reply: each has all tokens so far, so that many events of a long reply would be very much."""
OUTPUT_IDS, UNFINISHED = re.compile(rb'"output_ids":\s*(\[[^\]]*\])'), re.compile(rb'"finish_reason":\s*null')
FILES_WARNING_EVERY_S = 60.0


QUANTIZING = ("quantization", "modelopt_quant", "torchao_config")
"""The fields of /server_info, and options of SGLang, by which weights are quantized."""


class ServerError(InfrastructureFailure):
    """The server is down, overloaded or answered rubbish; another try may succeed."""

    KIND = "server"


class BadReply(ServerError):
    """The server answered what it cannot have generated; which field shows it, and by which rule, is in the message."""


class UnknownLogprob(BadReply):
    """A reply without the log-probability of a token, which a sound server gives of a nearly certain policy."""


class Busy(ServerError):
    """The server is well, and asks to come again in `wait_s` seconds."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class CommandRefused(ServerError):
    """The server is well, and refused a control call."""


class NotFound(RequestRefused):
    """The server has no such endpoint."""


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """The facts that a server tells of itself; None for one that it does not tell."""

    version: tuple[int, ...]
    ranks: int
    """Ranks that it brings to a weight-update group: its tensor-parallel size, which DP attention divides further."""
    replicas: int
    """Copies of the weights that it has: its data-parallel size without DP attention."""
    stages: int
    """Its pipeline-parallel size."""
    nodes: int
    vocab_size: int | None
    context_length: int | None
    checksum_form: ChecksumForm | None
    """How it takes checksums of its weights; None where the trainer cannot do the same."""
    weight_version: str | None
    """Name of the weights it has now."""
    is_embedded: bool
    """It is this package's own server, not SGLang."""
    start: str | None
    """Differs from one start of the server to the next."""
    room: int | None
    """Tokens of a prompt and its reply that it can hold, by its context and its cache."""
    gives_text: bool
    quantization: str | None
    """The kind of quantization of its weights, as it or its model's config.json says."""
    gives_routes: bool
    """It was started to tell the experts of each token."""
    streams_whole: bool
    """Each event of a stream has all of the reply so far."""
    weight_loaders: tuple[str, ...]
    """Functions of its own start's choice that may load its weights."""

    @property
    def has_sessions(self) -> bool:
        return self.version >= SESSIONS_SINCE

    def refusal(self, publication: str) -> str:
        """Say why weights cannot be published to it in this way, with the remedy; empty where they can."""
        if self.quantization is not None:
            return (
                f"quantization = {self.quantization!r}: what is published would be copied into quantized weights under "
                f"the scales of others; start it without quantization, on the model in the trainer's dtype."
            )
        return shape_refusal(publication, replicas=self.replicas, stages=self.stages, nodes=self.nodes)


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


class ServerClient:
    """Calls one server. All coroutines run on the loop that `session` belongs to.

    options = {"freezes_steps": False, "vocab_size": None, "spans": Spans(), "readers": ThreadPoolExecutor(1)}
    server = ServerClient(url, session, **options)
    print((await server.probe(timeout_s=30.0)).version)
    params = sampling_params(GenerationConfig(max_new_tokens=8), generated=0, seed=1)
    part = await server.generate(server.asked("a", [1, 2, 3], params, version=0), [1, 2, 3], params)
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
        readers: Executor,
    ) -> None:
        """freezes_steps: updates come while a step is under way, because requests are paused in place. uses_adapters:
        requests are for the adapters that it has by the name ADAPTERS.

        vocab_size: the model's, as this side knows it; the server may say less, and nothing above. readers: threads in
        which long replies are read.
        """
        self.url, self.freezes_steps, self.vocab_size = url.rstrip("/"), freezes_steps, vocab_size
        self.uses_adapters = uses_adapters
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
        self.connected_s = 0.0
        """When a connection to it was made last; behind it may be a server that was started since the one before."""
        self._known_s = 0.0
        """When it was last asked which start of it this is."""
        self._start: str | None = None
        """The start that has the current weights; None until it is asked."""
        self._asking: asyncio.Task[None] | None = None
        self._warned_of_files_s = -FILES_WARNING_EVERY_S
        self._session, self.spans, self._readers = session, spans, readers

    async def call(
        self,
        method: str,
        endpoint: str,
        body: dict[str, Any] | bytes | None = None,
        *,
        timeout_s: float | None,
    ) -> bytes:
        """Return the body of an answer below 300; raise ServerError or RequestRefused for others.

        A server that is busy is asked again until `timeout_s`; without one, Busy is raised at once.
        """
        return b"".join(await self._pieces(method, endpoint, body, timeout_s, MAX_ANSWER_BYTES))

    async def _pieces(
        self,
        method: str,
        endpoint: str,
        body: dict[str, Any] | bytes | None,
        timeout_s: float | None,
        at_most: int,
        events: EventStream | None = None,
    ) -> list[bytes]:
        """The same of at most so many bytes, in the pieces in which it came; or of `events`, which are told, none."""
        deadline, busy = None if timeout_s is None else time.monotonic() + timeout_s, 0
        while True:
            try:
                return await self._call_once(method, endpoint, body, timeout_s, at_most, events)
            except Busy as error:
                if deadline is None or time.monotonic() + error.wait_s > deadline:
                    raise
                await asyncio.sleep(max(error.wait_s, backoff(busy)))
                busy += 1
            except OSError as error:
                if error.errno not in NO_FILES:  # else it waits, past any deadline: the server was never asked
                    raise ServerError(f"{self.url}{endpoint}: {type(error).__name__}: {error}") from error
                self._warn_of_files(error)
                await asyncio.sleep(FILES_WAIT_S)

    async def _call_once(
        self,
        method: str,
        endpoint: str,
        body: dict[str, Any] | bytes | None,
        timeout_s: float | None,
        at_most: int,
        events: EventStream | None = None,
    ) -> list[bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        data = orjson.dumps(body) if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json"} if isinstance(body, dict) else {}
        # A redirect would turn a POST into a GET, and lead to a server that nobody has named.
        sent = {"data": data, "headers": headers, "timeout": timeout, "allow_redirects": False}
        try:
            async with self._session.request(method, self.url + endpoint, **sent, trace_request_ctx=self) as answer:
                reading = self._read(answer, endpoint, at_most, events if answer.status == 200 else None)
                status, pieces = answer.status, await reading
                wait_s = seconds_of(answer.headers.get("Retry-After", ""))
        except TimeoutError as error:
            raise ServerError(f"{self.url}{endpoint}: no answer within {timeout_s:g} s.") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            if isinstance(error, OSError) and error.errno in NO_FILES:  # plain: `call` waits, and blames nobody
                raise OSError(error.errno, str(error)) from error
            raise ServerError(f"{self.url}{endpoint}: {type(error).__name__}: {error}; is the server up?") from error
        content = b"" if status < 300 else b"".join(pieces)
        if status in BUSY:  # before other 4xx: these are no refusals
            raise Busy(f"{self.url}{endpoint}: HTTP {status}: {message_of(content)}", wait_s)
        if status >= 500 or 300 <= status < 400:  # a redirect is no success either: nothing was done
            raise ServerError(f"{self.url}{endpoint}: HTTP {status}: {message_of(content)}")
        if status >= 400:
            kind = NotFound if status == 404 else RequestRefused
            hint = "; the server's token must be that in rollout.token_file" if status == 401 else ""
            raise kind(f"{self.url}{endpoint}: HTTP {status}: {message_of(content)}{hint}", status)
        return pieces

    def _warn_of_files(self, error: OSError) -> None:
        if time.monotonic() - self._warned_of_files_s >= FILES_WARNING_EVERY_S:
            self._warned_of_files_s = time.monotonic()
            logger.warning(
                "%s: requests to %s wait until files are closed. Raise the limit (ulimit -Hn), or lower "
                "rollout.max_concurrent_episodes.",
                *(error, self.url),
            )

    async def _read(
        self, answer: aiohttp.ClientResponse, endpoint: str, at_most: int, events: EventStream | None
    ) -> list[bytes]:
        """Return the body's pieces; BadReply for one that would fill this process's memory."""
        pieces, size = [], 0
        async for piece in answer.content.iter_any():
            if events is not None:
                events.take(piece)
                if len(events.rest) > at_most:
                    raise BadReply(f"{self.url}{endpoint}: an event of more than {at_most} bytes.")
                continue
            pieces.append(piece)
            size += len(piece)
            if size > at_most:
                raise BadReply(f"{self.url}{endpoint}: answered more than {at_most:,} bytes.")
        return pieces

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
        """POST a control request; CommandRefused if it is refused, which `success: false` is whatever the status."""
        try:
            with self.spans("control", endpoint, place=self.url):
                content = await self.call("POST", endpoint, body, timeout_s=timeout_s)
        except RequestRefused as refusal:  # nothing that a user wrote is in it, so no prompt is to blame
            raise CommandRefused(str(refusal)) from refusal
        try:
            answer = orjson.loads(content) if content else {}
        except orjson.JSONDecodeError:
            return  # some control endpoints answer with a line of text
        if isinstance(answer, dict) and not answer.get("success", True):
            raise CommandRefused(f"{self.url}{endpoint}: refused: {message_of(content)}")

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
        return self._checked("/model_info", lambda: member(model, "weight_version", str, optional=True))

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

    def _checked(self, endpoint: str, read: Callable[[], T]) -> T:
        """Return what `read` makes of an answer; ServerError with the reason where it makes nothing."""
        try:
            return read()
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{self.url}{endpoint}: the answer cannot be used: {error}") from error

    def open_call(self, call: asyncio.Task[ReplyPart]) -> None:
        """Note that it is under way; once it is over, it is taken out of `calls`."""
        if not self.calls:
            self.busy_since = time.monotonic()
        self.calls.add(call)

    def abandon_calls(self) -> None:
        """Cancel what it is generating; whoever waits for it asks another server."""
        for call in self.calls:
            call.cancel()

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
        self.info = self._checked("/server_info and /model_info", lambda: server_info(self.url, server, model))
        return self.info

    async def held_weights(self, *, form: ChecksumForm | None, timeout_s: float) -> HeldWeights:
        """Ask for the version and, where it has a form, the checksums of the weights in use."""
        model = await self.call_json("GET", "/model_info", timeout_s=timeout_s)
        version = self._checked("/model_info", lambda: member(model, "weight_version", str, optional=True))
        if form is None:
            return HeldWeights(version, {})
        answer = await self.call_json("POST", "/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)

        def checksums() -> dict[str, str]:
            found = {}
            for rank, part in zip(range(form.ranks), member(answer, "ranks", list), strict=True):
                sums = member(as_object(f"ranks[{rank}]", part), "checksums", dict)
                found |= {form.name_on(name, rank): member(sums, name, str) for name in sums}
            return found

        return HeldWeights(version, self._checked("/weights_checker", checksums))

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

    async def generate(
        self,
        asked: Asked,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> ReplyPart:
        """Generate once, however long it takes: the deadline of a reply is the caller's. BadReply for a wrong one.

        on_tokens: is told the ids so far, as they come. What it was told is kept, as an abort's, where the server dies.
        """
        body = {"rid": asked.rid, "input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        if self.uses_adapters:
            body["lora_path"] = ADAPTERS
        if asked.routes is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": asked.routes_from}
        at_most = min(asked.bytes_at_most, MAX_ANSWER_BYTES)
        events = EventStream(on_tokens) if on_tokens and (self.info is None or self.info.streams_whole) else None
        if events is not None:
            every = -(-asked.max_new_tokens // MOST_EVENTS)
            body |= {
                "stream": True,
                "sampling_params": sampling_params | ({"stream_interval": every} if every > 1 else {}),
            }
        try:
            pieces = await self._pieces("POST", "/generate", body, None, at_most, events)
        except RequestRefused as refusal:
            if refusal.status in OF_THE_REQUEST:
                raise
            raise ServerError(str(refusal)) from refusal  # its token or its door: another server may take the prompt
        except ServerError as error:
            if events is None or not events.is_begun:
                raise
            logger.info("%s; the reply goes on from the %d tokens that had come", error, events.count)
        if events is not None:
            pieces = [events.reply(f"{self.url}/generate")]
        try:
            if sum(map(len, pieces)) < READ_HERE_BYTES:
                part = read_reply(pieces, asked)
            else:  # an abort brings all that were under way at once, and the loop has more to do than to read them
                part = await asyncio.get_running_loop().run_in_executor(self._readers, read_reply, pieces, asked)
        except ValueError as error:
            kind = UnknownLogprob if isinstance(error, NoLogprob) else BadReply
            raise kind(f"{self.url}/generate: the reply cannot be used: {error}") from error
        self.last_reply_s = time.monotonic()  # of good replies alone: bad ones are no sign that it works
        return part

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


class EventStream:
    """The events of a streamed reply, each of which has all of it so far: the last one is the reply."""

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self._on_tokens = on_tokens
        self.rest, self._last = bytearray(), b""
        self.count = 0
        """Tokens that have come."""

    @property
    def is_begun(self) -> bool:
        return self.count > 0

    def take(self, piece: bytes) -> None:
        """Take what has come of the body. RequestRefused or ServerError where an event is one."""
        self.rest += piece
        *events, rest = self.rest.split(b"\n\n")
        self.rest = rest
        for event in events:
            content = bytes(event).removeprefix(b"data: ")
            if content.startswith(b'{"error"'):
                raise self._error(content)
            if (found := OUTPUT_IDS.search(content)) is not None:
                ids = orjson.loads(found[1])
                self._last, self.count = content, len(ids)
                self._on_tokens(ids)

    def _error(self, content: bytes) -> Exception:
        error = orjson.loads(content)["error"]
        code, words = (error.get("code"), message_of(content)) if isinstance(error, dict) else (None, str(error))
        is_refusal = type(code) is int and 400 <= code < 500 and code not in BUSY
        return RequestRefused(words, code) if is_refusal else ServerError(f"the stream ended: {words}")

    def reply(self, what: str) -> bytes:
        """Return the body of the whole reply; of one that was cut off, as an abort."""
        if not self._last:
            raise ServerError(f"{what}: the stream had no reply.")
        return UNFINISHED.sub(b'"finish_reason":{"type":"abort","message":"the stream was cut off"}', self._last)


def sampling_params(gconfig: GenerationConfig, *, generated: int, seed: int | None) -> dict[str, Any]:
    """Translate into SGLang's fields for a reply that already has `generated` tokens."""
    params: dict[str, Any] = {
        # Temperature 0 is SGLang's greedy; it reports log-probabilities at temperature 1 then.
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": 1.0 if gconfig.greedy else gconfig.top_p,
        "top_k": 1 if gconfig.greedy else gconfig.top_k,
        "max_new_tokens": gconfig.max_new_tokens - generated,
        "min_new_tokens": max(0, gconfig.min_new_tokens - generated),
        "ignore_eos": gconfig.ignore_eos,
        "skip_special_tokens": False,
    }
    if gconfig.stop:
        params["stop"] = list(gconfig.stop)
    if gconfig.stop_token_ids:
        params["stop_token_ids"] = list(gconfig.stop_token_ids)
    if seed is not None and not gconfig.greedy:
        params["sampling_seed"] = seed
    return params


def parse_version(text: str, url: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ServerError(
            f"{url}/server_info: version = {text!r}: must be SGLang's, such as 0.5.21; is this an SGLang server?"
        )
    return tuple(int(number) for number in match.groups())


def server_info(url: str, server: dict[str, Any], model: dict[str, Any]) -> ServerInfo:
    """Take apart what a server says of itself; ValueError for what cannot be."""
    config = model_config(model.get("model_path"))

    def size(name: str, *places: dict[str, Any]) -> int | None:
        found = next((place[name] for place in places if place.get(name) is not None), None)
        if found is not None and (type(found) is not int or found < 1):
            raise ValueError(f"{name} = {shown(found)}: must be a number from 1")
        return found

    # SGLang repeats what --context-length gave it, None without one: then the model's own bound holds.
    context_length = size("context_length", server) or size("max_position_embeddings", config)
    rooms = [room for room in (context_length, size("max_total_num_tokens", server)) if room is not None]
    return ServerInfo(
        version=parse_version(str(server.get("version", "")), url),
        ranks=size("tp_size", server) or 1,
        replicas=1 if server.get("enable_dp_attention") else size("dp_size", server) or 1,
        stages=size("pp_size", server) or 1,
        nodes=size("nnodes", server) or 1,
        vocab_size=size("vocab_size", server, model, config),
        context_length=context_length,
        checksum_form=checksum_form(server, config),
        # Not from /server_info, which keeps the version of the start.
        weight_version=member(model, "weight_version", str, optional=True),
        is_embedded=bool(server.get("embedded", False)),
        start=start_of(server),
        room=min(rooms, default=None),
        gives_text=not server.get("skip_tokenizer_init"),
        quantization=quantization_of(server, config),
        gives_routes=bool(server.get("enable_return_routed_experts")),
        streams_whole=not (server.get("incremental_streaming_output") or server.get("stream_output")),
        weight_loaders=tuple(map(str, server.get("custom_weight_loader") or ())),
    )


def quantization_of(server: dict[str, Any], config: dict[str, Any]) -> str | None:
    """Return the name of how a server's weights are quantized, by its arguments or its model's config.json."""
    given = next((str(server[key]) for key in QUANTIZING if server.get(key) not in (None, "", "unquant")), None)
    method = config.get("quantization_config")
    return given or (None if method is None else str(dict(method).get("quant_method", "by its config.json")))


def start_of(server: dict[str, Any]) -> str | None:
    """Return what differs from one start of a server to the next: when it was, or SGLang's measurements of it."""
    start = server.get("startup_time")
    return None if start is None else str(orjson.dumps(start))


def backoff(attempt: int) -> float:
    """Seconds before the next attempt, so that all who wait do not come at once."""
    # The exponent's bound: a server may be busy for days, and no float has 2^1024.
    return min(LONGEST_BUSY_S, FIRST_BUSY_S * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)


def seconds_of(retry_after: str) -> float:
    """Return the seconds that a Retry-After header asks for, at most as many as this client would wait."""
    if re.fullmatch(r"[0-9]{1,9}", retry_after):
        seconds = float(retry_after)
    else:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            seconds = 0.0
    return min(LONGEST_BUSY_S, max(FIRST_BUSY_S, seconds))


def noting_connections() -> aiohttp.TraceConfig:
    """For a session of ServerClients: each knows when a connection to its server was made last."""

    async def note(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
        context.trace_request_ctx.connected_s = time.monotonic()

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(note)
    return trace


def checksum_form(server_info: dict[str, Any], config: dict[str, Any]) -> ChecksumForm | None:
    """Return how a server takes checksums, from its own description; None where that is not known.

    config: the model's config.json, or nothing.
    """
    dtype = server_info.get("dtype")
    dtype = dtype if dtype in ("float32", "bfloat16", "float16") else None
    if server_info.get("embedded"):
        return ChecksumForm("embedded", dtype)
    version, device = parse_version(str(server_info.get("version", "")), ""), server_info.get("device")
    # Quantized weights are other than those that are sent, each pipeline stage has its part, and DP attention another.
    is_plain = quantization_of(server_info, {}) is None and not server_info.get("enable_dp_attention")
    is_plain = is_plain and all((server_info.get(key) or 1) == 1 for key in ("pp_size", "dp_size"))
    if not is_plain or version < CHECKSUMS_SINCE or device not in ("cpu", "cuda"):
        return None
    if device == "cuda" and version > GPU_CHECKSUMS_UNTIL:  # a wrong guess would drop every server
        return None
    ranks = int(server_info.get("tp_size") or 1)
    kind = "sglang_cpu" if device == "cpu" else "sglang_gpu"
    kv_heads, experts = config.get("num_key_value_heads"), experts_as_sent(server_info, config)
    expert_ranks = int(server_info.get("ep_size") or 1) if experts is not None else 1
    return ChecksumForm(kind, dtype, ranks, kv_heads if ranks > 1 else None, experts, expert_ranks)


def experts_as_sent(server_info: dict[str, Any], config: dict[str, Any]) -> int | None:
    """Return how many experts a mixture of SGLang's has, each with its gate above its projection up; None where it may
    keep them in another way, such as with a shared expert among them, several times, or in a kernel's own order."""
    counts = (config.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts"))
    count = next((count for count in counts if count), None)
    has_shared = config.get("n_shared_experts") and not server_info.get("disable_shared_experts_fusion")
    is_moved = server_info.get("ep_num_redundant_experts") or server_info.get("enable_eplb")
    is_moved = is_moved or (server_info.get("moe_a2a_backend") or "none") != "none"
    # On a GPU `auto` may stand for a kernel that has the two parts the other way round; a CPU has one way.
    in_order = server_info.get("device") == "cpu" or server_info.get("moe_runner_backend") == "triton"
    return count if in_order and not has_shared and not is_moved else None


def model_config(model_path: Any) -> dict[str, Any]:
    """Return the config.json of a model folder, empty where this host has none, as the server may be elsewhere."""
    config = Path(str(model_path)) / "config.json"
    return json.loads(config.read_text()) if config.is_file() else {}


def message_of(content: bytes) -> str:
    """Return the message of an error answer, in whichever of SGLang's shapes it comes."""
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content[:300].decode(errors="replace").strip() or "(empty answer)"
    error = answer.get("error", answer.get("message", answer)) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        error = error.get("message", error)
    return (error if isinstance(error, str) else shown(error))[:MAX_MESSAGE]
