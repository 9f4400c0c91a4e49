"""The embedded rollout server: SGLang's HTTP protocol, version 0.5.21 with weight sessions, for one model and device.

The event loop handles HTTP; the batcher's thread runs the model. Status codes and response shapes are SGLang's. The
body of an error is `{"error": {"message": ...}}`. No request body can crash the server. Start it with
`python -m megatron_rl.tools.embedded_server.server`.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from aiohttp import web

from megatron_rl.launch.run_token import token_in
from megatron_rl.launch.server_registry import Registration, registered
from megatron_rl.life import process_exit
from megatron_rl.tools.embedded_server import protocol
from megatron_rl.tools.embedded_server.batcher import MEMORY, Batcher
from megatron_rl.tools.embedded_server.bodies import BODIES, Bodies, RequestFailed
from megatron_rl.tools.embedded_server.connections import Connections
from megatron_rl.tools.embedded_server.decoder_config import KINDS, DecoderConfig
from megatron_rl.tools.embedded_server.drafting_decoder import DraftingDecoder
from megatron_rl.tools.embedded_server.fields import field, shown
from megatron_rl.tools.embedded_server.guard import LogRate, guard, invite_later
from megatron_rl.tools.embedded_server.information import InformationEndpoints
from megatron_rl.tools.embedded_server.lent_memory import MemoryEndpoints
from megatron_rl.tools.embedded_server.listening import listen, port_number
from megatron_rl.tools.embedded_server.peer import PeerEndpoints
from megatron_rl.tools.embedded_server.reply_text import Text
from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.responses import json_response, read_object, wait
from megatron_rl.tools.embedded_server.run_arguments import (
    add_run_arguments,
    check_run_arguments,
    token_file_of,
)
from megatron_rl.tools.embedded_server.transformer import Decoder
from megatron_rl.tools.embedded_server.weight_endpoints import DTYPES, WeightEndpoints

logger = logging.getLogger(__name__)
SECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)

CPU_CONTEXT_LENGTH = 4096
KEEPALIVE_S = 75.0
LINGER_S = 2.0
"""Maximum time to go on reading a refused body. Otherwise a sender that is still writing would miss the refusal."""
CHUNK_S = 30.0
"""Maximum time a client may take to read one chunk of a streamed response."""
MOST_LIVE_REQUESTS = 65_536
MOST_LIVE_TOKENS = 2**25
"""Maximum total number of prompt tokens of all running and waiting requests. Reply tokens are not counted."""
CACHE_SHARE = 0.3
"""Default KV cache budget: share of the GPU's free memory, or of the host's total memory on CPU."""


class RolloutServer:
    """The HTTP application. This class has the generation endpoints; other classes have all other endpoints.

        server = RolloutServer(batcher, text, model_path="/models/qwen3", options={})
        runner = web.AppRunner(server.app(token, host, connections))

    It runs in the event loop's thread. The batcher runs in a separate thread, which `open_to_clients` starts.
    """

    def __init__(self, batcher: Batcher, text: Text | None, *, model_path: str, options: dict[str, Any]):
        self.batcher = batcher
        self.text = text
        self.weights = WeightEndpoints(batcher, model_path)
        self.information = InformationEndpoints(batcher, self.weights, options)
        self.limits = protocol.Limits(
            batcher.model.config.vocab_size,
            batcher.kv_rows.context_length,
            tells_routes=options.get("enable_return_routed_experts", False),
            tells_weights=options.get("return_expert_weights", False),
        )
        self.live: dict[str, Request] = {}
        self.live_tokens = 0
        """Total number of prompt tokens of the requests in `live`."""

    def app(self, token: str | None, host: str, connections: Connections) -> web.Application:
        app = web.Application(middlewares=[guard(token, host, connections)])
        app[BODIES] = Bodies(connections)
        peers, memory = PeerEndpoints(self.batcher), MemoryEndpoints(self.batcher)
        for endpoints in (self, self.information, self.weights, peers, memory):
            for route in endpoints.routes():
                app.router.add_route(route.method, route.path, route.handler, expect_handler=invite_later)
        return app

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.put("/generate", self.generate),
            web.post("/v1/chat/completions", self.chat),
            web.post("/abort_request", self.abort_request),
            web.post("/pause_generation", self.pause_generation),
            web.post("/continue_generation", self.continue_generation),
            web.get("/flush_cache", self.flush_cache),
            web.post("/flush_cache", self.flush_cache),
        ]

    # Generation

    async def generate(self, http: web.Request) -> web.StreamResponse:
        def parse(body: Any) -> protocol.GenerateCall:
            return protocol.parse_generate(body, self.limits, self.text, self.weights.adapter)

        call = await http.app[BODIES].json(http, parse, is_slow=protocol.is_text)
        if call.stream:
            return await self._stream(http, call)
        await self._run(call.requests)
        version = self.batcher.weight_version

        def write() -> bytes:
            responses = [orjson.dumps(protocol.generate_response(r, call, version, self.text)) for r in call.requests]
            return responses[0] if call.single else b"[" + b",".join(responses) + b"]"

        return web.Response(body=await asyncio.to_thread(write), content_type="application/json")

    async def chat(self, http: web.Request) -> web.StreamResponse:
        def read(body: Any) -> tuple[protocol.ChatCall, list[Request]]:
            call = protocol.parse_chat(body, self.limits, self.text)
            return call, protocol.chat_requests(call, self.limits, self.text)

        call, requests = await http.app[BODIES].json(http, read, is_slow=protocol.is_text)
        await self._run(requests)
        known = self.batcher.weight_version, self.information.model_name, int(time.time())

        def write() -> bytes:
            return orjson.dumps(protocol.chat_response(requests, call, *known, self.text))

        return web.Response(body=await asyncio.to_thread(write), content_type="application/json")

    def _submit(self, requests: list[Request]) -> list[asyncio.Future]:
        if not self.batcher.paused:  # a paused server queues requests, whether or not its memory is released
            self.batcher.require(*MEMORY)
        known = set(self.live)
        for request in requests:
            if request.rid in known:
                raise ValueError(f"Duplicate request ID detected: {request.rid}")
            known.add(request.rid)
        tokens = sum(len(request.prompt) for request in requests)
        # An idle server accepts a call of any size: one above the limits would otherwise never be accepted.
        if self.live and (
            len(self.live) + len(requests) > MOST_LIVE_REQUESTS or self.live_tokens + tokens > MOST_LIVE_TOKENS
        ):
            raise RequestFailed(
                f"{len(self.live):,} requests of {self.live_tokens:,} prompt tokens are running or waiting; send it "
                f"again later, or start another server",
                503,
            )
        for request in requests:
            self.live[request.rid] = request
        self.live_tokens += tokens
        return [asyncio.wrap_future(self.batcher.submit(request)) for request in requests]

    async def _run(self, requests: list[Request]) -> None:
        """Run all requests to completion; RequestFailed if one failed.

        If the client disconnects, this coroutine is cancelled and aborts the requests.
        """
        futures = self._submit(requests)
        try:
            await asyncio.gather(*futures)
        finally:
            self._forget(requests)
        for request in requests:
            reason = request.finish_reason
            if reason["type"] == "abort" and reason["status_code"] is not None:
                raise RequestFailed(reason["message"], reason["status_code"])

    def _forget(self, requests: list[Request]) -> None:
        for request in requests:
            if self.live.pop(request.rid, None) is not None:
                self.live_tokens -= len(request.prompt)
            if request.finish_reason is None:
                self.batcher.abort_request(request)

    async def _stream(self, http: web.Request, call: protocol.GenerateCall) -> web.StreamResponse:
        (request,), loop, progress = call.requests, asyncio.get_running_loop(), asyncio.Event()
        # The batcher does not wait for the reader: a slow client gets several tokens per chunk.
        request.on_progress = lambda _: loop.call_soon_threadsafe(progress.set)
        (done,) = self._submit([request])
        done.add_done_callback(lambda _: progress.set())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(http)
            while not done.done():
                await progress.wait()
                progress.clear()
                # The batcher appends a token's log-probability last, so this many tokens are complete.
                count = None if done.done() else len(request.logprobs)
                part = protocol.generate_response(request, call, self.batcher.weight_version, self.text, count)
                async with asyncio.timeout(CHUNK_S):
                    await response.write(b"data: " + orjson.dumps(part) + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except TimeoutError:  # the client has stopped reading: drop the connection with its write buffer
            if http.transport is not None:
                http.transport.abort()
        finally:
            self._forget([request])
        return response

    async def abort_request(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        rid, everything = field(body, "rid", str, ""), field(body, "abort_all", bool, False)
        if everything or rid:
            await wait(self.batcher.abort(None if everything else rid))
        return web.Response()

    async def pause_generation(self, http: web.Request) -> web.Response:
        mode = field(await read_object(http), "mode", str, "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f"mode = {shown(mode)}: must be 'abort', 'retract' or 'in_place'")
        await wait(self.batcher.pause(mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: web.Request) -> web.Response:
        await read_object(http)
        await wait(self.batcher.resume())
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, http: web.Request) -> web.Response:
        sent = http.query.get("timeout", "0")
        if not SECONDS.fullmatch(sent):
            raise ValueError(f"timeout = {shown(sent)}: must be seconds, such as 10 or 0.5")
        deadline = time.monotonic() + float(sent)
        while not (flushed := await wait(self.batcher.flush())) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if flushed:
            return web.Response(text="Cache flushed.\n")
        load = f"{self.batcher.running_requests} running and {self.batcher.waiting_requests} queued requests"
        return web.Response(status=400, text=f"Cache not flushed: there are {load}. Abort or finish them first.\n")


# The process


def build_server(folder: Path, args: argparse.Namespace) -> RolloutServer:
    """Build the server and load its model. No thread is started. ValueError for arguments that do not fit the model."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES[("bfloat16" if device.type == "cuda" else "float32") if args.dtype == "auto" else args.dtype]
    config = DecoderConfig.read(folder)
    longest = config.max_positions if device.type == "cuda" else min(config.max_positions, CPU_CONTEXT_LENGTH)
    context_length = args.context_length or longest
    if not 2 <= context_length <= config.max_positions:
        raise ValueError(f"--context-length {context_length}: must lie in [2, {config.max_positions}], the model's own")
    if args.max_running_requests < 1:
        raise ValueError(f"--max-running-requests {args.max_running_requests}: must be at least 1")
    if (args.speculative_algorithm is None) != (args.speculative_num_steps is None):
        raise ValueError("--speculative-algorithm and --speculative-num-steps: must be given together")
    drafts = args.speculative_num_steps or 0
    if args.speculative_algorithm and drafts < 1:
        raise ValueError(f"--speculative-num-steps {drafts}: must be at least 1")
    if args.enable_return_routed_experts and config.experts is None:
        raise ValueError(f"--enable-return-routed-experts: {config.model_type} has no experts; leave it out")
    if args.exact and (device.type != "cpu" or dtype != torch.float32 or config.experts is not None or drafts):
        what = "a mixture of experts" if config.experts is not None else f"{dtype} on {device.type}"
        what = "speculative decoding" if drafts else what
        raise ValueError(f"--exact: is for float32 on a CPU and models without experts, not for {what}; leave it out")
    # Guesses are computed before it is known how many of them fit into the context.
    kind = DraftingDecoder if drafts else partial(Decoder, is_exact=args.exact)
    model = kind(config, dtype=dtype, device=device, context_length=context_length + drafts)
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
        draft_tokens=drafts,
        tokens_per_pass=args.tokens_per_pass,
    )
    # /server_info shows these to every client, so private paths and the run's name are excluded.
    options = {k: v for k, v in vars(args).items() if k not in ("token_file", "model", "ready_file", "register", "run")}
    options |= {"model_path": str(folder), "dtype": str(dtype).removeprefix("torch."), "device": device.type}
    return RolloutServer(batcher, text, model_path=str(folder), options=options)


