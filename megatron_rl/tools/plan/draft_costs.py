"""Estimates what a draft head costs its trainer: parameters, memory and FLOPs (engine/draft_head.py, mtp_head.py)."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_rl.config import EngineConfig, ParallelConfig
from megatron_rl.tools.plan.activations import Activations
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.draft_files import shapes_for
from megatron_rl.weights.layout import Shares, parameters_of_mtp_layer

FLOAT32_STATES = 16
"""Bytes of a parameter's float32 weight, gradient and two moments."""
CHUNK_TENSORS, CHUNKS_OF_TERM = 6, 4
"""CHUNK_TENSORS: number of float32 tensors that the soft cross-entropy holds for a chunk of logits. CHUNKS_OF_TERM:
number of chunks of the soft cross-entropy per chunk of the policy's loss. It is copied from ops/head.py, whose import
needs compiled operators."""
PASSES = 3.0
"""Cost of a forward and a backward pass, in forward passes. For the output layer: the logits of both distributions, and
one product with their difference for the gradient."""


def draft_parameters(
    arch: Architecture, engine: EngineConfig, stage: int, parallel: ParallelConfig | None = None
) -> Shares:
    """Return the number of parameters of the draft head on each rank of a pipeline stage.

    parallel: a layout to use instead of the engine's own.
    """
    layout = parallel or engine.parallel
    if engine.draft.kind == "eagle":  # every rank has all of it
        return Shares(dense=sum(math.prod(shape) for shape in shapes_for(arch).values()))
    if engine.draft.kind == "mtp" and stage == layout.pipeline - 1:
        return parameters_of_mtp_layer(arch, layout)
    return Shares()


def draft_state_bytes(arch: Architecture, engine: EngineConfig, stage: int, itemsize: int) -> float:
    """Return the bytes of a draft head's weights, gradients and optimizer on each rank of a pipeline stage."""
    if engine.draft.kind == "none":
        return 0.0
    parallel = engine.parallel
    # A multi-token-prediction layer's modules have its weights in the model's dtype too.
    each = FLOAT32_STATES + (itemsize if engine.draft.kind == "mtp" else 0)
    found = float(each * draft_parameters(arch, engine, stage).total)
    if 0 < stage == parallel.pipeline - 1 and not arch.tied:  # a copy of the first stage's embedding
        found += itemsize * -(-arch.vocab // parallel.tensor) * arch.hidden
    return found


def draft_pass_bytes(
    arch: Architecture, engine: EngineConfig, megatron: dict[str, object], rows: float, chunk: int, itemsize: int
) -> float:
    """Return the temporary bytes of a microbatch's pass through a draft head, on a rank of the last stage.

    rows: number of the microbatch's tokens, where a shared prompt counts once for each of its replies. chunk: number of
    rows whose logits the policy's head holds at the same time.
    """
    parallel = engine.parallel
    own, width = rows / parallel.context, itemsize * arch.hidden
    columns = -(-arch.vocab // parallel.tensor)
    logits = CHUNK_TENSORS * 4 * min(own, chunk / CHUNKS_OF_TERM) * columns
    cast = itemsize * draft_parameters(arch, engine, parallel.pipeline - 1).total  # weights, or their gradients
    layer, config = _layer(arch, engine)
    kept, _ = Activations(layer, config, megatron, uses_kernel=itemsize == 2).of_stage(0, round(own), 1)
    # The states of all rows, twice. At each depth, for the rank's own rows: states, embeddings, layer input, gradients.
    return 2 * rows * width + engine.draft.depths * (6 * own * width + kept) + logits + cast


def draft_flops_of_row(arch: Architecture, engine: EngineConfig, keys: float) -> float:
    """Return the FLOPs of one row in a forward pass through the head's layer, summed over tensor ranks.

    keys: mean number of keys that the row attends to.
    """
    layer, _ = _layer(arch, engine)
    whole, repeats = draft_parameters(arch, engine, 0, ParallelConfig()).total, 1
    if engine.draft.kind == "eagle":  # each tensor rank computes all of it
        repeats = engine.parallel.tensor
    elif (mixture := layer.mixture) is not None:
        whole -= (mixture.experts - mixture.per_token) * 3 * mixture.ffn * layer.hidden
    plain = layer.latent.plain_dim if layer.latent else 0
    value = layer.latent.value_dim if layer.latent else layer.head_dim
    return repeats * (2 * whole + 2 * layer.heads * (layer.head_dim + plain + value) * keys)


def _layer(arch: Architecture, engine: EngineConfig) -> tuple[Architecture, EngineConfig]:
    """Return the head's layer as a model of one layer, and the engine options that apply to it."""
    if engine.draft.kind == "mtp":
        return arch.mtp_layer(), replace(engine, parallel=replace(engine.parallel, pipeline=1, virtual_pipeline=1))
    dense = replace(arch, layers=1, windows=(None,), mixture=None, qk_norm=False, wide_qk_norm=False)
    return dense, replace(engine, parallel=ParallelConfig())
