"""One rollout server over HTTP, in SGLang's protocol (0.5.6 to 0.5.23; older ones without pause modes).

An HTTP 200 is not trusted: a reply is checked token by token before it is returned. What can be tried again raises
ServerError, what the server will always refuse RequestRefused; both name URL, endpoint and the server's message.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from megatron_rl.api import ChecksumForm, HeldWeights
from megatron_rl.config import GenerationConfig
from megatron_rl.telemetry.spans import Spans

SESSIONS_SINCE = (0, 5, 21)
PAUSE_MODES_SINCE = (0, 5, 6)
RETRACTED_FLUSH_SINCE = (0, 5, 21)
"""Before, requests that wait keep the cache from being flushed, and so do those that a pause has put back (0.5.19)."""
CHECKSUMS_SINCE = (0, 5, 17)
GPU_CHECKSUMS_UNTIL = (0, 5, 23)
"""Newest whose hash kernel was compared with what the trainer does."""
FLUSH_POLL_S = 0.05
MAX_ANSWER_BYTES = 256 * 1024**2
"""More than the longest reply or a list of checksums takes."""
MAX_MESSAGE = 1000
"""Characters of a server's message that are shown."""
REMEMBERED_VERSIONS = 256
TIMING = ("request_received_ts", "queue_time", "first_token_latency", "e2e_latency")
"""Seconds in a reply's meta_info; SGLang gives the last one always, the others only with --enable-metrics."""


class ServerError(RuntimeError):
    """The server is down, overloaded or answered rubbish; another try may succeed."""


class CommandRefused(ServerError):
    """The server is well, and refused a control call."""


class RequestRefused(ValueError):
    """The server understood the request and refused it (4xx); sending it again would be refused again."""


class NotFound(RequestRefused):
    """The server has no such endpoint."""


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What a server says of itself. None where it does not say."""

    version: tuple[int, ...]
    ranks: int
    """Ranks that it brings to a weight-update group: its tensor-parallel size."""
    replicas: int
    """Its data-parallel size; weight updates need 1."""
    vocab_size: int | None
    context_length: int | None
    checksum_form: ChecksumForm | None
    """How it takes checksums of its weights; None where the trainer cannot do the same."""
    weight_version: str | None
    """Name of the weights it has now."""
    is_embedded: bool
    """It is this package's own server, not SGLang."""

    @property
    def has_sessions(self) -> bool:
        return self.version >= SESSIONS_SINCE

    @property
    def has_pause_modes(self) -> bool:
        return self.version >= PAUSE_MODES_SINCE

    @property
    def runs_ahead(self) -> bool:
        """It starts a step before it has booked the last one, as SGLang does and the embedded server does not."""
        return not self.is_embedded


