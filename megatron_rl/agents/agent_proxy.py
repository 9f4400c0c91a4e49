"""The HTTP side of agents: APIs that unmodified agents speak, by which all they ask for and get is recorded.

POST /v1/chat/completions, POST /v1/responses (OpenAI's), POST /v1/messages and /v1/messages/count_tokens (Anthropic's),
GET /v1/models
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
"""A request may have so many, and so many more for each token of the context: more text than any dialogue's."""
SIGN_OF_LIFE_S = 10.0
"""A stream says so often that its reply is still being generated, or a client would take the server for dead."""
COUNTS = "/count_tokens"
COUNT = MessagesApi.path + COUNTS
LOOPBACK = "127.0.0.1"
HUNG_UP = 499
"""Status of a request whose agent is gone."""


@dataclass(frozen=True, kw_only=True)
class ProxyAddress:
    """The address at which agents reach the proxy. The default is for those of this host.

    For example, for agents in containers and on other hosts:

        ProxyAddress(host="0.0.0.0", name="node7.cluster", certificate="node7.pem", private_key="node7.key")
    """

    host: str = LOOPBACK
    """The address to listen on."""
    name: str = ""
    """The host's name or address in the URL that agents are given; by default `host`."""
    certificate: str = ""
    """A file in PEM's form; with it the URL is https."""
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
        """ssl.SSLError where the files are no certificate and its key."""
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
    """The APIs of some sessions, from `async with` to its end; after that agents find nothing there."""

    def __init__(self, max_tokens: int, address: ProxyAddress | None = None) -> None:
        """max_tokens: of the longest dialogue."""
        self._address = address or ProxyAddress()
        self._sessions: dict[str, tuple[AgentSession, dict[str, AgentApi]]] = {}
        self._most_bytes = LEAST_BYTES + BYTES_PER_TOKEN * max_tokens
        app = web.Application(client_max_size=self._most_bytes)
        for api in (ChatApi, ResponsesApi, MessagesApi):
            app.router.add_post(api.path, self._ask)
        app.router.add_post(COUNT, self._ask)
        app.router.add_get("/v1/models", self._models)
        # An agent that goes away ends what was generated for it.
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
        """Answer a session's requests; afterwards they are refused, whatever its agent still does."""
        apis = ChatApi(session.options.tokenizer), ResponsesApi(), MessagesApi()
        self._sessions[session.key] = session, {api.path: api for api in apis}
        try:
            yield
        finally:
            await session.close()

    def _of(self, request: web.Request) -> tuple[AgentSession, dict[str, AgentApi]] | None:
        headers = request.headers  # OpenAI's clients send the one, Anthropic's the other
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
                return web.Response(status=HUNG_UP)  # which nobody reads
            return refusal(api, *told(error, session))


def is_hang_up(error: Exception, request: web.Request) -> bool:
    """Return whether an error is only that the agent has closed its connection."""
    is_closed = request.transport is None or request.transport.is_closing()
    return is_closed and isinstance(error, ConnectionError | web.RequestPayloadError)


Told = tuple[int, str, str | None, str | None]


def told(error: Exception, session: AgentSession) -> Told:
    """Return what an agent is told of an error: status, message, field and code. Raise what is none of a request."""
    match error:
        case BadRequest():
            return 400, str(error), error.field, None
        case SessionOver():
            return 403, str(error), None, None
        case ContextOutgrown():  # before RequestRefused, whose kind it is
            session.outgrown = str(error)  # also of a body too large to read, which the session never saw
            return 400, str(error), "messages", "context_length_exceeded"
        case RequestRefused() | ValueError() | RecursionError() | web.RequestPayloadError():
            return 400, str(error), None, None
        case RuntimeError():  # no server can answer now: clients try again by themselves
            return 503, str(error), None, None
    raise error


def refusal(
    api: AgentApi, status: int, message: str, field: str | None = None, code: str | None = None
) -> web.Response:
    return web.json_response(api.error(status, message, field, code), status=status)


async def stream(
    request: web.Request, session: AgentSession, api: AgentApi, body: dict[str, Any], asked: dict[str, Any]
) -> web.StreamResponse:
    """Send a reply as events while it is generated, with signs of life where nothing comes."""
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
            if not response.prepared:  # what is refused at once is refused by a status
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
        asking.cancel()  # where the agent hung up
    await response.write_eof()
    return response


async def first_of(asking: asyncio.Future[Answer], changed: asyncio.Event) -> None:
    """Return when the answer is there, or its progress has changed."""
    waiting = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait([asking, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def line(kind: str | None, data: dict[str, Any]) -> bytes:
    return ((f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data)}\n\n").encode()
