"""The weight endpoints: update groups, update sessions, updates over a group or from disk, adapters, checksums.

An update is validated as a whole before anything is received. Broadcasts are then received in one of two ways:

- In place, if the server is paused and a bucket is not flattened: tensors are received into the weights themselves. A
  broken broadcast leaves old and new weights mixed; the weight version is then INCOMPLETE until an update succeeds.
- Aside, in separate memory, otherwise: the weights change only after all buckets have arrived. A broken broadcast
  leaves the old weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web

from megatron_rl.tools.embedded_server.batcher import Batcher, Stopped
from megatron_rl.tools.embedded_server.bodies import BODIES
from megatron_rl.tools.embedded_server.direct_updates import changes, shared_tensors
from megatron_rl.tools.embedded_server.fields import MOST_LETTERS, field, integer, shown
from megatron_rl.tools.embedded_server.responses import Handler, json_response, read_object, wait
from megatron_rl.weights.adapter_rules import merged_matrices, plain_matrices
from megatron_rl.weights.update_group import TensorSpec, join_update_group, leave_update_group, unpack_bucket

INCOMPLETE = "incomplete"
"""Weight version after an update that failed halfway."""
MOST_RANKS = 100_000
MOST_JOINING = 4
MOST_NUMBERS = 2**20
"""Maximum number of weight elements in one response."""
HOST_NAME = re.compile(r"[\w.:%-]{1,255}", re.ASCII)
MAX_DELTA_BYTES = 128 * 1024**2
"""Maximum size of one request with a delta. The trainer sends deltas in parcels of about half this size."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightEndpoints:
    """Endpoints that update and check weights.

    They run in the event loop's thread, but weights are written in the batcher's thread.

    One update consists of begin_weight_update, any number of update_weights_from_... and end_weight_update. The trainer
    pauses generation before the update. After it, the trainer compares checksums with weights_checker and resumes
    generation.
    """

    def __init__(self, batcher: Batcher, model_path: str):
        self.batcher = batcher
        self.model_path = model_path
        """Folder from which the weights were last loaded."""
        self.adapter: str | None = None
        """Name of the adapter merged into the weights."""
        self._adapted: list[str] = []
        """Names of the matrices that the adapter changes."""
        self._groups: dict[str, tuple[dist.ProcessGroup, torch.device]] = {}
        self._joining: set[str] = set()
        """Names of groups that a thread is trying to join."""
        self._session_open = False
        self._wire = asyncio.Lock()
        """Lock held while a request's buckets arrive, so that requests receive their buckets one after the other."""

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
            """Join the group. Runs in a thread until it succeeds or fails, even if the client disconnects."""
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
            # The thread also drops the last reference, because gloo then waits for pending transfers.
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
        # SGLang takes one bucket per request. Here a request may have several, sent concurrently on separate groups.
        parts = field(body, "parts", list, [body])
        arrivals = [self._arrival(part) for part in parts]
        if field(body, "abort_all_requests", bool, False):
            await wait(self.batcher.abort(None))
        # Refuse before anything is received: tensors received in place cannot be undone.
        if self.batcher.paused:
            self._refuse_flush(body)
        if self.batcher.paused and not all(arrival.flattened for arrival in arrivals):
            receive = self._receive_in_place
        else:
            receive = self._receive_aside
        count = sum(len(arrival.specs) for arrival in arrivals)
        try:
            await receive(arrivals, body)
        except Stopped:
            raise
        except RuntimeError as error:  # the sender died
            raise ValueError(f"Failed to update weights: {error}") from error
        return success(f"Succeeded to update {count} tensors.")

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
        """Update from a bucket in shared memory. After the response, the trainer may refill the bucket."""
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
        """Apply a delta to the current weights. SGLang has no such endpoint."""
        self._require_session("update_weights_from_delta")
        async with http.app[BODIES].raw(http, MAX_DELTA_BYTES) as body:
            write, version = await in_thread(lambda: changes(body, self.batcher.model))
        await wait(self._update(write, {"weight_version": version, "flush_cache": False}))
        return success("Succeeded to change the weights.")

    def _require_session(self, update: str) -> None:
        if not self._session_open:
            raise ValueError(f"{update} must run between begin_weight_update() and end_weight_update()")

    async def _receive_aside(self, arrivals: list[Arrival], body: dict[str, Any]) -> None:
        """Receive buckets while the server generates, then write them between two of the batcher's turns.

        RuntimeError if a broadcast breaks; the weights are then unchanged.
        """
        async with self._wire:
            tensors = await in_thread(lambda: list(arriving(arrivals, {})))
        await wait(self._update(lambda: self._write(tensors), body))

    async def _receive_in_place(self, arrivals: list[Arrival], body: dict[str, Any]) -> None:
        """Receive buckets into the weights, in the batcher's thread.

        RuntimeError if a broadcast breaks; old and new weights are then mixed. If a group member dies, the error
        comes at once. If a member hangs, it comes at the group's timeout, as on the publisher's side.
        """

        def receive() -> None:
            specs = [spec for arrival in arrivals if not arrival.flattened for spec in arrival.specs]
            memory = {spec.name: self.batcher.model.memory_of(spec.name, spec.dtype) for spec in specs}
            self._write(arriving(arrivals, memory))

        async with self._wire:
            await wait(self._update(receive, body))

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
        """Merge an adapter in PEFT format into the weights. Unlike SGLang, this server holds only one at a time."""
        body = await read_object(http)
        name, folder = field(body, "lora_name", str), field(body, "lora_path", str)
        if self.adapter is not None:
            raise ValueError(f"lora_name = {shown(name)}: the adapter {shown(self.adapter)} is loaded; unload it first")
        self._adapted = await self._write_matrices(folder, lambda: self._merged(folder))
        self.adapter = name
        return success(f"Loaded adapter {name}.")

    async def unload_adapter(self, http: web.Request) -> web.Response:
        """Restore the matrices that the adapter changed, from the model's files. The adapter's folder may be gone."""
        name = field(await read_object(http), "lora_name", str)
        if name != self.adapter:
            raise ValueError(f"lora_name = {shown(name)}: no such adapter is loaded")
        names = self._adapted
        await self._write_matrices(self.model_path, lambda: plain_matrices(self.model_path, names))
        self.adapter = None
        return success(f"Unloaded adapter {name}.")

    def _merged(self, folder: str) -> Iterator[tuple[str, torch.Tensor]]:
        return merged_matrices(self.model_path, folder, self.batcher.model.dtype)

    async def _write_matrices(
        self, folder: Any, tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> list[str]:
        """Write the matrices that an adapter changes, and return their names. folder: the folder named in errors."""
        names: list[str] = []

        def write() -> None:
            for name, tensor in tensors():
                self.batcher.model.write(name, tensor)
                names.append(name)

        try:
            await wait(self._update(write, {"flush_cache": False}))
        except OSError as error:
            raise ValueError(f"lora_path = {shown(str(folder))}: {error}") from error
        return names

    def _refuse_flush(self, body: dict[str, Any]) -> bool:
        """Return True if the update is to flush the cache; ValueError if paused requests still use the cache."""
        flush = field(body, "flush_cache", bool, True)
        if flush and self.batcher.running_requests:
            raise ValueError(
                "flush_cache = true: requests paused in_place hold the cache; send flush_cache = false, or pause "
                "with mode retract or abort. No weight was changed."
            )
        return flush

    def _update(self, change: Callable[[], None], body: dict[str, Any]) -> Future:
        """Call `change` in the batcher's thread, at once if paused, else after all accepted requests have finished.

        If `change` raises after it has changed a weight, the weight version becomes INCOMPLETE.
        """
        version = field(body, "weight_version", str, None)

        # Check again here: since the request arrived, the server may have been paused, or its memory released.
        def run() -> None:
            self.batcher.require("weights")
            flush = self._refuse_flush(body)
            changes_before = self.batcher.model.changes
            try:
                change()
            except Exception:  # whatever ended it, half of the weights may be new
                if self.batcher.model.changes > changes_before:
                    self.batcher.weights_changed(INCOMPLETE)
                raise
            self.batcher.weights_changed(version)
            if flush:
                self.batcher.flush_now()

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
    """Run `function` in a daemon thread: it may wait for a dead trainer, but must not delay the process's exit."""
    done: Future = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="weights", daemon=True).start()
    # If the client disconnects, the caller is cancelled. Shield the future, which the thread still has to set.
    return await asyncio.shield(wait(done))


