"""Frees a server's memory for other processes on its device. SGLang's tags `weights` and `kv_cache` choose the parts.

Released weights are lost. After /resume_memory_occupation, the weights' values are undefined until new weights are
published.
"""

from __future__ import annotations

import ctypes

import torch
from aiohttp import web

from megatron_rl.tools.embedded_server.batcher import MEMORY, Batcher
from megatron_rl.tools.embedded_server.fields import shown
from megatron_rl.tools.embedded_server.responses import json_response, read_object, wait

WITHOUT_MEMORY = "cuda_graph"
"""An SGLang tag that is accepted without effect: this server has no CUDA graphs."""


class MemoryEndpoints:
    """Endpoints that release and resume memory.

    They run in the event loop's thread, but the batcher's thread releases and allocates the memory.
    """

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/release_memory_occupation", self.release),
            web.post("/resume_memory_occupation", self.resume),
        ]

    async def release(self, http: web.Request) -> web.Response:
        tags = _tags(await read_object(http))

        def release() -> None:
            self.batcher.release(tags)
            if self.batcher.model.device.type == "cuda":
                torch.cuda.empty_cache()
            else:
                return_freed_memory()

        await wait(self.batcher.call(release))
        return json_response(None)

    async def resume(self, http: web.Request) -> web.Response:
        tags = _tags(await read_object(http))
        await wait(self.batcher.call(lambda: self.batcher.regain(tags)))
        return json_response(None)


def return_freed_memory() -> None:
    """Return freed memory to the operating system. glibc would keep it; with other C libraries this does nothing."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        pass


def _tags(body: dict) -> list[str]:
    tags = body.get("tags") or [*MEMORY, WITHOUT_MEMORY]
    known = (*MEMORY, WITHOUT_MEMORY)
    if not isinstance(tags, list) or not all(tag in known for tag in tags):
        raise ValueError(f"tags = {shown(tags)}: each must be one of {', '.join(known)}; leave them out for all")
    return [tag for tag in MEMORY if tag in tags]
