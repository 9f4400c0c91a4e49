"""Changes of weights for a stock SGLang: how they are sent, and the loader that SGLang calls with them.

SGLang's own hooks suffice: a server that is started with `--custom-weight-loader` and the name of `load_changes` calls
it for `/update_weights_from_tensor` with that name as load_format. Where a tensor's numbers lie, fused and cut among
ranks, is left to the model's own `load_weights`: it is given tensors that hold changes instead of weights, and whatever
it copies is added to the weight there, or put there where it is a change.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_rl.weights.delta_code import INTEGERS, Run, decode, unpack

UNCHANGED = -1
"""The bits of a number that does not change, where numbers are put and not added: a NaN that no computation gives."""


def pickled_parts(body: bytes, ranks: int) -> list[str]:
    """Return what each rank of a server is sent of a packed body: an equal part, the rest being its neighbours'."""
    size = -(-len(body) // ranks)
    data = torch.frombuffer(bytearray(body.ljust(size * ranks, b"\0")), dtype=torch.uint8)
    # A clone: a tensor is pickled with the storage that it is a view of.
    return [base64.b64encode(pickle.dumps([("changes", part.clone())])).decode() for part in data.split(size)]


def load_changes(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Change a model's weights by a packed body, of which this rank has a part. SGLang calls it on every rank."""
    ((_, part),) = named_tensors
    parts = [part]
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
    runs, _ = unpack(torch.cat(parts).cpu().numpy().tobytes())
    for is_added in (False, True):
        with _Merging(is_added):
            model.load_weights(_tensors_of_changes(runs, is_added, part.device))


def _tensors_of_changes(runs: list[Run], is_added: bool, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield a whole tensor for each that has runs of this kind, with the bits of its changes."""
    chosen = [run for run in runs if (run.change.values == "added") == is_added]
    for name in dict.fromkeys(run.name for run in chosen):
        own = [run for run in chosen if run.name == name]
        dtype = getattr(torch, own[0].dtype)
        bits = torch.full((own[0].shape.numel(),), 0 if is_added else UNCHANGED, dtype=INTEGERS[dtype.itemsize])
        for run in own:
            places, values = decode(run.change, bits.dtype)
            bits[run.start : run.start + run.change.count][places] = values
        yield name, bits.view(dtype).view(own[0].shape).to(device)


class _Merging(TorchFunctionMode):
    """Has copies into tensors change them, by the bits of what is copied."""

    def __init__(self, is_added: bool) -> None:
        super().__init__()
        self.is_added = is_added

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        if target.device != source.device:
            return func(*args, **(kwargs or {}))  # a change on its way to a device
        bits = source.contiguous().view(INTEGERS[source.itemsize])
        if self.is_added:
            return target.view(bits.dtype).add_(bits)  # wraps around, as in `put`
        return target.copy_(torch.where(bits == UNCHANGED, target, source.to(target.dtype)))
