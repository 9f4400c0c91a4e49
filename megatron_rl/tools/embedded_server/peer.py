"""Weights from server to server: one that comes late takes those of a peer, which goes on serving.

Tensors travel one by one, as safetensors, so that neither side holds a second model. The peer copies each between two
turns, and only while it has the version that was asked for. What the other one has in between is worth nothing, which
the name that it was given for it says.
"""

from __future__ import annotations

from concurrent.futures import Future

import aiohttp
import safetensors.torch
from aiohttp import web
from safetensors import SafetensorError
from torch import Tensor

from megatron_rl.tools.embedded_server.batcher import Batcher
from megatron_rl.tools.embedded_server.fields import field, shown
from megatron_rl.tools.embedded_server.responses import read_object, wait
from megatron_rl.tools.embedded_server.weight_endpoints import refusals_as_responses, success

HEADER_BYTES = 64 * 1024
"""More than an error or the head of a safetensors file of one tensor takes."""
PEER_TIMEOUT_S = 60.0
"""Longest that a peer may take over one tensor."""


class PeerEndpoints:
    """Lives in the event loop's thread; weights are read and written in the batcher's."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/peer_tensor", refusals_as_responses(self.give)),
            web.post("/update_weights_from_peer", refusals_as_responses(self.take)),
        ]

    async def give(self, http: web.Request) -> web.Response:
        """Answer one tensor of `peer_version`, as a safetensors file."""
        body = await read_object(http)
        name, version = field(body, "name", str), field(body, "peer_version", str)

        def copy() -> Tensor:
            self.batcher.require("weights")
            if self.batcher.weight_version != version:
                raise ValueError(
                    f"peer_version = {shown(version)}: this server has {shown(self.batcher.weight_version)} now"
                )
            if name not in self.batcher.model.parameters:
                raise ValueError(f"name = {shown(name)}: no such tensor; Hugging Face names are expected")
            return self.batcher.model.parameters[name].to("cpu", copy=True)

        tensor = await wait(self.batcher.call(copy))
        return web.Response(body=safetensors.torch.save({name: tensor}), content_type="application/octet-stream")

    async def take(self, http: web.Request) -> web.Response:
        """Load the weights that `peer_url` has under `peer_version`, and call them `weight_version`.

        With the caller's own key, which is the peer's as well. A caller that hangs up ends it: some tensors are the
        peer's then and some the old ones.
        """
        body = await read_object(http)
        url, version = field(body, "peer_url", str), field(body, "peer_version", str)
        own_version = field(body, "weight_version", str)
        headers = {key: http.headers[key] for key in ("Authorization",) if key in http.headers}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=PEER_TIMEOUT_S, sock_read=PEER_TIMEOUT_S)
        count, being_written = 0, Future[None]()
        being_written.set_result(None)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, auto_decompress=False) as session:
            for name, own in self.batcher.model.parameters.items():
                most = own.nbytes + HEADER_BYTES
                tensor = await self._fetch(session, url, {"name": name, "peer_version": version}, most)
                if (tensor.dtype, tensor.shape) != (own.dtype, own.shape):
                    raise ValueError(f"{name}: the peer's is {describe(tensor)} and this server's {describe(own)}")
                await wait(being_written)  # the next one is on its way meanwhile
                being_written = self._write(name, tensor, own_version)
                count += 1
        await wait(being_written)
        return success(f"Took {count} tensors of {url}.")

    async def _fetch(self, session: aiohttp.ClientSession, url: str, body: dict[str, str], most: int) -> Tensor:
        """Ask for a tensor that takes `most` bytes at most."""
        try:
            async with session.post(f"{url}/peer_tensor", json=body, allow_redirects=False) as response:
                if response.content_length is None or response.content_length > most:
                    raise ValueError(f"peer_url = {url}: answered {response.content_length} bytes, not {most} at most")
                content = await response.read()
                if response.status != 200:
                    raise ValueError(
                        f"peer_url = {url}: HTTP {response.status}: {content[:300].decode(errors='replace')}"
                    )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ValueError(f"peer_url = {url}: {type(error).__name__}: {error}; is that server up?") from error
        try:
            return safetensors.torch.load(content)[body["name"]]
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"peer_url = {url}: answered no tensor {body['name']}: {error!r}") from error

    def _write(self, name: str, tensor: Tensor, version: str) -> Future:
        def write() -> None:
            self.batcher.require("weights")
            self.batcher.model.write(name, tensor)
            self.batcher.weights_changed(version)

        return self.batcher.call(write, exclusive=True)


def describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
