"""Buckets of weights in memory that trainer and servers of one host share: CUDA IPC on a GPU, /dev/shm on a CPU.

The trainer makes a bucket, fills it and keeps it until every server has read it. A server that is given its handle maps
the same memory. The handle is plain JSON, so that the embedded server unpickles nothing that comes from the network;
SGLang has a form of its own, a pickle, in which it rebuilds the tensor (read in 0.5.19 and 0.5.21).
"""

from __future__ import annotations

import base64
import io
import mmap
import os
import pickle
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_rl.weights.update_group import TensorSpec

SHARED_FILES = Path("/dev/shm")
FILE_NAME = re.compile(r"torch_\d+_\d+_\d+")
REMEDY = (
    "rollout.publication = ipc needs trainer and server on one host, with one /dev/shm or with the trainer's GPU "
    "visible to the server; set rollout.publication=group."
)


class SharedBucket:
    """`flat` is `[nbytes]` uint8 in shared memory. RuntimeError where there is not enough of it.

    For example:

        bucket = SharedBucket(1024, torch.device("cpu"))
        bucket.flat.fill_(7)
        open_bucket(bucket.handle(), 1024)  # in another process: 1024 sevens, and nothing was copied
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.file: Path | None = None
        """Of a bucket on a CPU."""
        if device.type == "cuda":
            torch.cuda.ipc_collect()  # what readers of earlier ones have let go of since
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
            return
        free = shutil.disk_usage(SHARED_FILES).free
        if nbytes > free:  # writing would end the process with SIGBUS
            raise RuntimeError(
                f"{SHARED_FILES}: {free / 1e6:.0f} MB are free, and a bucket of rollout.publication = ipc takes "
                f"{nbytes / 1e6:.0f} MB; make it larger (docker: --shm-size), or set rollout.publication=group."
            )
        # As torch does under its sharing strategy `file_system`, which is a global of the process.
        storage = torch.UntypedStorage._new_using_filename_cpu(nbytes)
        self.flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.file = SHARED_FILES / storage._share_filename_cpu_()[1].decode().lstrip("/")

    def handle(self) -> dict[str, Any]:
        """Return a handle for `open_bucket`. On a GPU each is good for one reader."""
        if self.file is not None:
            # torch keeps a count in front of the bytes.
            return {"file": self.file.name, "offset": self.file.stat().st_size - self.flat.numel()}
        device, *parts = self.flat.untyped_storage()._share_cuda_()
        coded = [{"bytes": base64.b64encode(p).decode()} if isinstance(p, bytes) else p for p in parts]
        return {"gpu": str(torch.cuda.get_device_properties(device).uuid), "parts": coded}

    def pickled(self, specs: Sequence[TensorSpec]) -> str:
        """Return an entry of `serialized_named_tensors` for one rank of SGLang; each is good for one reader."""
        metadata, start = [], 0
        for spec in specs:
            place = {"start_idx": start, "end_idx": start + spec.nbytes, "numel": spec.nbytes}
            metadata.append(SimpleNamespace(name=spec.name, shape=spec.shape, dtype=spec.dtype, **place))
            start += spec.nbytes
        written = io.BytesIO()
        _SharingPickler(written).dump({"flattened_tensor": self.flat[:start], "metadata": metadata})
        return base64.b64encode(written.getvalue()).decode()

    def close(self) -> Path | None:
        """Give the memory back, which on a GPU stays while a reader has it open; return a file that readers still have.

        That file is to be removed: a server that died never lets go of it.
        """
        is_cuda = self.flat.is_cuda
        del self.flat
        if is_cuda:
            torch.cuda.ipc_collect()
        return self.file if self.file is not None and self.file.exists() else None


class _SharingPickler(pickle.Pickler):
    """Pickles tensors in shared memory by their handle, with the functions that SGLang's unpickler lets through."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(value)
            uuid = str(torch.cuda.get_device_properties(value.device).uuid)  # numbers differ between processes
            return rebuild, (*arguments[:6], uuid, *arguments[7:])
        if isinstance(value, Tensor):
            storage = torch.TypedStorage(wrap_storage=value.untyped_storage(), dtype=value.dtype, _internal=True)
            place = value.storage_offset(), value.size(), value.stride(), False
            return reductions.rebuild_tensor, (Tensor, storage, place)
        if isinstance(value, torch.TypedStorage):
            return reductions.rebuild_typed_storage, (value._untyped_storage, value.dtype)
        if isinstance(value, torch.UntypedStorage):
            value._shared_incref()  # which the reader takes back
            return reductions.rebuild_storage_filename, (torch.UntypedStorage, *value._share_filename_cpu_())
        return NotImplemented


def open_bucket(handle: dict[str, Any], nbytes: int) -> Tensor:
    """Map the first `nbytes` of the bucket of a handle, `[nbytes]` uint8: to read only. ValueError says what is wrong.

    The memory is let go with the tensor.
    """
    if "gpu" in handle:
        return _open_on_gpu(handle)[:nbytes]
    name, offset = handle.get("file"), handle.get("offset")
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name) or type(offset) is not int or offset < 0:
        raise ValueError(f"shared_memory = {handle!r}: must be a handle that the trainer made of a bucket")
    try:
        # The name matches FILE_NAME, so it has no folder in it; and it must not be a link to a file elsewhere.
        file = os.open(SHARED_FILES / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise ValueError(f"shared_memory.file = {name!r}: {error.strerror}. {REMEDY}") from None
    try:
        size = os.fstat(file).st_size
        if offset + nbytes > size:
            raise ValueError(f"shared_memory.file = {name!r}: has {size} bytes; {offset} + {nbytes} are announced")
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        mapped = mmap.mmap(file, offset + nbytes, access=mmap.ACCESS_COPY)  # what is written here reaches nobody
    finally:
        os.close(file)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=offset)


def _open_on_gpu(handle: dict[str, Any]) -> Tensor:
    uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    if handle["gpu"] not in uuids:
        raise ValueError(f"shared_memory.gpu = {handle['gpu']!r}: not among this server's, {uuids}. {REMEDY}")
    number = uuids.index(handle["gpu"])
    with torch.cuda.device(number):
        parts = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in handle["parts"]]
        storage = torch.UntypedStorage._new_shared_cuda(number, *parts)
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{number}").set_(storage)
