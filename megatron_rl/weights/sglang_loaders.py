"""Weight loaders that an unmodified SGLang server calls in its own processes, and the messages sent to them.

The loaders use a hook of SGLang. A server started with `--custom-weight-loader FUNCTION` calls that function for
`/update_weights_from_tensor` requests whose load_format is the function's name. It calls it on each of its ranks.

`load_changes` applies changes to the weights that the server holds. SGLang fuses tensors and shards them over ranks, so
the model's own method `load_weights` must decide where numbers go. `load_changes` calls that method with tensors of
changes instead of weights, and intercepts each copy into a weight: differences are added, and new values are written
only where a number changed.

`load_round` receives buckets from several senders at the same time; SGLang's own loader takes one after the other.

`load_folder` loads the tensors of a folder into a draft head alone. SGLang's own loader reads a folder into the policy
and into the head.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from megatron_rl.weights.delta_code import INTEGERS, Run, decode, unpack
from megatron_rl.weights.draft_files import PREFIX, SGLANG_CLASS
from megatron_rl.weights.update_group import TensorSpec, unpack_bucket

UNCHANGED = -1
"""Integer whose bits mark an unchanged number in a tensor of new values. As a float it is a NaN that no computation
produces."""


def pickled_parts(body: bytes, ranks: int) -> list[str]:
    """Split a body made by `pack` into parts of equal size, one per rank of a server, and return each part pickled.

    `load_changes` joins them again.
    """
    size = -(-len(body) // ranks)
    data = torch.frombuffer(bytearray(body.ljust(size * ranks, b"\0")), dtype=torch.uint8)
    # Cloned, because pickling a view pickles its whole storage.
    return [pickled("changes", part.clone()) for part in data.split(size)]


def pickled(name: str, tensor: Tensor) -> str:
    """Return an entry for the field `serialized_named_tensors` of an SGLang request.

    The entry contains the tensor's bytes, not a handle to its memory.
    """
    return base64.b64encode(pickle.dumps([(name, tensor)])).decode()


def pickled_round(buckets: list[dict[str, Any]]) -> str:
    """Return the message that describes a round of buckets to each rank of a server. `load_round` reads it.

    The buckets' bytes are not in the message; they are broadcast in the senders' groups.
    """
    return pickled(json.dumps(buckets), torch.empty(0))


def load_changes(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Apply a body of changes to a model's weights. named_tensors: this rank's part of the body (`pickled_parts`)."""
    ((_, part),) = named_tensors
    parts = [part]
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
    runs, _ = unpack(torch.cat(parts).cpu().numpy().tobytes())
    # SGLang calls this function for the policy and then for the draft head, if it has one.
    is_draft = type(model).__name__ == SGLANG_CLASS
    runs = [replace(run, name=run.name.removeprefix(PREFIX)) for run in runs if run.name.startswith(PREFIX) == is_draft]
    for is_added in (False, True):
        with _Merging(is_added):
            model.load_weights(_tensors_of_changes(runs, is_added, part.device))


def _tensors_of_changes(runs: list[Run], is_added: bool, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor of changes) for each tensor with runs of one kind: differences if `is_added`, or new values.

    The tensor of changes is as large as the tensor itself. Unchanged numbers are 0 or UNCHANGED in it.
    """
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
    """Receive the buckets of a round from several groups at the same time, and load one after the other.

    named_tensors: one pair, whose name is the message that describes the round (`pickled_round`).
    """
    ((told, empty),) = named_tensors
    groups = {str(name): group for group, name in c10d._world.pg_names.items()}
    arriving = []
    for bucket in json.loads(told):  # same order on all ranks of all servers, to avoid deadlock
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
            broadcasts.clear()  # a traceback would keep them beyond their group, where gloo aborts or hangs


def load_folder(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load all tensors of a folder. named_tensors: one pair, whose name is the folder's path. Its tensor is not used.

    Raises FileNotFoundError if the folder has no tensors.
    """
    ((folder, _),) = named_tensors
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: has no *.safetensors")
    for file in files:
        model.load_weights(iter(load_file(file).items()))


class _Merging(TorchFunctionMode):
    """Context in which `Tensor.copy_` takes its source for changes and applies them to the target."""

    def __init__(self, is_added: bool) -> None:
        super().__init__()
        self.is_added = is_added

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        if target.device != source.device:
            return func(*args, **(kwargs or {}))  # only moves changes to the device
        bits = source.contiguous().view(INTEGERS[source.itemsize])
        if self.is_added:
            return target.view(bits.dtype).add_(bits)  # wraps around, as in `put`
        return target.copy_(torch.where(bits == UNCHANGED, target, source.to(target.dtype)))
