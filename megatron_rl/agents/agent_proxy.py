"""HTTP server for unmodified agents. It implements the APIs that they call, and records all requests and replies.

- OpenAI: POST /v1/chat/completions, POST /v1/responses
- Anthropic: POST /v1/messages, POST /v1/messages/count_tokens
- both: GET /v1/models
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from megatron_rl.agents.agent_api import AgentApi, Answer, Event
from megatron_rl.agents.agent_request import BadRequest
from megatron_rl.agents.agent_session import AgentSession, SessionOver
from megatron_rl.agents.chat_api import ChatApi
from megatron_rl.agents.messages_api import MessagesApi
from megatron_rl.agents.responses_api import ResponsesApi
from megatron_rl.agents.streamed_text import Progress
from megatron_rl.api import ContextOutgrown, RequestRefused
from megatron_rl.config.strict_json import read_json

LEAST_BYTES, BYTES_PER_TOKEN = 2**20, 64
"""Maximum request size: LEAST_BYTES plus BYTES_PER_TOKEN per token of the context. Any dialogue's text fits."""
SIGN_OF_LIFE_S = 10.0
"""Interval of keep-alive comments in a stream while a reply is generated, so that clients do not time out."""
COUNTS = "/count_tokens"
COUNT = MessagesApi.path + COUNTS
LOOPBACK = "127.0.0.1"
HUNG_UP = 499
"""HTTP status for a request whose agent has disconnected."""


@dataclass(frozen=True, kw_only=True)
class ProxyAddress:
    """Address at which agents reach the proxy. The default serves agents on this host.

    For example, for agents in containers and on other hosts:

        ProxyAddress(host="0.0.0.0", name="node7.cluster", certificate="node7.pem", private_key="node7.key")
    """

    host: str = LOOPBACK
    """Address to listen on."""
    name: str = ""
    """Host name or address in the URL that agents get; `host` if empty."""
    certificate: str = ""
    """PEM file with the certificate. If it is set, the URL is https."""
    private_key: str = ""

    def __post_init__(self) -> None:
        if self.host in ("0.0.0.0", "::") and not self.name:
            raise ValueError(
                f"host = {self.host!r}: every address of this host, and agents must be given one; set name to it."
            )
        for field in ("certificate", "private_key"):
            path = getattr(self, field)
            if path and not Path(path).is_file():
                raise ValueError(f"{field} = {path!r}: there is no such file.")
        if self.private_key and not self.certificate:
            raise ValueError(f"private_key = {self.private_key!r}: is for a certificate; set certificate, too.")

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context; None without a certificate.

        Raises ssl.SSLError if the files do not hold a certificate and its key.
        """
        if not self.certificate:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.private_key or None)
        return context

    def url(self, port: int) -> str:
        name = self.name or self.host
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}/v1"


class AgentProxy:
    """HTTP server for any number of sessions. It runs for the duration of `async with`."""

    def __init__(self, max_tokens: int, address: ProxyAddress | None = None) -> None:
        """max_tokens: maximum dialogue length."""
        self._address = address or ProxyAddress()
        self._sessions: dict[str, tuple[AgentSession, dict[str, AgentApi]]] = {}
        self._most_bytes = LEAST_BYTES + BYTES_PER_TOKEN * max_tokens
        app = web.Application(client_max_size=self._most_bytes)
        for api in (ChatApi, ResponsesApi, MessagesApi):
            app.router.add_post(api.path, self._ask)
        app.router.add_post(COUNT, self._ask)
        app.router.add_get("/v1/models", self._models)
        # If an agent disconnects, its generation is cancelled.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        self.base_url = ""

    async def __aenter__(self) -> AgentProxy:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._address.host, 0, ssl_context=self._address.context())
        await site.start()
        self.base_url = self._address.url(self._runner.addresses[0][1])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @asynccontextmanager
    async def serving(self, session: AgentSession) -> AsyncIterator[None]:
        """Answer a session's requests within the `async with` block. Later requests are refused."""
        apis = ChatApi(session.options.tokenizer), ResponsesApi(), MessagesApi()
        self._sessions[session.key] = session, {api.path: api for api in apis}
        try:
            yield
        finally:
            await session.close()

    def _of(self, request: web.Request) -> tuple[AgentSession, dict[str, AgentApi]] | None:
        headers = request.headers  # OpenAI's clients send Authorization, Anthropic's x-api-key
        key = headers.get("Authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
        return self._sessions.get(key)

    async def _models(self, request: web.Request) -> web.Response:
        if self._of(request) is None:
            return web.json_response({"error": {"message": "wrong API key"}}, status=401)
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "run"}]}
        )

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = read_json(await request.read())
        except web.HTTPRequestEntityTooLarge as error:
            raise ContextOutgrown(
                f"the body has more than {self._most_bytes} bytes, and no dialogue of the context's tokens has"
            ) from error
        if not isinstance(body, dict):
            raise ValueError(f"the body is a JSON {type(body).__name__}: must be an object")
        return body

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        if (found := self._of(request)) is None:
            api = MessagesApi() if request.path.startswith(MessagesApi.path) else ResponsesApi()
            return refusal(api, 401, "wrong API key; use the one that the agent was started with")
        session, apis = found
        api = apis[request.path.removesuffix(COUNTS)]
        try:
            body = await self._body(request)
            asked = api.as_chat(body)
            if request.path == COUNT:
                return web.json_response({"input_tokens": await session.count(asked)})
            if body.get("stream"):
                return await stream(request, session, api, body, asked)
            return web.json_response(api.result(body, await session.answer(asked, shows_thoughts=api.shows_thoughts)))
        except Exception as error:
            if is_hang_up(error, request):
                return web.Response(status=HUNG_UP)  # nobody reads the answer
            return refusal(api, *told(error, session))


