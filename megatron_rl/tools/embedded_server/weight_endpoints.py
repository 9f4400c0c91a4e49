"""The weight endpoints: update groups, sessions, updates over a group or from disk, checksums.

An update is checked as a whole before anything is received. A paused server receives tensors into the weights
themselves, which nobody reads meanwhile: a broadcast that breaks leaves a part of the new ones, and INCOMPLETE as the
weight version until the next one is whole. Flat buckets, and all that a server receives while it generates, change the
first weight once they are there as a whole, so that a broken one leaves the old weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web

from megatron_rl.tools.embedded_server.batcher import Batcher
from megatron_rl.tools.embedded_server.bodies import BODIES
from megatron_rl.tools.embedded_server.direct_updates import changes, shared_tensors
from megatron_rl.tools.embedded_server.fields import MOST_LETTERS, field, integer, shown
from megatron_rl.tools.embedded_server.responses import Handler, json_response, read_object, wait
from megatron_rl.weights.adapter_rules import AdaptedMatrices
from megatron_rl.weights.update_group import TensorSpec, join_update_group, leave_update_group, unpack_bucket

INCOMPLETE = "incomplete"
"""The weight version after an update that broke on its way."""
MOST_RANKS = 100_000
MOST_JOINING = 4
MOST_NUMBERS = 2**20
"""Of one response."""
HOST_NAME = re.compile(r"[\w.:%-]{1,255}", re.ASCII)
MAX_DELTA_BYTES = 128 * 1024**2
"""A trainer sends parcels of about half of that."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightEndpoints:
    """Lives in the event loop's thread; the weights themselves change in the batcher's.

    One update is begin_weight_update, any number of update_weights_from_... and end_weight_update. The trainer pauses
    generation before it, compares checksums by weights_checker after it, and then continues.
    """

    def __init__(self, batcher: Batcher, model_path: str):
        self.batcher = batcher
        self.model_path = model_path
        """The folder that the weights were last read from."""
        self.adapter: str | None = None
        """The name of the adapter that is merged into the weights."""
        self._groups: dict[str, tuple[dist.ProcessGroup, torch.device]] = {}
        self._joining: set[str] = set()
        """Groups that a thread is trying to join."""
        self._session_open = False
        self._wire = asyncio.Lock()
        """Held while a bucket arrives: buckets arrive one after the other, in the order of their requests."""

    def routes(self) -> list[web.RouteDef]:
        posts = {
            "/init_weights_update_group": self.init_group,
            "/destroy_weights_update_group": self.destroy_group,
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/update_weights_from_distributed": self.update_from_distributed,
            "/update_weights_from_tensor": self.update_from_tensor,
            "/update_weights_from_delta": self.update_from_delta,
            "/update_weights_from_disk": self.update_from_disk,
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
            "/update_weight_version": self.update_version,
            "/weights_checker": self.check,
            "/get_weights_by_name": self.get_by_name,
        }
        routes = [web.post(path, refusals_as_responses(handler)) for path, handler in posts.items()]
        return [*routes, web.get("/get_weights_by_name", refusals_as_responses(self.get_by_name))]

    async def init_group(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        name, backend = field(body, "group_name", str, "weight_update_group"), field(body, "backend", str, "nccl")
        address, port = field(body, "master_address", str), integer(body, "master_port", 1, 65_535)
        world_size = integer(body, "world_size", 2, MOST_RANKS)
        rank = integer(body, "rank_offset", 1, world_size - 1)  # rank 0 is the trainer, which hosts the group's store
        if not HOST_NAME.fullmatch(address):
            raise ValueError(f"master_address = {shown(address)}: must be an address or the name of a host")
        if name in self._groups:
            raise ValueError(f"group_name = {shown(name)}: that group exists; destroy it first")
        if backend not in ("gloo", "nccl") or (backend == "nccl" and self.batcher.model.device.type != "cuda"):
            raise ValueError(f"backend = {shown(backend)}: must be 'gloo', or 'nccl' on a GPU")
        if name in self._joining or len(self._joining) >= MOST_JOINING:
            raise ValueError(
                f"group_name = {shown(name)}: this server is still trying to join {', '.join(sorted(self._joining))}, "
                f"and tries at most {MOST_JOINING} groups at a time, each once; wait until it has given up."
            )
        device = self.batcher.model.device if backend == "nccl" else torch.device("cpu")

        def join() -> None:
            """Join in a thread, which lives until it has or gives up, also where the client is gone."""
            try:
                self._groups[name] = (
                    join_update_group(
                        address=address, port=port, rank=rank, world_size=world_size, name=name, backend=backend
                    ),
                    device,
                )
            finally:
                self._joining.discard(name)

        self._joining.add(name)
        try:
            await in_thread(join)
        # torch's DistStoreError and DistNetworkError are RuntimeErrors.
        except (RuntimeError, OSError) as error:
            raise ValueError(f"Failed to join group {name} at {address}:{port}: {error}") from error
        return success(f"Joined group {name} as rank {rank} of {world_size}.")

    async def destroy_group(self, http: web.Request) -> web.Response:
        name = field(await read_object(http), "group_name", str, "weight_update_group")
        async with self._wire:
            if name not in self._groups:
                raise ValueError(f"group_name = {shown(name)}: no such group")
            # In a thread, also the last reference: gloo waits for what is still on the wire.
            await in_thread(lambda: leave_update_group(self._groups.pop(name)[0]))
        return success(f"Left group {name}.")

    async def begin(self, http: web.Request) -> web.Response:
        selector = field(await read_object(http), "selector", str, "all")
        if selector not in ("all", "target"):
            raise ValueError(f"selector = {shown(selector)}: must be 'all' or 'target'; there is no draft model")
        if self._session_open:
            raise ValueError("begin_weight_update: a weight update is already open; call end_weight_update()")
        self._session_open = True
        return success("Weight update begun.")

    async def end(self, http: web.Request) -> web.Response:
        await read_object(http)
        if not self._session_open:
            raise ValueError("end_weight_update: no weight update is open; call begin_weight_update() first")
        self._session_open = False
        return success("Weight update ended.")

    async def update_from_distributed(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        self._require_session("update_weights_from_distributed")
        # SGLang has one bucket in a request; several, of as many groups, arrive at the same time.
        parts = field(body, "parts", list, [body])
        arrivals = [self._arrival(part) for part in parts]
        if field(body, "abort_all_requests", bool, False):
            await wait(self.batcher.abort(None))
        # Refused before anything is received: what has arrived in the weights themselves cannot be undone.
        if self.batcher.paused:
            self._refuse_flush(body)
        if self.batcher.paused and not all(arrival.flattened for arrival in arrivals):
            broken = await self._receive_in_place(arrivals, body)
        else:
            broken = await self._receive_aside(arrivals, body)
        if broken is not None:
            raise ValueError(f"Failed to update weights: {broken}")
        return success(f"Succeeded to update {sum(len(arrival.specs) for arrival in arrivals)} tensors.")

    def _arrival(self, part: dict[str, Any]) -> Arrival:
        if type(part) is not dict:
            raise ValueError(f"parts: {shown(part)} must be an object with names, dtypes, shapes and group_name")
        specs, load_format = tensor_specs(part), field(part, "load_format", str, None)
        if load_format not in (None, "flattened_bucket"):
            raise ValueError(f"load_format = {shown(load_format)}: must be null or 'flattened_bucket'")
        for spec in specs:
            self.batcher.model.check_tensor(spec.name, spec.shape)
        name = field(part, "group_name", str, "weight_update_group")
        if name not in self._groups:
            raise ValueError(f"group_name = {shown(name)}: no such group; call /init_weights_update_group first")
        return Arrival(specs, *self._groups[name], load_format is not None)

    async def update_from_tensor(self, http: web.Request) -> web.Response:
        """Read a bucket in shared memory. The response says that it was read: the trainer may fill it again."""
        body = await read_object(http)
        self._require_session("update_weights_from_tensor")
        if "serialized_named_tensors" in body:
            raise ValueError(
                "serialized_named_tensors: the embedded server unpickles nothing; send names, dtypes, shapes and "
                "shared_memory, the bucket's handle"
            )
        specs = tensor_specs(body)
        await wait(self._update(await in_thread(lambda: shared_tensors(body, specs, self.batcher.model)), body))
        return success(f"Succeeded to update {len(specs)} tensors.")

    async def update_from_delta(self, http: web.Request) -> web.Response:
        """Change the weights that are held. SGLang has no such endpoint."""
        self._require_session("update_weights_from_delta")
        async with http.app[BODIES].raw(http, MAX_DELTA_BYTES) as body:
            write, version = await in_thread(lambda: changes(body, self.batcher.model))
        await wait(self._update(write, {"weight_version": version, "flush_cache": False}))
        return success("Succeeded to change the weights.")

    def _require_session(self, update: str) -> None:
        if not self._session_open:
            raise ValueError(f"{update} must run between begin_weight_update() and end_weight_update()")

    async def _receive_aside(self, arrivals: list[Arrival], body: dict[str, Any]) -> str | None:
        """Receive buckets while the server may be generating, write them between two turns; return what broke it."""
        try:
            async with self._wire:
                tensors = await in_thread(lambda: list(arriving(arrivals, {})))
        except RuntimeError as error:  # the sender died
            return str(error)
        await wait(self._update(lambda: self._write(tensors), body))
        return None

    async def _receive_in_place(self, arrivals: list[Arrival], body: dict[str, Any]) -> str | None:
        """Receive buckets into the weights, in the thread that reads them; return what broke it.

        A member that dies ends this at once; one that hangs does at the group's deadline, which is the publisher's too.
        """

        def receive() -> str | None:
            specs = [spec for arrival in arrivals if not arrival.flattened for spec in arrival.specs]
            memory = {spec.name: self.batcher.model.memory_of(spec.name, spec.dtype) for spec in specs}
            try:
                self._write(arriving(arrivals, memory))
            except RuntimeError as error:
                return str(error)
            return None

        async with self._wire:
            return await wait(self._update(receive, body))

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.batcher.model.write(name, tensor)

    async def update_from_disk(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        path = field(body, "model_path", str)
        if field(body, "abort_all_requests", bool, False):
            await wait(self.batcher.abort(None))
        try:
            await wait(self._update(lambda: self.batcher.model.load(Path(path)), body))
        except OSError as error:  # a file is broken
            raise ValueError(f"Failed to update weights: {error}") from error
        self.model_path = path
        message = f"Succeeded to update model weights. Weight version updated to {self.batcher.weight_version}."
        return json_response(
            {"success": True, "message": message, "num_paused_requests": self.batcher.running_requests}
        )

    async def load_adapter(self, http: web.Request) -> web.Response:
        """Merge an adapter in PEFT's format into the weights. Unlike SGLang, this server has one at a time."""
        body = await read_object(http)
        name, folder = field(body, "lora_name", str), field(body, "lora_path", str)
        if self.adapter is not None:
            raise ValueError(f"lora_name = {shown(name)}: the adapter {shown(self.adapter)} is loaded; unload it first")
        await self._write_matrices(folder, is_merged=True)
        self.adapter, self._adapter_folder = name, folder
        return success(f"Loaded adapter {name}.")

    async def unload_adapter(self, http: web.Request) -> web.Response:
        name = field(await read_object(http), "lora_name", str)
        if name != self.adapter:
            raise ValueError(f"lora_name = {shown(name)}: no such adapter is loaded")
        await self._write_matrices(self._adapter_folder, is_merged=False)
        self.adapter = None
        return success(f"Unloaded adapter {name}.")

    async def _write_matrices(self, folder: str, *, is_merged: bool) -> None:
        """Write the matrices of an adapter's folder, with it or as the model's folder has them."""

        def write() -> None:
            matrices = AdaptedMatrices(self.model_path, folder)
            self._write(matrices.merged(self.batcher.model.dtype) if is_merged else matrices.plain())

        try:
            await wait(self._update(write, {"flush_cache": False}))
        except OSError as error:
            raise ValueError(f"lora_path = {shown(folder)}: {error}") from error

    def _refuse_flush(self, body: dict[str, Any]) -> bool:
        """Return whether the update flushes the cache; ValueError where paused requests hold it."""
        flush = field(body, "flush_cache", bool, True)
        if flush and self.batcher.running_requests:
            raise ValueError(
                "flush_cache = true: requests paused in_place hold the cache; send flush_cache = false, or pause "
                "with mode retract or abort. No weight was changed."
            )
        return flush

    def _update(self, change: Callable[[], str | None], body: dict[str, Any]) -> Future:
        """Change the weights between two turns: when all requests have finished, or at once if paused.

        `change` may return what broke it on its way, and so does the future then.
        """
        version = field(body, "weight_version", str, None)

        # Looked at once more: before this turn the server may have been paused, or its memory lent.
        def run() -> str | None:
            self.batcher.require("weights")
            flush = self._refuse_flush(body)
            broken = change()
            self.batcher.weights_changed(version if broken is None else INCOMPLETE)
            if flush:
                self.batcher.flush_now()
            return broken

        return self.batcher.call(run, exclusive=True)

    async def update_version(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        version = field(body, "new_version", str)
        if field(body, "abort_all_requests", bool, True):
            await wait(self.batcher.abort(None))
        await wait(self.batcher.call(lambda: self.batcher.set_version(version)))
        return json_response(
            {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
        )

    async def get_by_name(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        name, count = field(body, "name", str), integer(body, "truncate_size", 0, MOST_NUMBERS, 100)
        weight = self.batcher.model.weight(name)
        if weight is None:
            raise ValueError(f"name = {shown(name)}: no such tensor; Hugging Face names are expected")

        def read() -> list[float]:
            self.batcher.require("weights")
            rows = weight[:count]
            if rows.numel() > MOST_NUMBERS:
                raise ValueError(f"truncate_size = {count}: {rows.numel():,} numbers; at most {MOST_NUMBERS:,} go out")
            return rows.float().tolist()

        return json_response(await wait(self.batcher.call(read)))

    async def check(self, http: web.Request) -> web.Response:
        action = field(await read_object(http), "action", str, "checksum")
        if action != "checksum":
            raise ValueError(f"action = {shown(action)}: the embedded server knows only 'checksum'")

        def take() -> dict[str, str]:
            self.batcher.require("weights")
            return self.batcher.model.checksums()

        checksums = await wait(self.batcher.call(take))
        whole = hashlib.sha256("".join(f"{n}:{h}" for n, h in sorted(checksums.items())).encode()).hexdigest()
        rank = {"checksums": checksums, "per_gpu_checksum": whole, "parallelism_info": {"tp_rank": 0, "tp_size": 1}}
        return json_response({"success": True, "message": "", "ranks": [rank], "per_engine_checksum": whole})


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run `function` in a thread that does not keep the process: one may wait for a trainer that is gone."""
    done: Future = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="weights", daemon=True).start()
    # The caller may be cancelled by a client that hangs up, which must not cancel what the thread will set.
    return await asyncio.shield(wait(done))


def refusals_as_responses(handler: Handler) -> Handler:
    """Make a handler respond to what it refuses in SGLang's shape for updates, not in that of `/generate`."""

    async def answered(http: web.Request) -> web.StreamResponse:
        try:
            return await handler(http)
        except ValueError as error:
            return json_response({"success": False, "message": str(error)}, 400)

    return answered


def success(message: str) -> web.Response:
    return json_response({"success": True, "message": message})


def tensor_specs(body: dict[str, Any]) -> list[TensorSpec]:
    names, dtypes, shapes = (field(body, key, list) for key in ("names", "dtypes", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: must be equally many")
    specs = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if not isinstance(name, str) or len(name) > MOST_LETTERS:
            raise ValueError(f"names: {shown(name)} must be the name of a tensor")
        known = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
        if known is None:
            raise ValueError(f"{name}: dtype {shown(dtype)} must be one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name}: shape {shown(shape)} must be a list of integers")
        specs.append(TensorSpec(name, known, tuple(shape)))
    return specs


@dataclass(frozen=True)
class Arrival:
    """A bucket that rank 0 of a group is sending."""

    specs: list[TensorSpec]
    group: dist.ProcessGroup
    device: torch.device
    """A device on which the group's backend can receive."""
    flattened: bool
    """All bytes in one broadcast; otherwise one for each tensor, in order."""

    def begin(self, memory: Mapping[str, torch.Tensor | None]) -> tuple[list[torch.Tensor], deque[dist.Work]]:
        """Begin to receive; return the tensors as they will be, and the broadcasts: of each tensor, or of all."""
        if self.flattened:
            pieces = [torch.empty(sum(spec.nbytes for spec in self.specs), dtype=torch.uint8, device=self.device)]
            tensors = unpack_bucket(pieces[0], self.specs)
        else:
            pieces = tensors = [self._place_for(spec, memory.get(spec.name)) for spec in self.specs]
        return tensors, deque(dist.broadcast(piece, src=0, group=self.group, async_op=True) for piece in pieces)

    def _place_for(self, spec: TensorSpec, own: torch.Tensor | None) -> torch.Tensor:
        if own is not None and own.device == self.device:
            return own
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)


def arriving(arrivals: list[Arrival], memory: Mapping[str, torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor once it has arrived, in `memory` (by name) where there is some for it that can be used.

    All arrive at once, and are waited for in turn: a tensor is written while those behind it are on the wire.
    """
    begun: list[tuple[list[torch.Tensor], deque[dist.Work]]] = []
    try:
        for arrival in arrivals:
            begun.append(arrival.begin(memory))
        for arrival, (tensors, broadcasts) in zip(arrivals, begun, strict=True):
            for spec, tensor in zip(arrival.specs, tensors, strict=True):
                if broadcasts:
                    broadcasts.popleft().wait()
                yield spec.name, tensor
    finally:
        for _, broadcasts in begun:
            broadcasts.clear()  # in a traceback they would outlive their group, which gloo does not forgive
