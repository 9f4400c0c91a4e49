"""Tracks known values of tensors on a device without memory: values that came from the host.

They are stored on the host, in the tensor's attribute `known`. A tensor that is overwritten with unknown values becomes
unknown, together with its views: they share a storage, which is marked.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MOST_KNOWN = 1 << 23
"""Elements of the largest tensor whose values are tracked."""
MOST_ROWS = 1 << 18
"""Elements of the largest floating-point vector whose values are tracked. No microbatch has so many rows: longer
vectors are shards of gradients and moments, which would fill the host's memory with zeros."""


MOST_ON_HOST = 1 << 20
"""Elements of the largest floating-point tensor of unknown values that gets host memory when copied to the host."""


def on_device(tensor: Any) -> bool:
    """Return True for a tensor on the device. Other tensors without memory belong to an optimizer on the host."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def known(tensor: Tensor) -> Tensor | None:
    """Return a tensor's values as a host tensor, or None if they are unknown."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    value = getattr(tensor, "known", None)
    return None if value is None or getattr(value.untyped_storage(), "is_forgotten", False) else value


def forget(tensor: Tensor) -> None:
    """Mark a tensor and all its views as unknown."""
    value = getattr(tensor, "known", None)
    if value is not None:
        value.untyped_storage().is_forgotten = True
        tensor.known = None


def values_in(given: Any) -> Any:
    """Return an operation's arguments with each tensor replaced by its known values. All must be known.

    Used instead of tree_map, which is slower, because it runs for every operation on known tensors.
    """
    if isinstance(given, Tensor):
        return known(given)
    if isinstance(given, list | tuple):
        return type(given)([values_in(part) for part in given])
    if isinstance(given, dict):
        return {name: values_in(part) for name, part in given.items()}
    return given


def is_large(tensor: Tensor) -> bool:
    """Return True for a tensor that is too large for its values to be tracked."""
    is_shard = tensor.dim() == 1 and tensor.numel() > MOST_ROWS and tensor.is_floating_point()
    return is_shard or tensor.numel() > MOST_KNOWN
