"""A rollout server whose time is modelled: real HTTP in SGLang's protocol, and sleep where a GPU would decode.

All running requests get a token per decode step. A step takes `decode_s` when every slot is taken and half of that when
one is: reading the weights, then the sequences. Reading a prompt, or what was generated before an interruption, takes
as long as decoding 1/64 of its tokens alone. Tokens are random.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass, field

import orjson
from aiohttp import web

LOGPROB = -3.5
PREFILL_SPEEDUP = 64


@dataclass(eq=False)
class Request:
    rid: str
    prompt_tokens: int
    wanted: int
    done: asyncio.Future[None]
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class ModelledServer:
    """`drains`: a pause lets running requests finish; else it puts them back into the queue, as SGLang's retract."""

    def __init__(self, *, slots: int, decode_s: float, vocab_size: int, drains: bool) -> None:
        self.slots, self.decode_s, self.vocab_size, self.drains = slots, decode_s, vocab_size, drains
        self.version = 0
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []
        self.is_open, self.has_work, self.is_empty = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.is_open.set()
        self.first_s: float | None = None
        self.slot_s = self.busy_s = 0.0
        self.random = random.Random(0)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/stats", self.stats)
        app.router.add_route("*", "/{path:.*}", self.control)
        app.on_startup.append(self.start)
        return app

    async def start(self, app: web.Application) -> None:
        app["decoding"] = asyncio.create_task(self.decode())

    async def decode(self) -> None:
        clock = time.monotonic()
        while True:
            if not self.running and not (self.queue and self.is_open.is_set()):
                self.is_empty.set()
                self.has_work.clear()
                await self.has_work.wait()
                clock = time.monotonic()
                continue
            step_s = 0.0
            while self.queue and self.is_open.is_set() and len(self.running) < self.slots:
                request = self.queue.popleft()
                step_s += (request.prompt_tokens + len(request.tokens)) * self.decode_s / 2 / PREFILL_SPEEDUP
                self.running.append(request)
            self.is_empty.clear()
            step_s += self.decode_s / 2 * (1 + len(self.running) / self.slots)
            # Against the clock, so that the model's time does not depend on how busy this machine is.
            clock += step_s
            await asyncio.sleep(max(0.0, clock - time.monotonic()))
            self.slot_s, self.busy_s = self.slot_s + step_s * len(self.running), self.busy_s + step_s
            for request in self.running:
                request.tokens.append(self.random.randrange(2, self.vocab_size))
                request.versions.append(self.version)
                if len(request.tokens) == request.wanted and not request.done.done():
                    request.done.set_result(None)
            self.running = [request for request in self.running if not request.done.done()]

    async def generate(self, http: web.Request) -> web.Response:
        body = orjson.loads(await http.read())
        self.first_s = self.first_s or time.monotonic()
        done = asyncio.get_running_loop().create_future()
        wanted = body["sampling_params"]["max_new_tokens"]
        request = Request(body["rid"], len(body["input_ids"]), wanted, done)
        self.queue.append(request)
        self.has_work.set()
        await done
        starts = [i for i in range(wanted) if i == 0 or request.versions[i] != request.versions[i - 1]]
        spans = [
            {"version": str(request.versions[start]), "start": start, "end": end}
            for start, end in zip(starts, [*starts[1:], wanted], strict=True)
        ]
        meta = {
            "id": request.rid,
            "finish_reason": {"type": "length", "length": wanted},
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": wanted,
            "weight_version": str(self.version),
            "weight_versions": spans,
            "output_token_logprobs": [[LOGPROB, token, None] for token in request.tokens],
        }
        answer = {"text": "", "output_ids": request.tokens, "meta_info": meta}
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    async def stats(self, _: web.Request) -> web.Response:
        elapsed = time.monotonic() - (self.first_s or time.monotonic())
        return web.json_response({"elapsed_s": elapsed, "slot_s": self.slot_s, "busy_s": self.busy_s})

    async def control(self, http: web.Request) -> web.Response:
        if http.path == "/server_info":
            limits = {"context_length": 1 << 20, "vocab_size": self.vocab_size}
            return web.json_response({"version": "0.5.23", "tp_size": 1, "dp_size": 1, **limits})
        if http.path == "/model_info":
            return web.json_response({"model_path": "/nowhere", "weight_version": str(self.version)})
        if http.path == "/pause_generation":
            self.is_open.clear()
            if self.drains:
                if self.running:
                    await self.is_empty.wait()
            else:
                self.queue.extendleft(reversed(self.running))
                self.running = []
        elif http.path == "/continue_generation":
            self.is_open.set()
            self.has_work.set()
        elif http.path == "/update_weights_from_disk":
            self.version = int(orjson.loads(await http.read())["weight_version"])
        return web.json_response({"success": True, "message": "done"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--decode-ms", type=float, default=5.0)
    parser.add_argument("--vocab-size", type=int, default=48)
    parser.add_argument("--drains", action="store_true")
    args = parser.parse_args()

    async def serve() -> None:
        server = ModelledServer(
            slots=args.slots, decode_s=args.decode_ms / 1000, vocab_size=args.vocab_size, drains=args.drains
        )
        runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", args.port).start()
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
