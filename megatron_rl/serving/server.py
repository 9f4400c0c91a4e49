"""The embedded rollout server: SGLang's HTTP protocol (0.5.21: weight sessions) over one model on one device.

The event loop parses and answers; the batcher's thread runs the model. Clients get SGLang's statuses and shapes, an
error is `{"error": {"message": ...}}`, and no body can stop the server. Start: `python -m megatron_rl.serving.server`.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import torch
from aiohttp import web

from megatron_rl.launch import watch
from megatron_rl.launch.registry import Lease, Registration
from megatron_rl.launch.run_token import token_in
from megatron_rl.serving import protocol
from megatron_rl.serving.answers import (
    answer_errors,
    field,
    json_answer,
    raise_failed,
    read_json,
    read_object,
    require_token,
    wait,
)
from megatron_rl.serving.batcher import MEMORY, Batcher
from megatron_rl.serving.memory import MemoryEndpoints
from megatron_rl.serving.model import Decoder, ModelConfig
from megatron_rl.serving.peer import PeerEndpoints
from megatron_rl.serving.request import Request
from megatron_rl.serving.run_arguments import add_run_arguments, check_run_arguments, token_file_of
from megatron_rl.serving.sampling import SamplingParams
from megatron_rl.serving.text import Text
from megatron_rl.serving.weight_endpoints import DTYPES, WeightEndpoints

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = "0.5.21"
MAX_BODY_BYTES = 32 * 1024**2
"""Of a request but one that brings weights; dozens of prompts of the longest context."""
CPU_CONTEXT_LENGTH = 4096
HEALTH_TIMEOUT_S = 20.0
CACHE_SHARE = 0.3
"""Share of the device's memory that the KV cache may take."""