def refusals_as_responses(handler: Handler) -> Handler:
    """Wrap a handler so that a ValueError becomes a 400 in SGLang's shape for weight updates, not in `/generate`'s."""

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
    """Device on which the group's backend can receive."""
    flattened: bool
    """True if all tensors arrive as one broadcast of bytes. Otherwise there is one broadcast per tensor, in order."""

    def begin(
        self, memory: Mapping[str, torch.Tensor | None]
    ) -> tuple[list[tuple[str, torch.Tensor]], deque[dist.Work]]:
        """Start receiving. Return [(name, tensor to fill)] and the broadcasts: one per tensor, or one if flattened.

        memory: {tensor name: memory to receive into}. A new tensor is allocated if the memory is None, missing or on
        another device, or if the bucket is flattened.
        """
        if self.flattened:
            pieces = [torch.empty(sum(spec.nbytes for spec in self.specs), dtype=torch.uint8, device=self.device)]
            tensors = unpack_bucket(pieces[0], self.specs)
        else:
            pieces = tensors = [self._place_for(spec, memory.get(spec.name)) for spec in self.specs]
        named = [(spec.name, tensor) for spec, tensor in zip(self.specs, tensors, strict=True)]
        return named, deque(dist.broadcast(piece, src=0, group=self.group, async_op=True) for piece in pieces)

    def _place_for(self, spec: TensorSpec, own: torch.Tensor | None) -> torch.Tensor:
        if own is not None and own.device == self.device:
            return own
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)


def arriving(arrivals: list[Arrival], memory: Mapping[str, torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) as each tensor arrives. memory: as for `Arrival.begin`. Empties `arrivals`.

    All transfers run concurrently and are awaited in order. So the caller can write a tensor while later ones arrive.
    RuntimeError if a broadcast breaks. The error holds no reference to a group, because a group closes its connections
    only after its last reference is gone, and until then other servers would wait for data from this one.
    """
    begun: list[tuple[list[tuple[str, torch.Tensor]], deque[dist.Work]]] = []
    try:
        while arrivals:
            begun.append(arrivals.pop(0).begin(memory))
        for tensors, broadcasts in begun:
            for name, tensor in tensors:
                if broadcasts:
                    broadcasts.popleft().wait()
                yield name, tensor
    except RuntimeError as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        arrivals.clear()
        for _, broadcasts in begun:
            broadcasts.clear()  # a traceback would keep them alive longer than their group, which gloo does not allow