def default_total_tokens(model: Decoder) -> int:
    if model.device.type == "cuda":
        memory = torch.cuda.mem_get_info(model.device)[0]
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    config = model.config
    # Factor 2: keys and values.
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    return int(memory * CACHE_SHARE / per_token)


def watch_parent(pid: int) -> None:
    """Start a thread that exits this process within 2 s of the death of `pid`, so that no server outlives its run."""
    parent = os.getppid()

    def alive() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return os.getppid() == parent  # the pid may have been reused by another process

    def watch() -> None:
        while alive():
            time.sleep(0.5)
        print(f"rollout server: its parent (pid {pid}) died; exiting", flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()


@asynccontextmanager
async def open_to_clients(
    server: RolloutServer, listener: socket.socket, *, host: str, token: str | None
) -> AsyncIterator[asyncio.Event]:
    """Serve clients inside this block. Yields an event that is set when serving fails.

    When the block ends, the failure is raised: RuntimeError if the batcher's thread died.
    """
    batcher, loop, over = server.batcher, asyncio.get_running_loop(), asyncio.Event()

    def run_batcher() -> None:
        batcher.run()
        loop.call_soon_threadsafe(over.set)

    thread = process_exit.start_thread(run_batcher, name="batcher")
    connections = Connections()
    runner = web.AppRunner(
        server.app(token, host, connections),
        handler_cancellation=True,  # aborts the requests of a client that disconnects
        access_log=None,
        shutdown_timeout=2,
        keepalive_timeout=KEEPALIVE_S,
        lingering_time=LINGER_S,
        auto_decompress=False,
    )
    await runner.setup()
    assert runner.server is not None
    tasks = [asyncio.create_task(connections.accept(listener, runner.server))]
    tasks.append(asyncio.create_task(connections.look_after()))
    for task in tasks:
        task.add_done_callback(lambda _: over.set())
    try:
        yield over
        for task in tasks:
            if task.done():
                task.result()
        if batcher.has_died:
            raise RuntimeError(str(batcher.failure))
    finally:
        for task in tasks:
            task.cancel()
        listener.close()
        batcher.stop()
        await asyncio.to_thread(thread.join, 5)
        await runner.cleanup()


async def serve(server: RolloutServer, listener: socket.socket, args: argparse.Namespace, token: str | None) -> None:
    """Serve until SIGTERM or SIGINT; RuntimeError if the batcher's thread died."""
    batcher = server.batcher
    async with open_to_clients(server, listener, host=args.host, token=token) as stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        port = listener.getsockname()[1]
        url = f"http://[{args.host}]:{port}" if ":" in args.host else f"http://{args.host}:{port}"
        if args.ready_file is not None:
            # Rename is atomic: a process that polls for this file never reads a partial URL.
            partial = args.ready_file.with_name(f"{args.ready_file.name}.{os.getpid()}")
            partial.write_text(url)
            partial.replace(args.ready_file)
        count, information = sum(p.numel() for p in batcher.model.parameters.values()), server.information
        known = f"model {information.model_name}, dtype {information.options['dtype']}, {count:,} parameters"
        print(f"rollout server ready at {url} ({known})", flush=True)
        with contextlib.ExitStack() as stack:
            if args.register is not None:
                registration = Registration(url=url, run=args.run)
                stack.enter_context(registered(args.register, registration, is_well=lambda: batcher.failure is None))
            await stop.wait()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("megatron-rl serve", description="Serve rollouts with SGLang's HTTP protocol.")
    parser.add_argument("model", type=Path, help=f"folder in Hugging Face format ({', '.join(KINDS)})")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other hosts connect")
    parser.add_argument("--port", type=port_number, default=30000, help="0 picks a free port (default 30000)")
    parser.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="auto: float32 on CPU, bfloat16 on CUDA"
    )
    parser.add_argument(
        "--load-format", choices=("auto", "dummy"), default="auto", help="dummy: start with random weights"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available, else cpu")
    parser.add_argument("--max-running-requests", type=int, default=64, help="most requests at once (default 64)")
    parser.add_argument("--context-length", type=int, help="in tokens; default: the model's, on CPU at most 4096")
    parser.add_argument(
        "--max-total-tokens",
        type=int,
        help="tokens for which the KV cache has room; default: 30%% of free GPU memory or of CPU memory",
    )
    parser.add_argument("--exact", action="store_true", help="compute the same bits as a trainer with rollout.exact")
    parser.add_argument("--disable-radix-cache", action="store_true", help="never reuse cached keys of a common prefix")
    parser.add_argument(
        "--enable-return-routed-experts", action="store_true", help="let requests ask for each token's experts"
    )
    parser.add_argument(
        "--return-expert-weights", action="store_true", help="also return the experts' weights, in the upper bits"
    )
    parser.add_argument(
        "--speculative-algorithm", choices=("EAGLE",), help="speculative decoding with the draft head in MODEL/draft"
    )
    parser.add_argument("--speculative-num-steps", type=int, metavar="N", help="tokens to guess before each pass")
    parser.add_argument(
        "--tokens-per-pass", type=int, default=64, help="most tokens in a pass with guesses (default 64)"
    )
    parser.add_argument("--weight-version", default="default", help="version of the weights loaded at the start")
    parser.add_argument("--served-model-name", help="name of the model in /v1/models; default: the path MODEL")
    parser.add_argument("--parent-pid", type=int, help="exit when the process with this id ends")
    parser.add_argument("--ready-file", type=Path, help="file to write the URL to once the server listens")
    add_run_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    to_log = logging.StreamHandler()
    to_log.addFilter(LogRate())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[to_log])
    if args.parent_pid is not None:
        watch_parent(args.parent_pid)
    try:
        check_run_arguments(args)
        token_file = token_file_of(args)
        token = None if token_file is None else token_in(token_file, key="--token-file")
        DecoderConfig.read(args.model)
        listener = listen(args.host, args.port)  # before the slow model load, so that a port in use fails at once
        server = build_server(args.model, args)
    except ValueError as error:
        raise SystemExit(f"megatron-rl serve: {error}") from None
    try:
        asyncio.run(serve(server, listener, args, token))
    except RuntimeError as error:
        raise SystemExit(f"megatron-rl serve: {error}") from None


if __name__ == "__main__":
    process_exit.run_and_end(main)
