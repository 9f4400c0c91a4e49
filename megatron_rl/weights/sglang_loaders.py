"""Functions that a stock SGLang calls in its own processes, to load what it has no way for, and what they are sent.

SGLang's own hooks suffice: a server that is started with `--custom-weight-loader` and a function's name calls it for
`/update_weights_from_tensor` with that name as load_format. `load_changes` takes changes of the weights that are held.
Where a tensor's numbers lie, fused and cut among ranks, is left to the model's own `load_weights`: it is given tensors
that hold changes instead of weights, and whatever it copies is added to the weight there, or put there where it is a
change. `load_round` takes buckets of several senders at the same time, where SGLang itself takes one after the other.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from megatron_rl.weights.delta_code import INTEGERS, Run, decode, unpack
from megatron_rl.weights.update_group import TensorSpec, unpack_bucket

UNCHANGED = -1
"""The bits of a number that does not change, where numbers are put and not added: a NaN that no computation gives."""


def pickled_parts(body: bytes, ranks: int) -> list[str]:
    """Return what each rank of a server is sent of a packed body: an equal part, the rest being its neighbours'."""
    size = -(-len(body) // ranks)
    data = torch.frombuffer(bytearray(body.ljust(size * ranks, b"\0")), dtype=torch.uint8)
    # A clone: a tensor is pickled with the storage that it is a view of.
    return [pickled("changes", part.clone()) for part in data.split(size)]


def pickled(name: str, tensor: Tensor) -> str:
    """Return an entry of `serialized_named_tensors` that holds a tensor's bytes, and no handle of its memory."""
    return base64.b64encode(pickle.dumps([(name, tensor)])).decode()


def pickled_round(buckets: list[dict[str, Any]]) -> str:
    """Return what each rank is told of a round, whose bytes are on their way to it in the senders' groups."""
    return pickled(json.dumps(buckets), torch.empty(0))


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


def load_round(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Receive buckets of several groups at once and load them in turn. SGLang calls it on every rank."""
    ((told, empty),) = named_tensors
    groups = {str(name): group for group, name in c10d._world.pg_names.items()}
    arriving = []
    for bucket in json.loads(told):  # in the order that all ranks of all servers have, so that none waits for another
        dtypes = [getattr(torch, name) for name in bucket["dtypes"]]
        specs = [TensorSpec(*spec) for spec in zip(bucket["names"], dtypes, map(tuple, bucket["shapes"]), strict=True)]
        flat = torch.empty(sum(spec.nbytes for spec in specs), dtype=torch.uint8, device=empty.device)
        tensors = unpack_bucket(flat, specs)
        group, pieces = groups[bucket["group"]], [flat] if bucket["flattened"] else tensors
        broadcasts = [dist.broadcast(piece, group=group, group_src=0, async_op=True) for piece in pieces]
        arriving.append((bucket["names"], tensors, broadcasts))
    try:
        for names, tensors, broadcasts in arriving:
            while broadcasts:
                broadcasts.pop(0).wait()
            model.load_weights(zip(names, tensors, strict=True))
    finally:
        for *_, broadcasts in arriving:
            broadcasts.clear()  # in a traceback they would outlive their group, which gloo does not forgive


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
