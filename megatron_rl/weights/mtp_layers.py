"""A model's multi-token-prediction (MTP) layer in its HF folder, if it is trained as a draft head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.hf_files import HFFolder, RandomWeights, is_of_mtp_layer
from megatron_rl.weights.mapping import hf_shapes, mtp_names, tensors_without_rule
from megatron_rl.weights.tensor_rules import WeightSource
from megatron_rl.weights.update_group import TensorSpec

Held = TypeVar("Held", Tensor, Tensor | None)


def mtp_source(folder: str | Path, arch: Architecture, *, random_seed: int | None = None) -> WeightSource:
    """Open the MTP layer in a model's folder, or return random weights for it if `random_seed` is given.

    arch: architecture of the model, not of the layer. Raises ValueError if the folder has no MTP layer, has more than
    one, or has it in a dtype that cannot be trained.
    """
    layer = arch.mtp_layer()
    shapes = hf_shapes(layer)
    if random_seed is not None:
        return RandomWeights(shapes, random_seed, norm=1.0 - arch.norm_offset)
    names = mtp_names(layer)
    found = [name for name in tensors_without_rule(folder) if is_of_mtp_layer(name, {"num_hidden_layers": arch.layers})]
    if names.input_proj not in found:
        raise ValueError(
            f"draft.kind = 'mtp': {str(folder)!r} has no multi-token-prediction layer ({names.input_proj} is missing); "
            f"give a folder with it, or set draft.kind=none."
        )
    if further := [name for name in found if name not in shapes and name not in names.copies]:
        raise ValueError(
            f"draft.kind = 'mtp': {further[0]} in {str(folder)!r} is no tensor of the one multi-token-prediction layer "
            f"that is trained; give a folder with one unquantized layer, or set draft.kind=none."
        )
    return HFFolder(folder, shapes)


def copies_in(folder: str | Path, arch: Architecture) -> dict[str, str]:
    """Return {name of copy: name of original} for the copies of the model's tensors in a folder's MTP layer.

    The originals are the model's embedding and output layer.
    """
    found = HFFolder(folder, {}).file_of if Path(folder).is_dir() else {}
    return {name: original for name, original in mtp_names(arch.mtp_layer()).copies.items() if name in found}


def with_layer(
    model: Iterable[tuple[str, Held]], layer: Iterable[tuple[str, Held]], copies: dict[str, str]
) -> Iterator[tuple[str, Held]]:
    """Yield a model's tensors, each followed by its copies, and then the tensors of its MTP layer.

    copies: result of `copies_in`. On ranks that only contribute shards, all tensors are None.
    """
    for name, tensor in model:
        yield name, tensor
        for copy, original in copies.items():
            if original == name:
                yield copy, None if tensor is None else tensor.clone()  # files have no tensors that share memory
    yield from layer


def specs_with_layer(
    model: Iterable[TensorSpec], layer: Iterable[TensorSpec], copies: dict[str, str]
) -> list[TensorSpec]:
    """Return the specs of the tensors that `with_layer` yields, in the same order."""
    found: list[TensorSpec] = []
    for spec in model:
        own = [copy for copy, original in copies.items() if original == spec.name]
        found += [replace(spec, name=name) for name in (spec.name, *own)]
    return [*found, *layer]
