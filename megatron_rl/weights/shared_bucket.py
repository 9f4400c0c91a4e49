"""Buckets of weights in memory shared by trainer and servers of one host: CUDA IPC on a GPU, /dev/shm on a CPU.

The trainer creates a bucket, fills it and keeps it until every server has read it. An embedded server maps the same
memory by the bucket's handle. The handle is plain JSON, so that this server never unpickles data from the network. An
SGLang server rebuilds the bucket's tensor from a pickle, in the format of SGLang 0.5.19 and 0.5.21.
"""

from __future__ import annotations

import base64
import contextlib
import io
import mmap
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_rl.api import DRAFT_PREFIX
from megatron_rl.weights.update_group import TensorSpec

SHARED_FILES = Path("/dev/shm")
FILE_NAME = re.compile(r"torch_\d+_\d+_\d+")
EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)true", re.IGNORECASE)
REMEDY = (
    "rollout.publication = ipc needs trainer and server on one host, with one /dev/shm or with the trainer's GPU "
    "visible to the server; set rollout.publication=group."
)


class SharedBucket:
    """A bucket in shared memory; `flat` is `[nbytes]` uint8. Raises RuntimeError if memory is insufficient.

    bucket = SharedBucket(1024, torch.device("cpu"))
    bucket.flat.fill_(7)
    open_bucket(bucket.handle(), 1024)  # in another process: 1024 sevens, and nothing was copied
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.file: Path | None = None  # in /dev/shm; None on a GPU
        if device.type == "cuda":
            torch.cuda.ipc_collect()  # frees earlier buckets that readers have released
            with without_expandable_segments():
                self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
            return
        free = shutil.disk_usage(SHARED_FILES).free
        if nbytes > free:  # writing would kill the process with SIGBUS
            raise RuntimeError(
                f"{SHARED_FILES}: {free / 1e6:.0f} MB are free, and a bucket of rollout.publication = ipc takes "
                f"{nbytes / 1e6:.0f} MB; make it larger (docker: --shm-size), or set rollout.publication=group."
            )
        # Same as torch's sharing strategy `file_system`, which would be a process-wide setting.
        storage = torch.UntypedStorage._new_using_filename_cpu(nbytes)
        self.flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.file = SHARED_FILES / storage._share_filename_cpu_()[1].decode().lstrip("/")

    def handle(self) -> dict[str, Any]:
        """Return a handle for `open_bucket`. On a GPU each reader needs its own handle."""
        if self.file is not None:
            # torch stores a reference count before the bytes.
            return {"file": self.file.name, "offset": self.file.stat().st_size - self.flat.numel()}
        device, *parts = self.flat.untyped_storage()._share_cuda_()
        coded = [{"bytes": base64.b64encode(p).decode()} if isinstance(p, bytes) else p for p in parts]
        return {"gpu": str(torch.cuda.get_device_properties(device).uuid), "parts": coded}

    def pickled(self, specs: Sequence[TensorSpec]) -> str:
        """Return an entry for the field `serialized_named_tensors` of an SGLang request. Each rank needs its own entry.

        In the entry, a draft head's tensors have the names that SGLang's model of the head expects.
        """
        metadata, start = [], 0
        for spec in specs:
            place = {"start_idx": start, "end_idx": start + spec.nbytes, "numel": spec.nbytes}
            metadata.append(
                SimpleNamespace(name=spec.name.removeprefix(DRAFT_PREFIX), shape=spec.shape, dtype=spec.dtype, **place)
            )
            start += spec.nbytes
        written = io.BytesIO()
        _SharingPickler(written).dump({"flattened_tensor": self.flat[:start], "metadata": metadata})
        return base64.b64encode(written.getvalue()).decode()

    def close(self) -> Path | None:
        """Release the memory. Return the bucket's file if readers still have it open, else None.

        The caller must delete that file later, because a dead server never releases it. GPU memory stays allocated
        while a reader has it open.
        """
        is_cuda = self.flat.is_cuda
        del self.flat
        if is_cuda:
            torch.cuda.ipc_collect()
        return self.file if self.file is not None and self.file.exists() else None


@contextlib.contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Turn off expandable_segments in this block, so that other processes can open the GPU memory allocated in it.

    The handle of an expandable segment is a file descriptor. A reader would have to take it from this process
    (pidfd_getfd). Containers do not permit this, and neither do kernels with Yama's default.
    """
    settings = torch._C._accelerator_getAllocatorSettings()
    if not EXPANDABLE.search(settings):
        yield
        return
    # All settings again, because torch resets those that are not given.
    torch._C._accelerator_setAllocatorSettings(EXPANDABLE.sub(r"\1False", settings))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


class _SharingPickler(pickle.Pickler):
    """Pickles tensors in shared memory as handles, using only functions that SGLang's unpickler allows."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(value)
            uuid = str(torch.cuda.get_device_properties(value.device).uuid)  # device numbers differ between processes
            return rebuild, (*arguments[:6], uuid, *arguments[7:])
        if isinstance(value, Tensor):
            storage = torch.TypedStorage(wrap_storage=value.untyped_storage(), dtype=value.dtype, _internal=True)
            place = value.storage_offset(), value.size(), value.stride(), False
            return reductions.rebuild_tensor, (Tensor, storage, place)
        if isinstance(value, torch.TypedStorage):
            return reductions.rebuild_typed_storage, (value._untyped_storage, value.dtype)
        if isinstance(value, torch.UntypedStorage):
            value._shared_incref()  # the reader decrements it
            return reductions.rebuild_storage_filename, (torch.UntypedStorage, *value._share_filename_cpu_())
        return NotImplemented


def open_bucket(handle: dict[str, Any], nbytes: int) -> Tensor:
    """Map the first `nbytes` of a bucket and return them as a tensor `[nbytes]` uint8, which must only be read.

    The memory is released with the tensor. Raises ValueError if the handle is not valid on this host.
    """
    if "gpu" in handle:
        return _open_on_gpu(handle)[:nbytes]
    name, offset = handle.get("file"), handle.get("offset")
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name) or type(offset) is not int or offset < 0:
        raise ValueError(f"shared_memory = {handle!r}: must be a handle that the trainer made of a bucket")
    try:
        # FILE_NAME allows no folder in the name. O_NOFOLLOW refuses a link to a file elsewhere.
        file = os.open(SHARED_FILES / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise ValueError(f"shared_memory.file = {name!r}: {error.strerror}. {REMEDY}") from None
    try:
        size = os.fstat(file).st_size
        if offset + nbytes > size:
            raise ValueError(f"shared_memory.file = {name!r}: has {size} bytes; {offset} + {nbytes} are announced")
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        mapped = mmap.mmap(file, offset + nbytes, access=mmap.ACCESS_COPY)  # private: writes do not reach others
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