class RolloutServer:
    """The HTTP handlers and the state between them. Lives in the event loop's thread."""

    def __init__(self, batcher: Batcher, text: Text | None, *, model_path: str, options: dict[str, Any]):
        self.batcher = batcher
        self.text = text
        self.weights = WeightEndpoints(batcher, model_path)
        self.options = options
        self.limits = protocol.Limits(batcher.model.config.vocab_size, batcher.rows.context_length)
        self.live: dict[str, Request] = {}
        self.started_s = time.time()

    @property
    def model_name(self) -> str:
        """SGLang renames a model whose weights were replaced from disk."""
        path = self.weights.model_path
        replaced = path != self.options["model_path"]
        return path if replaced else self.options["served_model_name"] or path

    def app(self, token: str | None = None) -> web.Application:
        app = web.Application(middlewares=[answer_errors, require_token(token)], client_max_size=MAX_BODY_BYTES)
        both = ("GET", "POST")
        for methods, path, handler in (
            (("POST", "PUT"), "/generate", self.generate),
            (("POST",), "/v1/chat/completions", self.chat),
            (("POST",), "/abort_request", self.abort_request),
            (("POST",), "/pause_generation", self.pause_generation),
            (("POST",), "/continue_generation", self.continue_generation),
            (both, "/flush_cache", self.flush_cache),
            (("GET",), "/health", self.health),
            (("GET",), "/ready", self.health),
            (("GET",), "/health_generate", self.health_generate),
            (("GET",), "/model_info", self.model_info),
            (("GET",), "/get_model_info", self.model_info),
            (("GET",), "/server_info", self.server_info),
            (("GET",), "/get_server_info", self.server_info),
            (("GET",), "/v1/loads", self.loads),
            (("GET",), "/v1/models", self.models),
            (("GET",), "/metrics", self.metrics),
        ):
            for method in methods:
                app.router.add_route(method, path, handler)
        for endpoints in (self.weights, PeerEndpoints(self.batcher), MemoryEndpoints(self.batcher)):
            app.add_routes(endpoints.routes())
        return app

    # Generation

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await read_json(http)
        call = await asyncio.to_thread(protocol.parse_generate, body, self.limits, self.text)
        if call.stream:
            return await self._stream(http, call)
        requests = await self._run(call.requests)
        answers = [protocol.generate_answer(r, call, self.batcher.weight_version, self.text) for r in requests]
        for request in requests:
            raise_failed(request)
        return json_answer(answers[0] if call.single else answers)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        body = await read_json(http)
        requests = await self._run(await asyncio.to_thread(protocol.parse_chat, body, self.limits, self.text))
        for request in requests:
            raise_failed(request)
        version, now_s = self.batcher.weight_version, int(time.time())
        return json_answer(protocol.chat_answer(requests, body, version, self.model_name, now_s, self.text))

    def _submit(self, requests: list[Request]) -> list[asyncio.Future]:
        if not self.batcher.paused:  # else they wait, with those that were on their way when it was
            self.batcher.require(*MEMORY)
        for request in requests:
            if request.rid in self.live:
                raise ValueError(f"Duplicate request ID detected: {request.rid}")
        for request in requests:
            self.live[request.rid] = request
        return [asyncio.wrap_future(self.batcher.submit(request)) for request in requests]

    async def _run(self, requests: list[Request]) -> list[Request]:
        """Run to the end. A client that hangs up cancels this coroutine, and with it the requests."""
        futures = self._submit(requests)
        try:
            return await asyncio.gather(*futures)
        finally:
            self._forget(requests)

    def _forget(self, requests: list[Request]) -> None:
        for request in requests:
            self.live.pop(request.rid, None)
            if request.finish_reason is None:
                self.batcher.abort_request(request)

    async def _stream(self, http: web.Request, call: protocol.GenerateCall) -> web.StreamResponse:
        (request,), loop, progress = call.requests, asyncio.get_running_loop(), asyncio.Event()
        request.on_progress = lambda _: loop.call_soon_threadsafe(progress.set)
        (done,) = self._submit([request])
        done.add_done_callback(lambda _: progress.set())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(http)
            while not done.done():
                await progress.wait()
                progress.clear()
                count = None if done.done() else len(request.logprobs)
                answer = protocol.generate_answer(request, call, self.batcher.weight_version, self.text, count)
                await response.write(b"data: " + orjson.dumps(answer) + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self._forget([request])

    async def abort_request(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        rid, everything = field(body, "rid", str, ""), field(body, "abort_all", bool, False)
        if everything or rid:
            await wait(self.batcher.abort(None if everything else rid))
        return web.Response()

    async def pause_generation(self, http: web.Request) -> web.Response:
        mode = field(await read_object(http), "mode", str, "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f"mode = {mode!r}: must be 'abort', 'retract' or 'in_place'")
        await wait(self.batcher.pause(mode))
        return json_answer({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: web.Request) -> web.Response:
        await read_object(http)
        await wait(self.batcher.resume())
        return json_answer({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, http: web.Request) -> web.Response:
        try:
            deadline = time.monotonic() + float(http.query.get("timeout", 0))
        except ValueError:
            raise ValueError(f"timeout = {http.query['timeout']!r}: must be seconds") from None
        while not (flushed := await wait(self.batcher.flush())) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if flushed:
            return web.Response(text="Cache flushed.\n")
        load = f"{self.batcher.running_requests} running and {self.batcher.waiting_requests} queued requests"
        return web.Response(status=400, text=f"Cache not flushed: there are {load}. Abort or finish them first.\n")

    # Information

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.batcher.failure is None else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        """Healthy is a server that generates a token, be it another request's: all rows may be taken for long."""
        if self.batcher.paused or self.batcher.released or self.batcher.failure is not None:
            return await self.health(_)
        request = Request(rid=f"HEALTH_CHECK_{time.time_ns()}", prompt=[0], params=SamplingParams(max_new_tokens=1))
        generated, deadline = self.batcher.stats.generated_tokens, time.monotonic() + HEALTH_TIMEOUT_S
        check = asyncio.ensure_future(self._run([request]))
        try:
            while not check.done() and self.batcher.stats.generated_tokens == generated:
                if time.monotonic() > deadline:
                    return web.Response(status=503)
                await asyncio.wait([check], timeout=0.05)
        finally:
            check.cancel()
        return await self.health(_)

    async def model_info(self, _: web.Request) -> web.Response:
        config = self.batcher.model.config
        return json_answer(
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
        state = {"weight_version": self.batcher.weight_version, "last_gen_throughput": self.batcher.stats.tokens_per_s}
        return json_answer(
            self.options
            | {"version": PROTOCOL_VERSION, "embedded": True, "tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1}
            | {
                "max_total_num_tokens": self.batcher.rows.max_total_tokens,
                "context_length": self.batcher.rows.context_length,
            }
            | {"max_req_input_len": self.batcher.rows.context_length - 1, "internal_states": [state], "status": "ready"}
            | {"startup_time": self.started_s, "vocab_size": self.limits.vocab_size}
        )

    def load(self) -> dict[str, Any]:
        batcher = self.batcher
        return {
            "dp_rank": 0,
            "num_running_reqs": batcher.running_requests,
            "num_waiting_reqs": batcher.waiting_requests,
            "num_used_tokens": batcher.used_tokens,
            "max_total_num_tokens": batcher.rows.max_total_tokens,
            "token_usage": batcher.used_tokens / batcher.rows.max_total_tokens,
            "gen_throughput": batcher.stats.tokens_per_s,
        }

    async def loads(self, _: web.Request) -> web.Response:
        return json_answer({"timestamp": time.time(), "version": PROTOCOL_VERSION, "loads": [self.load()]})

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": self.model_name, "object": "model", "created": int(self.started_s), "owned_by": "megatron_rl"}
        return json_answer(
            {"object": "list", "data": [model | {"root": self.model_name, "max_model_len": self.limits.context_length}]}
        )

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
        label = self.model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines = []
        for name, kind, help_, value in rows:
            lines += [f"# HELP sglang:{name} {help_}", f"# TYPE sglang:{name} {kind}"]
            lines += [f'sglang:{name}{{model_name="{label}"}} {value}']
        return web.Response(text="\n".join(lines) + "\n")


# The process


def build_server(folder: Path, args: argparse.Namespace) -> RolloutServer:
    """Load the model and start nothing yet."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES[("bfloat16" if device.type == "cuda" else "float32") if args.dtype == "auto" else args.dtype]
    config = ModelConfig.read(folder)
    longest = config.max_positions if device.type == "cuda" else min(config.max_positions, CPU_CONTEXT_LENGTH)
    context_length = args.context_length or longest
    if not 2 <= context_length <= config.max_positions:
        raise ValueError(f"--context-length {context_length}: must lie in [2, {config.max_positions}], the model's own")
    if args.max_running_requests < 1:
        raise ValueError(f"--max-running-requests {args.max_running_requests}: must be at least 1")
    model = Decoder(config, dtype=dtype, device=device, context_length=context_length)
    if args.load_format == "dummy":
        model.draw()
    else:
        model.load(folder)
    text = Text.load(folder)
    batcher = Batcher(
        model,
        max_running_requests=args.max_running_requests,
        context_length=context_length,
        max_total_tokens=args.max_total_tokens or default_total_tokens(model),
        eos_token_ids=config.eos_token_ids | (text.eos_token_ids if text else frozenset()),
        decode_text=text.decode if text else None,
        weight_version=args.weight_version,
        reuse_prefixes=not args.disable_radix_cache,
    )
    options = {k: v for k, v in vars(args).items() if k not in ("token_file", "model", "ready_file", "register", "run")}
    options |= {"model_path": str(folder), "dtype": str(dtype).removeprefix("torch."), "device": device.type}
    return RolloutServer(batcher, text, model_path=str(folder), options=options)


def default_total_tokens(model: Decoder) -> int:
    if model.device.type == "cuda":
        memory = torch.cuda.mem_get_info(model.device)[0]
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    config = model.config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    return int(memory * CACHE_SHARE / per_token)


def watch_parent(pid: int) -> None:
    """End this process within 2 s of the death of process `pid`, so that no server outlives its run."""
    parent = os.getppid()

    def alive() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return os.getppid() == parent

    def watch() -> None:
        while alive():
            time.sleep(0.5)
        print(f"rollout server: its parent (pid {pid}) died; exiting", flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()


async def serve(server: RolloutServer, args: argparse.Namespace, token: str | None) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    batcher = server.batcher
    thread = threading.Thread(target=batcher.run, name="batcher", daemon=True)
    thread.start()
    # Without a handler's cancellation, a client that hangs up would keep its request running.
    runner = web.AppRunner(server.app(token), handler_cancellation=True, access_log=None, shutdown_timeout=2)
    await runner.setup()
    listener = socket.create_server((args.host, args.port), backlog=1024)
    await web.SockSite(runner, listener).start()
    url = f"http://{args.host}:{listener.getsockname()[1]}"
    if args.ready_file is not None:
        partial = args.ready_file.with_name(f"{args.ready_file.name}.{os.getpid()}")
        partial.write_text(url)
        partial.replace(args.ready_file)
    count, dtype = sum(p.numel() for p in batcher.model.parameters.values()), server.options["dtype"]
    print(f"rollout server ready at {url} (model {server.model_name}, dtype {dtype}, {count:,} parameters)", flush=True)
    with contextlib.ExitStack() as stack:
        if args.register is not None:
            registration = Registration(url=url, run=args.run)
            stack.enter_context(Lease(args.register, registration, is_well=lambda: batcher.failure is None))
        await stop.wait()
    batcher.stop()
    await asyncio.to_thread(thread.join, 5)
    await runner.cleanup()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("megatron-rl serve", description="Serve rollouts with SGLang's HTTP protocol.")
    parser.add_argument("model", type=Path, help="folder in Hugging Face format (llama, qwen2, qwen3)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 picks a free one")
    parser.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="auto: float32 on CPU, bfloat16 on CUDA"
    )
    parser.add_argument(
        "--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights, to be updated later"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--context-length", type=int, help="default: the model's, on CPU at most 4096")
    parser.add_argument("--max-total-tokens", type=int, help="tokens the KV cache may hold; default: 30%% of memory")
    parser.add_argument("--disable-radix-cache", action="store_true", help="never reuse the keys of a common prefix")
    parser.add_argument("--weight-version", default="default", help="version of the weights loaded at the start")
    parser.add_argument("--served-model-name")
    parser.add_argument("--parent-pid", type=int, help="exit when this process is gone")
    parser.add_argument("--ready-file", type=Path, help="the URL is written there once the server listens")
    add_run_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if args.parent_pid is not None:
        watch_parent(args.parent_pid)
    try:
        check_run_arguments(args)
        token_file = token_file_of(args)
        token = None if token_file is None else token_in(token_file, key="--token-file")
        server = build_server(args.model, args)
    except ValueError as error:
        raise SystemExit(f"rollout server: {error}") from None
    asyncio.run(serve(server, args, token))


if __name__ == "__main__":
    watch.run_and_end(main)
