"""Weight updates that need no process group: buckets in shared memory, and deltas to the current weights.

Each function validates a whole update and returns a function that writes it. Call the returned function only while
nothing else uses the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.tools.embedded_server.fields import field
from megatron_rl.tools.embedded_server.transformer import Decoder
from megatron_rl.weights.delta_code import INTEGERS, Run, bits_of, decode, put, unpack
from megatron_rl.weights.shared_bucket import open_bucket
from megatron_rl.weights.update_group import TensorSpec, unpack_bucket

SENT = (torch.float32, torch.bfloat16, torch.float16)


def shared_tensors(body: dict[str, Any], specs: list[TensorSpec], model: Decoder) -> Callable[[], None]:
    """Map a request's shared-memory bucket. Return the function that writes it to the weights and then unmaps it."""
    for spec in specs:
        model.check_tensor(spec.name, spec.shape)
    flat = [open_bucket(field(body, "shared_memory", dict), sum(spec.nbytes for spec in specs))]

    def write() -> None:
        # Pop the bucket, or a reference to this function would keep the memory mapped.
        for spec, tensor in zip(specs, unpack_bucket(flat.pop(), specs), strict=True):
            model.write(spec.name, tensor)

    return write


def changes(body: bytes, model: Decoder) -> tuple[Callable[[], None], str]:
    """Decode a packed delta. Return the function that applies it, and the resulting weight version."""
    runs, version = unpack(body)
    decoded = [(run, *_decoded(run, model)) for run in runs]

    def write() -> None:
        for run, places, values in decoded:
            if run.name in model.parameters:  # a tied head has no parameter of its own
                model.mark_changed(run.name)
                part = model.part(run.name, run.start, run.change.count)
                put(part, places.to(model.device), values.to(model.device), is_added=run.change.values == "added")

    return write, version


def _decoded(run: Run, model: Decoder) -> tuple[Tensor, Tensor]:
    """Decode one run of a delta. Return the indices of the changed elements, and their new values.

    A run is a range of elements of one weight. The values are integers with the bits of the weight's dtype.

    ValueError for an unknown dtype. A dtype other than the weight's is allowed only if the run sends all its elements.
    """
    own = model.part(run.name, run.start, run.change.count).dtype
    sent = next((dtype for dtype in SENT if str(dtype) == f"torch.{run.dtype}"), None)
    if sent is None or (sent != own and (run.change.places, run.change.values) != ("all", "whole")):
        raise ValueError(f"{run.name}: a change of {run.dtype} cannot be applied to {own}; send the whole tensor")
    places, values = decode(run.change, INTEGERS[sent.itemsize])
    return places, values if sent == own else bits_of(values.view(sent).to(own))
