"""Sampling on rollout servers, which load saved weights by name when a request needs them.

A server holds few weights at a time: the embedded server one adapter or one whole model, SGLang two adapters and its
base. Requests for weights that are not loaded wait, in their order, until a place is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from megatron_rl.training_server.wire import Reply, Sampled, Top

FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 10.0
TIMEOUT_S = 3600.0
SGLANG_PLACES = 2
"""Number of adapters that an SGLang server can use at once: its --max-loras-per-batch (servers/server_process.py)."""
BASE = ""
"""Name of the weights that a server starts with."""


class SamplingFailed(RuntimeError):
    """The rollout servers did not answer."""


@dataclass(frozen=True)
class Sampling:
    """One sampling request.

    options: named as in SGLang's sampling_params. replies: number of replies. wants_prompt: whether to return the
    prompt's log-probabilities. top_prompt, top_reply: number of most likely tokens to return for each position of the
    prompt and of the replies.
    """

    ids: list[int]
    options: dict[str, Any]
    replies: int
    wants_prompt: bool
    top_prompt: int = 0
    top_reply: int = 0


@dataclass(eq=False)
class Server:
    """A rollout server, and the weights that are loaded on it.

    loaded: name of the weights -> number of requests that use them, most recently used last. pid: id of the server's
    process.
    """

    url: str
    pid: int = 0
    loaded: dict[str, int] = field(default_factory=lambda: {BASE: 0})
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sampler:
    """Samples from the rollout servers with saved weights. All calls must come from one event loop.

    starts: returns {URL: process id} of the running servers. A server whose process id has changed has lost its
    weights. is_whole: the weights are whole models, not adapters. base: folder of the model that the servers start
    with. patience_s: how long to retry while no server answers.
    """

    def __init__(
        self,
        starts: Callable[[], dict[str, int]],
        token: str,
        *,
        backend: str,
        is_whole: bool,
        base: Path,
        patience_s: float,
    ) -> None:
        self._starts, self._base, self._is_whole, self._patience_s = starts, base, is_whole, patience_s
        self._has_base_beside = backend == "sglang" and not is_whole
        self._places = SGLANG_PLACES if self._has_base_beside else 1
        self._is_sglang = backend == "sglang"
        self._servers: dict[str, Server] = {}
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._client: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def sample(self, weights: Path | None, asked: Sampling) -> Sampled:
        """Sample with the weights in a folder, or with the base model if `weights` is None.

        Raises ValueError if a server refuses the request, and SamplingFailed if no server answers for `patience_s`
        seconds.
        """
        deadline, failures = time.monotonic() + self._patience_s, 0
        while True:
            try:
                async with self._server_with(weights) as (server, name):
                    return await self._ask(server, name, asked)
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise SamplingFailed(f"the rollout servers do not answer: {error or type(error)}") from error
            await asyncio.sleep(min(FIRST_RETRY_S * 2**failures, LONGEST_RETRY_S))
            failures += 1

    @contextlib.asynccontextmanager
    async def _server_with(self, weights: Path | None) -> AsyncIterator[tuple[Server, str]]:
        """Yield a server that has these weights loaded, and their name there. They stay loaded until the block ends."""
        name, has_waited = BASE if weights is None else str(weights), False
        while True:
            server = self._choose(name)
            # After those that wait: otherwise a stream of requests for loaded weights would keep others out.
            if has_waited or not server.waiting:
                async with server.changing:
                    if name in server.loaded or (name == BASE and self._has_base_beside):
                        break
                    if await self._make_room(server):
                        await self._load(server, name)
                        server.loaded[name] = 0
                        break
            freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            server.waiting.append(freed)
            await freed
            has_waited = True
        server.loaded[name] = server.loaded.pop(name, 0) + 1  # the most recently used comes last
        try:
            yield server, name
        finally:
            if name in server.loaded:
                server.loaded[name] -= 1
            while server.waiting:
                if not (first := server.waiting.popleft()).done():
                    first.set_result(None)

    def _choose(self, name: str) -> Server:
        starts = self._starts()
        if not starts:
            raise aiohttp.ClientConnectionError("no rollout server runs now; see their logs in run.folder/servers")
        for url, pid in starts.items():
            if self._servers.get(url, Server(url)).pid != pid:
                self._servers[url] = Server(url, pid)
        servers = [self._servers[url] for url in starts]
        return min(servers, key=lambda server: (name not in server.loaded, sum(server.loaded.values())))

    async def _make_room(self, server: Server) -> bool:
        """Free a place on the server by unloading weights that no request uses. Return False if all are in use."""
        held = [name for name in server.loaded if name != BASE or not self._has_base_beside]
        if len(held) < self._places:
            return True
        unused = [name for name in held if server.loaded[name] == 0]
        if not unused:
            return False
        if unused[0] != BASE and not self._is_whole:
            await self._post(server, "/unload_lora_adapter", {"lora_name": unused[0]})
        del server.loaded[unused[0]]
        return True

    async def _load(self, server: Server, name: str) -> None:
        if self._is_whole:
            await self._post(server, "/update_weights_from_disk", {"model_path": name or str(self._base)})
        elif name != BASE:
            await self._post(server, "/load_lora_adapter", {"lora_name": name, "lora_path": name})

    async def _ask(self, server: Server, name: str, asked: Sampling) -> Sampled:
        body: dict[str, Any] = {
            "input_ids": asked.ids,
            "sampling_params": asked.options | {"n": asked.replies},
            "return_logprob": True,
            "logprob_start_len": 0 if asked.wants_prompt or asked.top_prompt else -1,
        }
        if name != BASE and not self._is_whole:
            body["lora_path"] = name
        if width := max(asked.top_prompt, asked.top_reply):
            if not self._is_sglang:
                rule = "the embedded server has none; start the server with rollout.backend=sglang"
                raise ValueError(f"topk_logprobs: {rule}.")
            body["top_logprobs_num"] = width
        answers = await self._post(server, "/generate", body)
        answers = answers if isinstance(answers, list) else [answers]
        first = answers[0]["meta_info"]
        replies, tops = [], []
        for answer in answers:
            facts = answer["meta_info"]
            logprobs = [logprob for logprob, *_ in facts["output_token_logprobs"]]
            replies.append(Reply(answer["output_ids"], logprobs, facts["finish_reason"]["type"] == "length"))
            if asked.top_reply:
                tops.append(_top(facts["output_top_logprobs"], asked.top_reply))
        return Sampled(
            replies,
            [logprob for logprob, *_ in first["input_token_logprobs"]] if asked.wants_prompt else None,
            int(first.get("cached_tokens", 0)),
            _top(first["input_top_logprobs"], asked.top_prompt) if asked.top_prompt else None,
            tops or None,
        )

    async def _post(self, server: Server, path: str, body: dict[str, Any]) -> Any:
        if self._client is None:
            self._client = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(TIMEOUT_S))
        async with self._client.post(server.url + path, data=orjson.dumps(body)) as response:
            content = await response.read()
            if response.status in (400, 413, 422):
                raise ValueError(_message(content))
            if response.status != 200:
                raise aiohttp.ClientError(f"{server.url}{path} answered {response.status}: {_message(content)}")
        return orjson.loads(content)


def _top(rows: list[Any], width: int) -> Top:
    return [None if row is None else [(token, logprob) for logprob, token, *_ in row[:width]] for row in rows]


def _message(content: bytes) -> str:
    try:
        said = orjson.loads(content)
        return str(said.get("message") or said["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return content[:500].decode(errors="replace")
