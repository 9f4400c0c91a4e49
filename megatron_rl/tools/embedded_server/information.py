"""Endpoints for health, model, load and metrics of the embedded server, with SGLang's response shapes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from megatron_rl.tools.embedded_server.batcher import Batcher
from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.responses import json_response
from megatron_rl.tools.embedded_server.sampling import SamplingParams
from megatron_rl.tools.embedded_server.weight_endpoints import WeightEndpoints

PROTOCOL_VERSION = "0.5.21"
HEALTH_TIMEOUT_S = 20.0


class InformationEndpoints:
    """Endpoints that report the server's state. They run in the event loop's thread and only read the batcher's state.

    options: command-line options that /server_info shows.
    """

    def __init__(self, batcher: Batcher, weights: WeightEndpoints, options: dict[str, Any]) -> None:
        self.batcher, self.weights, self.options = batcher, weights, options
        self.health_check: asyncio.Task[bool] | None = None
        self.started_s = time.time()

    def routes(self) -> list[web.RouteDef]:
        gets = {
            "/health": self.health,
            "/ready": self.health,
            "/health_generate": self.health_generate,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/v1/loads": self.loads,
            "/v1/models": self.models,
            "/metrics": self.metrics,
        }
        return [web.get(path, handler) for path, handler in gets.items()]

    @property
    def model_name(self) -> str:
        """Served model name. As in SGLang, if weights were loaded from another folder, that folder is the name."""
        path = self.weights.model_path
        replaced = path != self.options["model_path"]
        return path if replaced else self.options["served_model_name"] or path

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.batcher.failure is None else 503)

    async def health_generate(self, http: web.Request) -> web.Response:
        """Respond 200 if the server generates a token within HEALTH_TIMEOUT_S, else 503.

        A token generated for any request counts, because other requests may occupy all rows. Concurrent calls share one
        check. While the server is paused or its memory is released, the response is that of /health.
        """
        # A paused server generates nothing but is healthy: a supervisor must not restart it during a weight update.
        if self.batcher.paused or self.batcher.released or self.batcher.failure is not None:
            return await self.health(http)
        if self.health_check is None or self.health_check.done():
            self.health_check = asyncio.create_task(self._generates())
        # Shield the shared check: one client that disconnects must not cancel it for the others.
        if not await asyncio.shield(self.health_check):
            return web.Response(status=503)
        return await self.health(http)

    async def _generates(self) -> bool:
        request = Request(rid=f"HEALTH_CHECK_{time.time_ns()}", prompt=[0], params=SamplingParams(max_new_tokens=1))
        generated, deadline = self.batcher.stats.generated_tokens, time.monotonic() + HEALTH_TIMEOUT_S
        check = asyncio.ensure_future(asyncio.wrap_future(self.batcher.submit(request)))
        while not check.done() and self.batcher.stats.generated_tokens == generated:
            if time.monotonic() > deadline:
                break
            await asyncio.wait([check], timeout=0.05)
        if check.done():
            return check.exception() is None
        check.cancel()
        self.batcher.abort_request(request)
        return self.batcher.stats.generated_tokens > generated

    async def model_info(self, _: web.Request) -> web.Response:
        config = self.batcher.model.config
        return json_response(
            {
                "model_path": self.weights.model_path,
                "served_model_name": self.model_name,
                "tokenizer_path": self.options["model_path"],
                "is_generation": True,
                "weight_version": self.batcher.weight_version,
                "load_format": self.options["load_format"],
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        rows = self.batcher.kv_rows
        state = {"weight_version": self.batcher.weight_version, "last_gen_throughput": self.batcher.stats.tokens_per_s}
        return json_response(
            self.options
            | {"version": PROTOCOL_VERSION, "embedded": True, "tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1}
            | {
                "max_total_num_tokens": rows.max_total_tokens,
                "context_length": rows.context_length,
                "max_req_input_len": rows.context_length - 1,
                "internal_states": [state],
                "status": "ready",
                "startup_time": self.started_s,
                "vocab_size": self.batcher.model.config.vocab_size,
            }
        )

    def load(self) -> dict[str, Any]:
        batcher = self.batcher
        return {
            "dp_rank": 0,
            "num_running_reqs": batcher.running_requests,
            "num_waiting_reqs": batcher.waiting_requests,
            "num_used_tokens": batcher.used_tokens,
            "max_total_num_tokens": batcher.kv_rows.max_total_tokens,
            "token_usage": batcher.used_tokens / batcher.kv_rows.max_total_tokens,
            "gen_throughput": batcher.stats.tokens_per_s,
        }

    async def loads(self, _: web.Request) -> web.Response:
        return json_response({"timestamp": time.time(), "version": PROTOCOL_VERSION, "loads": [self.load()]})

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": self.model_name, "object": "model", "created": int(self.started_s), "owned_by": "megatron_rl"}
        model |= {"root": self.model_name, "max_model_len": self.batcher.kv_rows.context_length}
        return json_response({"object": "list", "data": [model]})

    async def metrics(self, _: web.Request) -> web.Response:
        load, stats = self.load(), self.batcher.stats
        rows = (
            ("num_running_reqs", "gauge", "Requests in the batch.", load["num_running_reqs"]),
            ("num_queue_reqs", "gauge", "Requests that wait.", load["num_waiting_reqs"]),
            ("num_used_tokens", "gauge", "Tokens of running requests in the KV cache.", load["num_used_tokens"]),
            ("token_usage", "gauge", "Used share of the KV cache's token budget.", load["token_usage"]),
            ("gen_throughput", "gauge", "Generated tokens per second.", load["gen_throughput"]),
            ("prompt_tokens_total", "counter", "Prompt tokens received.", stats.prompt_tokens),
            ("cached_tokens_total", "counter", "Prompt tokens taken from the KV cache.", stats.cached_tokens),
            ("generation_tokens_total", "counter", "Generated tokens.", stats.generated_tokens),
            ("num_requests_total", "counter", "Finished requests.", stats.finished_requests),
        )
        if stats.guessed_passes:
            length = 1 + stats.right_guesses / stats.guessed_passes
            rows += (("spec_accept_length", "gauge", "Tokens per pass over guessed tokens, since the start.", length),)
        label = self.model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines = []
        for name, kind, help_, value in rows:
            lines += [f"# HELP sglang:{name} {help_}", f"# TYPE sglang:{name} {kind}"]
            lines += [f'sglang:{name}{{model_name="{label}"}} {value}']
        return web.Response(text="\n".join(lines) + "\n")
