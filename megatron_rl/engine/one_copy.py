"""Brings what a device reads of a microbatch to it in one copy that nobody waits for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

ALIGNMENT = 16
"""Bytes: a tensor of any dtype may begin there, and a kernel may read several entries at a time."""


def one_copy(tree: Any, device: torch.device) -> Any:
    """Return dicts, lists and named tuples like the host's, with their tensors on the device.

    All travel in one buffer of pinned memory, of which they are views there: a copy of its own, from pageable memory,
    would let the host wait for all that the device has yet to do. On the CPU they are the same tensors.
    """
    leaves, structure = tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if device.type == "cpu" or not tensors:
        return tree
    there = iter(cut(pack(tensors, pinned=device.type == "cuda").to(device, non_blocking=True), tensors))
    return tree_unflatten([next(there) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def pack(tensors: list[Tensor], *, pinned: bool = False) -> Tensor:
    """Return the bytes of all tensors, each at a multiple of ALIGNMENT, as uint8."""
    # torch keeps pinned memory from being used again until the copies from it are done.
    buffer = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pinned)
    for place, tensor in zip(cut(buffer, tensors), tensors, strict=True):
        place.copy_(tensor)
    return buffer


def cut(buffer: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return the views of `pack`'s buffer, wherever it is by now, that have the tensors' dtypes and shapes."""
    views, start = [], 0
    for tensor in tensors:
        views.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _room(tensor)
    return views


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