@dataclass(kw_only=True)
class ReplyPart:
    """What one HTTP call generated; a reply has several parts where it was interrupted."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str
    """stop, length or abort."""
    text: str
    cached_tokens: int
    """Prompt tokens whose keys the server had already."""
    spans: list[tuple[str, int]]
    """(weight version, tokens), in order; empty where the server reports none."""
    timing: dict[str, float] = field(default_factory=dict)
    """What the server says of its part in the time: those of TIMING that it reports."""


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
            return len(part.tokens) if self.age else 0
        stale = 0
        for number, (version, tokens) in enumerate(part.spans):
            reuses = number > 0 or part.cached_tokens > 0
            stale += tokens if reuses and self._under.get(version, 0) > 0 else 0
        return stale


class ServerClient:
    """Calls one server. All coroutines run on the loop that `session` belongs to."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, *, freezes_steps: bool = False, spans: Spans | None = None
    ) -> None:
        """`freezes_steps`: updates come while a step is under way, because requests are paused in place."""
        self.url, self.freezes_steps = url.rstrip("/"), freezes_steps
        self.calls: set[asyncio.Task[ReplyPart]] = set()
        """Generation requests of this client that are under way."""
        self.info: ServerInfo | None = None
        self.cache = CacheAge()
        self.keeps_cache = False
        """The pause under way, or the last one, flushed nothing."""
        self._session = session
        self.spans = spans or Spans()

    async def call(
        self, method: str, endpoint: str, body: dict[str, Any] | bytes | None = None, *, timeout_s: float | None
    ) -> bytes:
        """Return the body of an answer below 400; raise ServerError or RequestRefused for others."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        data = orjson.dumps(body) if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json"} if isinstance(body, dict) else {}
        try:
            async with self._session.request(
                method, self.url + endpoint, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                status, content = answer.status, await self._read(answer, endpoint)
        except TimeoutError as error:
            raise ServerError(f"{self.url}{endpoint}: no answer within {timeout_s:g} s.") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerError(f"{self.url}{endpoint}: {type(error).__name__}: {error}; is the server up?") from error
        if status >= 500:
            raise ServerError(f"{self.url}{endpoint}: HTTP {status}: {message_of(content)}")
        if status >= 400:
            kind = NotFound if status == 404 else RequestRefused
            hint = "; the server's token must be that in rollout.token_file" if status == 401 else ""
            raise kind(f"{self.url}{endpoint}: HTTP {status}: {message_of(content)}{hint}")
        return content

    async def _read(self, answer: aiohttp.ClientResponse, endpoint: str) -> bytes:
        """Return the body; ServerError for one that would fill this process's memory."""
        pieces, size = [], 0
        async for piece in answer.content.iter_any():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise ServerError(f"{self.url}{endpoint}: answered more than {MAX_ANSWER_BYTES:,} bytes.")
        return b"".join(pieces)

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
        except RequestRefused as refusal:  # nothing that a user wrote is in it
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

    async def give_sign_of_life(self, *, timeout_s: float) -> str | None:
        """Return the name of its weights, None where it does not say; ServerError where it does not answer at all.

        A paused or busy server does.
        """
        try:
            return (await self.call_json("GET", "/model_info", timeout_s=timeout_s)).get("weight_version")
        except RequestRefused:
            return None

    def abandon_calls(self) -> None:
        """Cancel what it is generating; whoever waits for it asks another server."""
        for call in self.calls:
            call.cancel()

    async def probe(self, *, timeout_s: float) -> ServerInfo:
        """Ask what it says of itself, which a paused server answers too; the answer is kept in `info`."""
        try:
            server = await self.call_json("GET", "/server_info", timeout_s=timeout_s)
        except NotFound:  # before 0.5.6
            try:
                server = await self.call_json("GET", "/get_server_info", timeout_s=timeout_s)
            except NotFound as error:
                raise NotFound(
                    f"{self.url}/server_info: not found. This is no SGLang server, or a router before some, which "
                    f"forwards no control calls: name the servers themselves in rollout.servers."
                ) from error
        try:
            model = await self.call_json("GET", "/model_info", timeout_s=timeout_s)
        except NotFound:
            model = await self.call_json("GET", "/get_model_info", timeout_s=timeout_s)
        config = model_config(model.get("model_path"))
        self.info = ServerInfo(
            version=parse_version(str(server.get("version", "")), self.url),
            ranks=int(server.get("tp_size") or 1),
            replicas=int(server.get("dp_size") or 1),
            vocab_size=server.get("vocab_size") or model.get("vocab_size") or config.get("vocab_size"),
            context_length=server.get("context_length") or config.get("max_position_embeddings"),
            checksum_form=checksum_form(server, config.get("num_key_value_heads")),
            # Not from /server_info, which keeps the version of the start.
            weight_version=model.get("weight_version"),
            is_embedded=bool(server.get("embedded", False)),
        )
        return self.info

    async def held_weights(self, *, form: ChecksumForm | None, timeout_s: float) -> HeldWeights:
        """Ask for the version and, where it has a form, the checksums of the weights in use."""
        model = await self.call_json("GET", "/model_info", timeout_s=timeout_s)
        checksums = {}
        if form is not None:
            answer = await self.call_json("POST", "/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)
            try:
                for rank, part in zip(range(form.ranks), answer["ranks"], strict=True):
                    checksums |= {form.name_on(name, rank): found for name, found in part["checksums"].items()}
            except (KeyError, TypeError, ValueError) as error:
                raise ServerError(f"{self.url}/weights_checker: no checksums in the answer: {error!r}") from error
        return HeldWeights(model.get("weight_version"), checksums)

    async def generate(
        self, rid: str, input_ids: list[int], sampling_params: dict[str, Any], *, version: int
    ) -> ReplyPart:
        """Generate once, however long it takes: the deadline of a reply is the caller's.

        `version` counts for tokens whose version the server does not report.
        """
        body = {"rid": rid, "input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        answer = await self.call_json("POST", "/generate", body, timeout_s=None)
        vocab_size = self.info.vocab_size if self.info else None
        late = int(self.freezes_steps and self.info is not None and self.info.runs_ahead)
        try:
            return parse_reply(answer, version=version, vocab_size=vocab_size, late=late)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerError(
                f"{self.url}/generate: the reply cannot be used: {type(error).__name__}: {error}"
            ) from error

    async def pause(self, mode: str, *, flush: bool, timeout_s: float) -> None:
        """Stop generating until `resume`; `flush` drops all keys and values, those of running requests too.

        mode: `abort` ends running requests, `retract` puts them back into the queue, `in_place` freezes them with their
        keys, which cannot be flushed. Servers before 0.5.6 know only abort; before 0.5.21 a flush needs it.
        """
        assert self.info is not None
        if flush and self.info.version < RETRACTED_FLUSH_SINCE:
            mode = "abort"
        body = {"mode": mode} if self.info.has_pause_modes else {}
        await self.command("/pause_generation", body, timeout_s=timeout_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while flush:
            try:
                await self.call("POST", "/flush_cache", {}, timeout_s=timeout_s)
                return
            except RequestRefused as error:  # still putting requests away
                if asyncio.get_running_loop().time() > deadline:
                    raise CommandRefused(f"{error} The cache could not be flushed within {timeout_s:g} s.") from error
            await asyncio.sleep(FLUSH_POLL_S)


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


def parse_reply(answer: dict[str, Any], *, version: int, vocab_size: int | None, late: int = 0) -> ReplyPart:
    """Check a /generate answer and take it apart. Raises ValueError, KeyError, TypeError or IndexError for rubbish."""
    meta = answer["meta_info"]
    finish = meta["finish_reason"]
    kind = finish["type"]
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason = {finish}: must be of type stop, length or abort")
    if finish.get("matched") == "NaN happened":
        raise ValueError("finish_reason = 'NaN happened': the model gave logits that are not numbers")
    # Requests aborted in the queue have no log-probabilities and may lack keys.
    entries = meta.get("output_token_logprobs") or []
    if len(entries) != meta.get("completion_tokens", len(entries)):
        raise ValueError(f"{len(entries)} output_token_logprobs for {meta['completion_tokens']} completion_tokens")
    if not entries and kind != "abort":
        raise ValueError(f"no tokens, but finish_reason = {finish}")
    tokens = [int(entry[1]) for entry in entries]
    logprobs = [float(entry[0]) for entry in entries]
    for position, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            raise ValueError(f"token {token} at position {position} is outside the vocabulary of {vocab_size}")
        if logprob > 1e-3:  # a kernel may round log 1 to a little above 0
            raise ValueError(f"log-probability {logprob} at position {position} is not one")
    return ReplyPart(
        tokens=tokens,
        logprobs=logprobs,
        versions=token_versions(meta.get("weight_versions"), len(tokens), version, late=late),
        stop_reason=kind,
        text=answer.get("text") or "",
        cached_tokens=int(meta.get("cached_tokens") or 0),
        spans=named_spans(meta.get("weight_versions") or [], len(tokens), late=late),
        timing={key: float(meta[key]) for key in TIMING if meta.get(key) is not None},
    )


def token_versions(spans: list[dict[str, Any]] | None, count: int, pinned: int, *, late: int = 0) -> list[int]:
    """Return the version of each of `count` tokens from the server's spans.

    Without spans, and under a name that is no number, it is `pinned`: the version when the request was sent, the oldest
    that can have sampled the token. The first `late` tokens of a later span were sampled before the server changed the
    name, and count for the span before.
    """
    versions = [pinned] * count
    for number, span in enumerate(spans or []):
        name = str(span["version"])
        first = int(span["start"]) + (late if number > 0 else 0)
        last = int(span["end"]) + late
        if re.fullmatch(r"-?\d+", name):
            for position in range(max(0, first), min(count, last)):
                versions[position] = int(name)
    return versions


def named_spans(spans: list[dict[str, Any]], count: int, *, late: int) -> list[tuple[str, int]]:
    """Return (weight version, tokens) of each span, with `late` as above."""
    ends = [min(count, int(span["end"]) + late) for span in spans]
    return [(str(span["version"]), end - begin) for span, begin, end in zip(spans, [0, *ends], ends, strict=False)]


def parse_version(text: str, url: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ServerError(
            f"{url}/server_info: version = {text!r}: must be SGLang's, such as 0.5.21; is this an SGLang server?"
        )
    return tuple(int(number) for number in match.groups())


def checksum_form(server_info: dict[str, Any], kv_heads: int | None) -> ChecksumForm | None:
    """Return how a server takes checksums, from its own description; None where that is not known."""
    dtype = server_info.get("dtype")
    dtype = dtype if dtype in ("float32", "bfloat16", "float16") else None
    if server_info.get("embedded"):
        return ChecksumForm("embedded", dtype)
    version, device = parse_version(str(server_info.get("version", "")), ""), server_info.get("device")
    # Quantized weights are other than those that are sent, and each pipeline stage has its part.
    is_plain = server_info.get("quantization") is None and (server_info.get("pp_size") or 1) == 1
    is_plain = is_plain and not server_info.get("enable_dp_attention")
    if not is_plain or version < CHECKSUMS_SINCE or device not in ("cpu", "cuda"):
        return None
    if device == "cuda" and version > GPU_CHECKSUMS_UNTIL:
        return None
    ranks = int(server_info.get("tp_size") or 1)
    kind = "sglang_cpu" if device == "cpu" else "sglang_gpu"
    return ChecksumForm(kind, dtype, ranks, kv_heads if ranks > 1 else None)


def model_config(model_path: Any) -> dict[str, Any]:
    """Return the config.json of a model folder, empty where this host cannot read it."""
    config = Path(str(model_path)) / "config.json"
    return json.loads(config.read_text()) if config.is_file() else {}


def message_of(content: bytes) -> str:
    """Return the message of an error answer, in whichever of SGLang's shapes it comes."""
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content[:300].decode(errors="replace").strip() or "(empty answer)"
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("message", answer))
        if isinstance(error, dict):
            error = error.get("message", error)
        return str(error)[:MAX_MESSAGE]
    return str(answer)[:MAX_MESSAGE]
