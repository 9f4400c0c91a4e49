"""The HTTP API that the package `tinker` speaks, on an event loop in a thread of rank 0.

The token in each request names the client's tenant. For the client, nothing of other tenants exists.
Results are fetched by polling: an answer is held back until the result is there, for POLL_S at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from megatron_rl.training_server import wire
from megatron_rl.training_server.client_models import Result, json_result
from megatron_rl.training_server.client_sessions import Refused
from megatron_rl.training_server.sampler import Sampler, Sampling, SamplingFailed
from megatron_rl.training_server.saved_weights import facts_of
from megatron_rl.training_server.service import Service

logger = logging.getLogger(__name__)

POLL_S = 25.0
"""Longest time in seconds for which a poll for a result is held open. The client gives up after 45 seconds."""
MAX_BODY_BYTES = 64 * 1024**2
MOST_SAMPLES = 20_000
"""Maximum number of sampling requests whose results are kept. If there are more, the oldest are cancelled and
dropped."""
MOST_SAMPLING = 4096
"""Maximum number of sampling requests in progress. Further ones get status 429, and the client repeats them later."""
TENANT = web.RequestKey("tenant", str)
PROTO = "application/x-protobuf"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TrainingAPI:
    """The routes of the HTTP API. tokens: maps each client's token to its tenant."""

    def __init__(self, service: Service, sampler: Sampler, tokens: Mapping[str, str]) -> None:
        self.service, self.sampler, self.tokens = service, sampler, dict(tokens)
        self._samples: OrderedDict[str, asyncio.Task[Result]] = OrderedDict()
        self._clones: dict[str, int] = {}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        posts = {
            "client/config": _always({"pjwt_auth_enabled": False, "use_pyqwest_transport": False}),
            "client/dynamic_config": _always({"sample_cancel_enabled": True}),
            "telemetry": _always({"status": "accepted"}),  # and dropped
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish_session,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._to_model("optim_step"),
            "save_weights": self._to_model("weights"),
            "save_weights_for_sampler": self._to_model("sampler_weights"),
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampling_session,
            "join_sampling_session": self._join_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }
        gets = {
            "healthz": _always({"status": "ok"}),
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._get_sampler,
            "training_runs": self._training_runs,
            "training_runs/{model}": self._training_run,
            "training_runs/{model}/checkpoints": self._checkpoints,
            "checkpoints": self._checkpoints,
        }
        app.add_routes([web.post(f"/api/v1/{path}", handler) for path, handler in posts.items()])
        app.add_routes([web.get(f"/api/v1/{path}", handler) for path, handler in gets.items()])
        app.add_routes([web.delete("/api/v1/training_runs/{model}/checkpoints/{kind}/{name}", self._delete)])
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            request[TENANT] = self._tenant(request)
            return await handler(request)
        except Refused as error:
            return _answer({"detail": str(error)}, error.status)
        except ValueError as error:
            return _answer({"detail": str(error)}, 400)
        except web.HTTPException as error:
            return _answer({"detail": f"{request.method} {request.path[:200]}: {error.reason}"}, error.status)

    def _tenant(self, http: web.Request) -> str:
        sent = http.headers.get("X-API-Key", "").encode(errors="surrogateescape")
        found = ""
        for token, tenant in self.tokens.items():  # compares with all, so that the time says nothing
            if hmac.compare_digest(sent, token.encode()):
                found = tenant
        if not found:
            rule = "the API key is none of this server's"
            raise Refused(f"{rule}; set TINKER_API_KEY to the token in its token file.", 401)
        return found

    # -- service

    async def _capabilities(self, http: web.Request) -> web.Response:
        model = {"model_name": self.service.base_model, "max_context_length": self.service.longest}
        return _answer({"supported_models": [model | {"trainable": True, "sampleable": True}]})

    async def _create_session(self, http: web.Request) -> web.Response:
        return _answer({"type": "create_session", "session_id": self.service.sessions.create(http[TENANT])})

    async def _heartbeat(self, http: web.Request) -> web.Response:
        self.service.sessions.get(http[TENANT], (await _body(http)).get("session_id"))
        return _answer({"type": "session_heartbeat"})

    async def _finish_session(self, http: web.Request) -> web.Response:
        self.service.sessions.finish(http[TENANT], http.match_info["session"])
        return _answer(None)

    # -- training

    async def _create_model(self, http: web.Request) -> web.Response:
        return _answer({"request_id": self.service.create_model(http[TENANT], await _body(http))})

    async def _load_weights(self, http: web.Request) -> web.Response:
        body = await _body(http)
        if body.get("session_id") is not None:
            return _answer({"request_id": self.service.create_model(http[TENANT], body, "load")})
        self.service.weights.find(http[TENANT], body.get("path"), "weights")
        return self._submit(http, "load", body)

    async def _forward_backward(self, http: web.Request) -> web.Response:
        body = await http.read()
        asked = wire.read_forward_backward(body)
        kind = "forward" if asked.forward_only else "forward_backward"
        name = self.service.submit(http[TENANT], asked.model_id, asked.seq_id, kind, {}, body)
        return _answer({"request_id": name, "model_id": asked.model_id})

    def _to_model(self, kind: str) -> Handler:
        async def handle(http: web.Request) -> web.Response:
            return self._submit(http, kind, await _body(http))

        return handle

    def _submit(self, http: web.Request, kind: str, body: dict[str, Any]) -> web.Response:
        name = self.service.submit(http[TENANT], body.get("model_id"), body.get("seq_id"), kind, body)
        return _answer({"request_id": name, "model_id": body["model_id"]})

    async def _get_info(self, http: web.Request) -> web.Response:
        model = self.service.model(http[TENANT], (await _body(http)).get("model_id"))
        data = {"model_name": self.service.base_model, "arch": self.service.ranks.engine.arch.family}
        facts = {"type": "get_info", "model_id": model.id, "model_name": self.service.base_model, "model_data": data}
        return _answer(facts | _lora(model.adapted.rank if model.adapted else 0))

    # -- saved weights

    async def _weights_info(self, http: web.Request) -> web.Response:
        path = (await _body(http)).get("tinker_path")
        adapted = facts_of(self.service.weights.find(http[TENANT], path, "weights", "sampler_weights"))["adapted"]
        trains = {"train_attn": adapted["attention"], "train_mlp": adapted["mlp"], "train_unembed": False}
        return _answer({"base_model": self.service.base_model} | _lora(adapted["rank"]) | trains)

    async def _checkpoints(self, http: web.Request) -> web.Response:
        model = http.match_info.get("model", "")
        found = [_checkpoint(path, facts) for path, facts in self.service.weights.listed(http[TENANT], model)]
        return _answer({"checkpoints": found, "cursor": _cursor(found)})

    async def _delete(self, http: web.Request) -> web.Response:
        parts = http.match_info
        self.service.weights.delete(http[TENANT], f"tinker://{parts['model']}/{parts['kind']}/{parts['name']}")
        return web.Response(status=204)

    async def _training_run(self, http: web.Request) -> web.Response:
        return _answer(self._run_facts(http[TENANT], http.match_info["model"]))

    async def _training_runs(self, http: web.Request) -> web.Response:
        found = [self._run_facts(http[TENANT], m.id) for m in self.service.models.values() if m.tenant == http[TENANT]]
        return _answer({"training_runs": found, "cursor": _cursor(found)})

    def _run_facts(self, tenant: str, name: str) -> dict[str, Any]:
        saved = sorted(self.service.weights.listed(tenant, name), key=lambda entry: entry[1]["time"])
        model = self.service.models.get(name)
        if not saved and (model is None or model.tenant != tenant):
            raise Refused(f"training_run_id = {name!r}: there is no such training run.", 404)
        rank = model.adapted.rank if model and model.adapted else saved[-1][1]["adapted"]["rank"] if saved else 0
        newest = {kind: [_checkpoint(*entry) for entry in saved if f"/{kind}/" in entry[0]] for kind in KINDS}
        return {
            "training_run_id": name,
            "base_model": self.service.base_model,
            "model_owner": tenant,
            **_lora(rank),
            "last_request_time": saved[-1][1]["time"] if saved else "1970-01-01T00:00:00+00:00",
            "last_checkpoint": newest["weights"][-1] if newest["weights"] else None,
            "last_sampler_checkpoint": newest["sampler_weights"][-1] if newest["sampler_weights"] else None,
        }

    # -- sampling

    async def _create_sampling_session(self, http: web.Request) -> web.Response:
        body = await _body(http)
        session, path = self.service.sessions.get(http[TENANT], body.get("session_id")), body.get("model_path")
        if path is not None:
            self.service.weights.find(http[TENANT], path, "sampler_weights")
        elif body.get("base_model") != self.service.base_model:
            raise Refused(f"base_model = {body.get('base_model')!r}: this server has {self.service.base_model!r}.", 400)
        name = self.service.sessions.add_sampler(http[TENANT], session, body.get("sampling_session_seq_id"), path)
        return _answer({"type": "create_sampling_session", "sampling_session_id": name})

    async def _join_sampling_session(self, http: web.Request) -> web.Response:
        name = str((await _body(http)).get("sampling_session_id"))
        self.service.sessions.sampler(http[TENANT], name)
        self._clones[name] = self._clones.get(name, 0) + 1
        return _answer({"type": "join_sampling_session", "client_counter": self._clones[name]})

    async def _get_sampler(self, http: web.Request) -> web.Response:
        name = http.match_info["sampler"]
        path = self.service.sessions.sampler(http[TENANT], name)
        return _answer({"sampler_id": name, "base_model": self.service.base_model, "model_path": path})

    async def _sample(self, http: web.Request) -> web.Response:
        body = await _body(http)
        session, seq = body.get("sampling_session_id"), body.get("seq_id")
        path = self.service.sessions.sampler(http[TENANT], session)
        if type(seq) is not int:
            raise Refused(f"seq_id = {seq!r}: must be an integer.", 400)
        name, asked = f"{session}:{seq}", sampling_of(body)
        if name not in self._samples:
            if sum(not task.done() for task in self._samples.values()) >= MOST_SAMPLING:
                raise Refused(f"{MOST_SAMPLING:,} requests for samples are running; send this one again later.", 429)
            weights = None if path is None else self.service.weights.find(http[TENANT], path, "sampler_weights")
            self._samples[name] = asyncio.create_task(self._sampled(weights, asked, body.get("prompt_logprobs_last_n")))
            while len(self._samples) > MOST_SAMPLES:
                self._samples.popitem(last=False)[1].cancel()
        ids = [f"{name}:{number}" for number in range(asked.replies)]
        return _answer({"request_id": name, "sample_sequence_ids": ids})

    async def _sampled(self, weights: Any, asked: Sampling, last: Any) -> Result:
        try:
            found = await self.sampler.sample(weights, asked)
        except ValueError as error:
            return json_result(error=str(error), category="user")
        except SamplingFailed as error:
            logger.warning("a request for samples failed: %s", error)
            return json_result(error=str(error), category="server")
        if (prompt := found.prompt) is not None and type(last) is int:
            found.prompt = [*[None] * (len(prompt) - last), *prompt[len(prompt) - last :]]
        return Result(wire.sample_response(found), is_proto=True)

    # -- results

    async def _retrieve(self, http: web.Request) -> web.Response:
        name, state = str((await _body(http)).get("request_id")), "active"
        if ":sample:" in name:
            self.service.sessions.sampler(http[TENANT], name.rpartition(":")[0])
            if name not in self._samples:
                # The client then asks for the samples anew.
                raise Refused(f"request_id = {name!r}: its result is gone, as the server was restarted.", 410)
            waiting: asyncio.Future[Result] = self._samples[name]
        else:
            promised, model = self.service.future(http[TENANT], name)
            waiting = asyncio.wrap_future(promised)
            state = "active" if model.is_placed or model.seq >= 0 else "paused_capacity"
        done, _ = await asyncio.wait([waiting], timeout=POLL_S)
        if not done:
            reason = "all slots of the server are taken" if state != "active" else None
            body = {"type": "try_again", "request_id": name, "queue_state": state, "queue_state_reason": reason}
            return _answer(body, 408)
        if waiting.cancelled():
            raise Refused(f"request_id = {name!r}: was cancelled.", 404)
        if (error := waiting.exception()) is not None:  # a bug of this server: the client must not poll for ever
            logger.error("request %s failed", name, exc_info=error)
            return _answer({"error": f"internal error: {error!r}", "category": "server"})
        result = waiting.result()
        result.was_fetched = True
        return web.Response(body=result.body, content_type=PROTO if result.is_proto else "application/json")

    async def _cancel(self, http: web.Request) -> web.Response:
        name = str((await _body(http)).get("request_id"))
        self.service.sessions.sampler(http[TENANT], name.rpartition(":")[0])
        if (task := self._samples.get(name)) is not None:
            task.cancel()
        return _answer(None)


