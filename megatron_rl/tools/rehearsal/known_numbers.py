"""Tracks the values of device tensors that are known because they came from the host.

The values are stored on the host, in the device tensor's attribute `known`. If a tensor is overwritten with unknown
values, the tensor and its views become unknown. To record this, `forget` marks the storage that the `known` tensors of
the tensor and its views share.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MOST_KNOWN = 1 << 23
"""Maximum number of elements of a tensor whose values are tracked."""
MOST_ROWS = 1 << 18
"""Maximum number of elements of a floating-point vector whose values are tracked. No microbatch has so many rows.
Longer vectors are shards of gradients and moments, which would fill the host's memory with zeros."""


MOST_ON_HOST = 1 << 20
"""Copies of floating-point tensors with unknown values to the host get real memory up to this number of elements."""


def on_device(tensor: Any) -> bool:
    """Return True for a tensor on the simulated device. All other FakeTensors belong to an optimizer on the host."""
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
    """Return an operation's arguments with each tensor replaced by its values, which must be known.

    This runs for every operation on known tensors, and is faster than tree_map.
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
