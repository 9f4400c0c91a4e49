"""Weight transfer between servers: a server that joins late copies the weights of a peer, which keeps serving.

Tensors are sent one by one, as safetensors, so neither side needs memory for a second model. The peer copies each
tensor between two turns of its batcher, and only if it still has the requested version. Until all tensors are copied,
the receiver holds a useless mixture of weights. So the caller must pass a `weight_version` that no policy has.
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
"""Upper bound for an error body, and for the safetensors header of one tensor."""
PEER_TIMEOUT_S = 60.0
"""Maximum time to connect to the peer, and to wait for its next bytes."""


class PeerEndpoints:
    """Endpoints for weight transfer.

    They run in the event loop's thread, but the batcher's thread reads and writes the weights.
    """

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/peer_tensor", refusals_as_responses(self.give)),
            web.post("/update_weights_from_peer", refusals_as_responses(self.take)),
        ]

    async def give(self, http: web.Request) -> web.Response:
        """Respond with one tensor as a safetensors file. Refuse if the weights' version is not `peer_version`."""
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
        """Copy the weights of version `peer_version` from `peer_url`; they get the version `weight_version` here.

        The request to the peer carries the caller's token, which the peer must accept too. If the caller disconnects,
        copying stops, and the server holds a mixture of old and new tensors.
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
                await wait(being_written)  # only now: writing the previous tensor overlaps with this fetch
                being_written = self._write(name, tensor, own_version)
                count += 1
        await wait(being_written)
        return success(f"Took {count} tensors of {url}.")

    async def _fetch(self, session: aiohttp.ClientSession, url: str, body: dict[str, str], most: int) -> Tensor:
        """Request one tensor from the peer; ValueError if that fails or the response exceeds `most` bytes."""
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