KINDS = {"weights": "training", "sampler_weights": "sampler"}


def _checkpoint(path: str, facts: dict[str, Any]) -> dict[str, Any]:
    _, kind, name = path.removeprefix("tinker://").split("/")
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": KINDS[kind],
        "time": facts["time"],
        "tinker_path": path,
        "size_bytes": facts["size_bytes"],
        "user_metadata": facts["user_metadata"],
    }


def sampling_of(body: Mapping[str, Any]) -> Sampling:
    """Translate a client's sampling request into one for a rollout server.

    Raises ValueError if the request is invalid or asks for something that this server does not support.
    """
    for key in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if body.get(key):
            raise ValueError(f"{key} = {body[key]!r}: is not supported by this server; leave it out.")
    ids: list[int] = []
    chunks = _object("prompt", body.get("prompt")).get("chunks")
    for chunk in chunks if isinstance(chunks, list) else []:
        tokens = _object("prompt.chunks", chunk).get("tokens")
        if chunk.get("type") != "encoded_text" or not isinstance(tokens, list):
            raise ValueError(f"prompt: has a chunk of type {chunk.get('type')!r}; send encoded_text with tokens alone.")
        ids += tokens
    if not ids:
        raise ValueError("prompt: is empty; send at least one token.")
    count = body.get("num_samples", 1)
    if type(count) is not int or count < 1:
        raise ValueError(f"num_samples = {count!r}: must be an integer of at least 1.")
    given = _object("sampling_params", body.get("sampling_params"))
    names = {"max_tokens": "max_new_tokens", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p"}
    options = {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None}
    options.setdefault("max_new_tokens", 2**20)  # servers stop at their context length
    if given.get("seed") is not None:
        options["sampling_seed"] = given["seed"]
    stop = given.get("stop")
    if stop == []:
        options["ignore_eos"] = True
    elif isinstance(stop, list) and all(type(one) is int for one in stop):
        options["stop_token_ids"] = stop
    elif stop is not None:
        options |= {"stop": stop, "no_stop_trim": True}
    tops = [body.get(key, 0) for key in ("topk_prompt_logprobs", "topk_sample_logprobs")]
    if not all(type(top) is int and top >= 0 for top in tops):
        raise ValueError(f"topk_prompt_logprobs, topk_sample_logprobs = {tops}: must be integers of at least 0.")
    return Sampling(ids, options, count, bool(body.get("prompt_logprobs")), *tops)


def _object(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{key} = {str(value)[:100]!r}: must be an object.")
    return value


async def _body(http: web.Request) -> dict[str, Any]:
    body = orjson.loads(await http.read() or b"{}")
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object.")
    return body


def _answer(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _always(body: dict[str, Any]) -> Handler:
    """Return the handler of a route whose answer is always the same."""

    async def handle(http: web.Request) -> web.Response:
        return _answer(body)

    return handle


def _lora(rank: int) -> dict[str, Any]:
    return {"is_lora": rank > 0, "lora_rank": rank or None}


def _cursor(found: list[Any]) -> dict[str, int]:
    return {"offset": 0, "limit": len(found), "total_count": len(found)}


@contextlib.asynccontextmanager
async def serving(api: TrainingAPI, listener: socket.socket, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
    """Serve clients on a listening socket until the block ends. tls: None serves plain HTTP."""
    runner = web.AppRunner(api.app(), access_log=None, shutdown_timeout=2)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()
        await api.sampler.close()
