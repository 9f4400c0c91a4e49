"""Copies all of a microbatch's tensors to the device in one transfer, without blocking the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

ALIGNMENT = 16  # alignment in bytes, sufficient for any dtype and for kernels that load several entries at once


def one_copy(tree: Any, device: torch.device) -> Any:
    """Copy the tensors in nested dicts, lists and named tuples to the device. Returns the same structure.

    If the device is the CPU, the tensors are returned as they are. Otherwise all tensors travel in one pinned buffer,
    and the results are views of its copy. Separate copies from pageable memory would make the host wait for all pending
    device work.
    """
    leaves, structure = tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if device.type == "cpu" or not tensors:
        return tree
    there = iter(cut(pack(tensors, pinned=device.type == "cuda").to(device, non_blocking=True), tensors))
    return tree_unflatten([next(there) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def pack(tensors: list[Tensor], *, pinned: bool = False) -> Tensor:
    """Copy the bytes of all tensors into one uint8 buffer. Each tensor begins at a multiple of ALIGNMENT."""
    # torch does not reuse pinned memory until copies from it are done.
    buffer = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pinned)
    for place, tensor in zip(cut(buffer, tensors), tensors, strict=True):
        place.copy_(tensor)
    return buffer


def cut(buffer: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return views of the buffer that `pack` builds, with the dtypes and shapes of `tensors`.

    The buffer may be on any device.
    """
    views, start = [], 0
    for tensor in tensors:
        views.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _room(tensor)
    return views


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
