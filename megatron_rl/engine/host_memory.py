"""Host memory shared with the forked processes that write checkpoints, and page-locked host memory.

A fork makes every page of the parent copy-on-write. Without a GPU, the next training step would copy all its tensors
page by page. So writers get a copy in shared memory, and the original tensors are excluded from the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_PORTABLE = 1  # flag of cudaHostRegister: page-locked for all devices of this process
_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE: missing memory is noticed when it is touched, not when it is mapped
_DONT_FORK, _DO_FORK = 10, 11  # Linux's MADV_DONTFORK and MADV_DOFORK
ALIGNMENT = 64
LEAST_BYTES = 1024 * 1024  # minimum size of a tensor to exclude from forks


class SharedCopies:
    """Copies of tensors in memory that is shared with forked processes."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return copies of the tensors in shared memory.

        They overwrite the copies of an earlier call, so nobody may be reading those any more.
        """
        sizes = [math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in tensors]
        if sum(sizes) > len(self.memory):
            self.memory = mmap.mmap(-1, sum(sizes))  # anonymous memory: containers limit /dev/shm
        copies, start = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            if tensor.numel():
                # A storage of exactly the tensor's size, because torch.save writes the whole storage of a view.
                room = torch.frombuffer(self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
                tensor = room.view(tensor.shape).copy_(tensor)
            copies.append(tensor)
            start += size
        return copies


class _PageLocked(mmap.mmap):
    """Page-locked memory that a GPU can access directly. Freeing it also unregisters it from CUDA."""

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
    """Return `nbytes` of host memory (uint8), page-locked if there is a GPU.

    torch's own page-locked memory would be rounded up to a power of two.
    """
    # Unreserved, because a rehearsal maps more than its machine has. With a GPU, locking checks that it is there.
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = _PageLocked(-1, max(nbytes, mmap.PAGESIZE), flags=flags)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    if has_gpu:
        memory.lock(flat.data_ptr())
    return flat


@contextlib.contextmanager
def left_out_of_forks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Exclude the memory of host tensors from processes that are forked in this context, which must not access it.

    Only tensors of at least LEAST_BYTES are excluded.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    spans = []
    for address, storage in storages.items():
        if storage.device.type == "cpu" and storage.nbytes() >= LEAST_BYTES:
            # Only whole pages, and not the first: an allocator keeps metadata in front of an allocation.
            first = (address // mmap.PAGESIZE + 2) * mmap.PAGESIZE
            last = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
            spans.append((ctypes.c_void_p(first), ctypes.c_size_t(last - first)))
    try:
        for span in spans:
            libc.madvise(*span, _DONT_FORK)  # only advice: if ignored, the fork is slower but still correct
        yield
    finally:
        for span in spans:
            libc.madvise(*span, _DO_FORK)
