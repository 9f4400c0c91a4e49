"""The gradients of an engine in any layout, as whole HF tensors: what the layout theorems compare."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.engine.fsdp_engine import FSDPEngine
from megatron_rl.engine.megatron_engine import MegatronEngine

Values = dict[torch.nn.Parameter, Tensor]


def record_gradients(engine: MegatronEngine | FSDPEngine) -> list[Values]:
    """Return a list that every later update of the engine adds its gradients to; `as_hf_tensors` makes them whole.

    They are summed over microbatches and ranks, divided once, unclipped: as Megatron's `finalize_model_grads` leaves
    them, and as FSDPEngine gives them to `clip_grad_norm_`.
    """
    if isinstance(engine, FSDPEngine):
        return _record_before_clipping(engine)
    finalize, recorded = engine.tf_config.finalize_model_grads_func, []

    def finalize_and_record(*args, **kwargs) -> None:
        finalize(*args, **kwargs)
        if engine.config.optimizer.distributed:
            for chunk in engine.wrapped:
                _undo_reduce_scatter(chunk)
        recorded.append({parameter: parameter.main_grad.clone() for parameter in engine.parameters()})

    engine.tf_config.finalize_model_grads_func = finalize_and_record
    return recorded


def _record_before_clipping(engine: FSDPEngine) -> list[Values]:
    clip, recorded = torch.nn.utils.clip_grad_norm_, []

    def record_and_clip(parameters, *args) -> Tensor:
        parameters = list(parameters)
        if parameters[0] is next(engine.model.parameters()):
            recorded.append({parameter: parameter.grad.full_tensor().clone() for parameter in parameters})
        return clip(parameters, *args)

    torch.nn.utils.clip_grad_norm_ = record_and_clip
    return recorded


def _undo_reduce_scatter(chunk) -> None:
    """Fetch the other ranks' parts of each bucket, where this rank holds its own unreduced sums. Adam reads none."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def as_hf_tensors(engine: MegatronEngine | FSDPEngine, values: Values) -> dict[str, Tensor]:
    """Join one tensor per parameter (of its shape) into `{HF name: tensor}` on rank 0, the way weights are exported.

    Those of FSDPEngine are whole already.
    """
    if isinstance(engine, FSDPEngine):
        return {name: values[parameter] for name, parameter in engine.model.named_parameters()}
    kept = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        return {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    finally:
        for parameter, data in kept.items():
            parameter.data = data


def relative_error(ours: Tensor, expected: Tensor) -> float:
    """The norm of the difference, as a part of the expected tensor's norm where that is not 0 (an idle expert's)."""
    norm = expected.double().norm()
    return float((ours.double() - expected.double()).norm() / (norm if norm > 0 else 1.0))
