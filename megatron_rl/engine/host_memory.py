"""Memory of the host in relation to the forked processes that write checkpoints.

A fork makes every page of the parent copy-on-write: without a GPU, training would copy all weights, gradients and
optimizer states page by page in the step after it, which took three times the step itself. So writers get a copy in
shared memory, which is used again with every checkpoint, and training's own tensors are left out of the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_PORTABLE = 1
"""Of cudaHostRegister: page-locked for every device of this process."""
_DONT_FORK, _DO_FORK = 10, 11
"""Of madvise(2), on Linux."""
ALIGNMENT = 64
LEAST_BYTES = 1024 * 1024
"""Smaller tensors are not worth a system call."""


class SharedCopies:
    """Copies of tensors in memory that processes forked from this one share with it."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy the tensors, and forget the copies made before: whoever read those must be done.

        Each copy is a storage of its own, of its own size: torch.save writes the whole storage of a view.
        """
        sizes = [math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in tensors]
        if sum(sizes) > len(self.memory):
            self.memory = mmap.mmap(-1, sum(sizes))  # not from /dev/shm, which containers make small
        copies, start = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            if tensor.numel():
                room = torch.frombuffer(self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
                tensor = room.view(tensor.shape).copy_(tensor)
            copies.append(tensor)
            start += size
        return copies


class _PageLocked(mmap.mmap):
    """Memory that a GPU reads and writes by itself, until nobody holds it."""

    def lock(self, address: int) -> None:
        self.address = address
        code = int(torch.cuda.cudart().cudaHostRegister(address, len(self), _PORTABLE))
        if code != 0:
            raise RuntimeError(
                f"host memory: {len(self) / 1e9:.1f} GB for models that are off their device cannot be page-locked "
                f"(CUDA error {code}); give the job more memory (--mem, ulimit -l), or set run.offload=false or "
                f"rollout.colocated=false."
            )

    def __del__(self) -> None:
        if hasattr(self, "address"):
            torch.cuda.cudart().cudaHostUnregister(self.address)


def page_locked(nbytes: int, *, has_gpu: bool) -> Tensor:
    """Return so many bytes of host memory (uint8), page-locked where there is a GPU.

    torch's own page-locked memory comes in powers of two: up to twice of what was asked for.
    """
    memory = _PageLocked(-1, max(nbytes, mmap.PAGESIZE))
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    if has_gpu:
        memory.lock(flat.data_ptr())
    return flat


@contextlib.contextmanager
def left_out_of_forks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep the large ones of these host tensors out of processes forked meanwhile, which must not touch them."""
    libc = ctypes.CDLL(None, use_errno=True)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    spans = []
    for address, storage in storages.items():
        if storage.device.type == "cpu" and storage.nbytes() >= LEAST_BYTES:
            # Whole pages, and not the first one: an allocator keeps its own notes in front of what it gives.
            first = (address // mmap.PAGESIZE + 2) * mmap.PAGESIZE
            last = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
            spans.append((ctypes.c_void_p(first), ctypes.c_size_t(last - first)))
    try:
        for span in spans:
            libc.madvise(*span, _DONT_FORK)  # advice: where it is not taken the fork is slower, and as right
        yield
    finally:
        for span in spans:
            libc.madvise(*span, _DO_FORK)