def is_hang_up(error: Exception, request: web.Request) -> bool:
    """Return True if an error only means that the agent has closed its connection."""
    is_closed = request.transport is None or request.transport.is_closing()
    return is_closed and isinstance(error, ConnectionError | web.RequestPayloadError)


Told = tuple[int, str, str | None, str | None]


def told(error: Exception, session: AgentSession) -> Told:
    """Return the status, message, field and code with which an error is reported to the agent.

    The error is raised again if it is of a kind that no request can cause.
    """
    match error:
        case BadRequest():
            return 400, str(error), error.field, None
        case SessionOver():
            return 403, str(error), None, None
        case ContextOutgrown():  # before RequestRefused, its base class
            session.outgrown = str(error)  # also for a body too large to read, which the session never saw
            return 400, str(error), "messages", "context_length_exceeded"
        case RequestRefused() | ValueError() | RecursionError() | web.RequestPayloadError():
            return 400, str(error), None, None
        case RuntimeError():  # no server can answer now; clients retry by themselves
            return 503, str(error), None, None
    raise error


def refusal(
    api: AgentApi, status: int, message: str, field: str | None = None, code: str | None = None
) -> web.Response:
    return web.json_response(api.error(status, message, field, code), status=status)


async def stream(
    request: web.Request, session: AgentSession, api: AgentApi, body: dict[str, Any], asked: dict[str, Any]
) -> web.StreamResponse:
    """Stream a reply as events while it is generated, with keep-alive comments in between."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    progress, told_by = Progress(), api.stream(body)
    answering = session.answer(asked, shows_thoughts=api.shows_thoughts, progress=progress)
    asking, is_begun = asyncio.ensure_future(answering), False

    async def send(events: Iterable[Event]) -> None:
        await response.write(b"".join(line(kind, data) for kind, data in events))

    try:
        while not asking.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    await first_of(asking, progress.changed)
            if asking.done():
                break
            if not response.prepared:  # an immediate refusal still gets an HTTP status
                await response.prepare(request)
            if not progress.changed.is_set():
                await response.write(b": the reply is being generated\n\n")
                continue
            progress.changed.clear()
            if not is_begun:
                is_begun = True
                await send(told_by.begin(progress.input_len))
            await send(told_by.advance(progress.thoughts, progress.said))
        answer = asking.result()
        if not response.prepared:
            await response.prepare(request)
        if not is_begun:
            await send(told_by.begin(answer.reply.input_len))
        await send(told_by.finish(answer))
        await response.write(api.last_line)
    except Exception as error:
        if not response.prepared or is_hang_up(error, request):
            raise
        await response.write(line("error", api.error(*told(error, session))))
    finally:
        asking.cancel()  # if the agent disconnected
    await response.write_eof()
    return response


async def first_of(asking: asyncio.Future[Answer], changed: asyncio.Event) -> None:
    """Wait until the answer is complete or its progress has changed."""
    waiting = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait([asking, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def line(kind: str | None, data: dict[str, Any]) -> bytes:
    return ((f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data)}\n\n").encode()
