"""The numbers of tensors on a device without memory that are known all the same, because the host gave them.

They are an attribute of the tensor, with the values on the host. What is written over by something unknown is known no
more, and neither are its views: they share a storage, which is marked.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MOST_KNOWN = 1 << 23
"""Elements of the largest tensor that is known."""
MOST_ROWS = 1 << 18
"""Elements of the largest vector of fractions that is known. No microbatch has as many rows: longer ones are shards of
gradients and moments, which would fill the host's memory with zeros."""


MOST_ON_HOST = 1 << 20
"""Elements of the largest fractions that the host has memory for, where the device gives them and they are unknown."""


def on_device(tensor: Any) -> bool:
    """Return True for a tensor on the device; others without memory are parts of an optimizer on the host."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def known(tensor: Tensor) -> Tensor | None:
    """Return a tensor's values, on the host, or None where they are unknown."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    value = getattr(tensor, "known", None)
    return None if value is None or getattr(value.untyped_storage(), "is_forgotten", False) else value


def forget(tensor: Tensor) -> None:
    """Note that a tensor was overwritten by what is unknown, and so were all views of it."""
    value = getattr(tensor, "known", None)
    if value is not None:
        value.untyped_storage().is_forgotten = True
        tensor.known = None


def values_in(given: Any) -> Any:
    """Return an operation's arguments with the values of their tensors, all of which are known.

    Faster than tree_map, and asked with every operation on what is known.
    """
    if isinstance(given, Tensor):
        return known(given)
    if isinstance(given, list | tuple):
        return type(given)([values_in(part) for part in given])
    if isinstance(given, dict):
        return {name: values_in(part) for name, part in given.items()}
    return given


def is_large(tensor: Tensor) -> bool:
    """Return True for a tensor that is not worth to be known."""
    is_shard = tensor.dim() == 1 and tensor.numel() > MOST_ROWS and tensor.is_floating_point()
    return is_shard or tensor.numel() > MOST_KNOWN
