"""Shards <-> HF tensors of a live model: loading cuts, exporting streams, one tensor at a time.

Needs only named parameters and the layout; it neither builds nor trains models.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_rl.parallel import Axis, ParallelGroups
from megatron_rl.weights.architecture import Architecture
from megatron_rl.weights.hf_files import WeightSource
from megatron_rl.weights.mapping import Rule, rule_for

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def rules_of(model: nn.Module, arch: Architecture) -> Iterator[tuple[Tensor, Rule]]:
    """Yield each parameter of a model chunk, and each router's bias, with its rule."""
    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("router.expert_bias"))
    for name, parameter in itertools.chain(model.named_parameters(), biases):
        if match := _LAYER.fullmatch(name):
            layer_number = model.decoder.layers[int(match[1])].layer_number - 1
            yield parameter, rule_for(match[2], layer_number, arch)
        else:
            yield parameter, rule_for(name, None, arch)


def _all_rules(chunks: list[Any], arch: Architecture) -> Iterator[tuple[Tensor, Rule]]:
    return itertools.chain.from_iterable(rules_of(chunk, arch) for chunk in chunks)


@torch.no_grad()
def load_shards(chunks: list[Any], source: WeightSource, arch: Architecture, groups: ParallelGroups) -> None:
    """Copy this rank's slices out of the source into its model chunks. Reads nothing that belongs to other ranks."""
    for parameter, rule in _all_rules(chunks, arch):
        axis = _split_axis(rule, groups)
        names = rule.names(_first_expert(groups.expert.rank, arch, groups))
        shard = rule.layout.load(source, names, tuple(parameter.shape), axis.rank, axis.size, arch)
        if not isinstance(parameter, nn.Parameter):  # a router's bias stays in float32 whatever the model is in
            parameter.data = parameter.float()
        parameter.copy_(shard)


@torch.no_grad()
def stream_hf_tensors(chunks: list[Any], arch: Architecture, groups: ParallelGroups) -> Iterator[tuple[str, Tensor]]:
    """Yield every full HF tensor on global rank 0, in one fixed order; other ranks take part and yield nothing.

    A tensor is joined over the tensor axis (an expert's over the expert-tensor axis, then sent to its stage's head),
    sent from its pipeline stage's head to rank 0 and forgotten again. All ranks must exhaust the iterator; replicas
    beyond the first do nothing.
    """
    for stage in range(groups.pipeline.size):
        if stage == groups.pipeline.rank:
            # Of a tied output layer only the first stage's embedding is sent: they are the same tensor.
            plan = [
                (parameter, rule)
                for parameter, rule in _all_rules(chunks, arch)
                if not (arch.tied and rule.megatron == "output_layer.weight")
            ]
            tensors = _joined(plan, arch, groups)
            if stage == 0:
                yield from tensors
            else:
                _send_to_first_stage(tensors, groups)
        elif groups.is_first_stage and _is_stage_head(groups):
            yield from _receive_from_stage(stage, groups, next(chunks[0].parameters()).device)


def _split_axis(rule: Rule, groups: ParallelGroups) -> Axis:
    """The axis that a parameter is cut along."""
    return groups.tensor if rule.expert is None else groups.expert_tensor


def _first_expert(expert_rank: int, arch: Architecture, groups: ParallelGroups) -> int:
    """The number in the whole model of the first expert that a rank of the expert axis holds."""
    return 0 if arch.mixture is None else expert_rank * (arch.mixture.experts // groups.expert.size)


def _is_stage_head(groups: ParallelGroups) -> bool:
    """True on the first rank of a pipeline stage, which is the first of all its other axes too."""
    return groups.tensor.rank == 0 and groups.data_context.rank == 0


def _joined(
    plan: list[tuple[Tensor, Rule]], arch: Architecture, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Yield the stage's HF tensors on its head; the other ranks of the first replica contribute their shards."""
    for parameter, rule in plan:
        replica = groups.data_context if rule.expert is None else groups.expert_data
        axis = _split_axis(rule, groups)
        if replica.rank != 0:
            continue
        shards = _gather_shards(parameter.detach(), axis)
        if axis.rank != 0:
            continue
        tensors = [t.contiguous() for t in rule.layout.export(shards, arch)]
        if rule.expert is None:
            yield from zip(rule.names(), tensors, strict=True)
        else:
            yield from _experts_of_all_ranks(tensors, rule, arch, groups)


def _gather_shards(shard: Tensor, axis: Axis) -> list[Tensor]:
    if axis.size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(axis.size)] if axis.rank == 0 else None
    dist.gather(shard.contiguous(), shards, group_dst=0, group=axis.group)
    return shards or []


def _experts_of_all_ranks(
    tensors: list[Tensor], rule: Rule, arch: Architecture, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Yield this expert and its counterparts on the other expert ranks, one rank's at a time, on the first of them."""
    axis = groups.expert
    if axis.rank != 0:
        for tensor in tensors:
            dist.send(tensor, group_dst=0, group=axis.group)
        return
    for rank in range(axis.size):
        if rank > 0:
            tensors = [torch.empty_like(tensor) for tensor in tensors]
            for tensor in tensors:
                dist.recv(tensor, group_src=rank, group=axis.group)
        yield from zip(rule.names(_first_expert(rank, arch, groups)), tensors, strict=True)


def _send_to_first_stage(tensors: Iterator[tuple[str, Tensor]], groups: ParallelGroups) -> None:
    """Send a later stage's tensors from its head to global rank 0."""
    for name, tensor in tensors:
        header = [(name, tuple(tensor.shape), tensor.dtype)]
        dist.send_object_list(header, group_dst=0, group=groups.pipeline.group)
        dist.send(tensor, group_dst=0, group=groups.pipeline.group)
    if _is_stage_head(groups):
        dist.send_object_list([None], group_dst=0, group=groups.pipeline.group)


def _receive_from_stage(stage: int, groups: ParallelGroups, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    while True:
        header: list[Any] = [None]
        dist.recv_object_list(header, group_src=stage, group=groups.pipeline.group)
        if header[0] is None:
            return
        name, shape, dtype = header[0]
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, group_src=stage, group=groups.pipeline.group)
        yield name, tensor
