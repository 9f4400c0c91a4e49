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

from megatron_rl.parallel import ParallelGroups
from megatron_rl.weights.architecture import Architecture
from megatron_rl.weights.hf_files import WeightSource
from megatron_rl.weights.mapping import Rule, rule_for

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def rules_of(model: nn.Module, arch: Architecture) -> Iterator[tuple[Tensor, Rule]]:
    """Yield each parameter of a model chunk with its rule."""
    for name, parameter in model.named_parameters():
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
        shard = rule.layout.load(
            source, list(rule.hf), tuple(parameter.shape), groups.tensor.rank, groups.tensor.size, arch
        )
        parameter.copy_(shard)


@torch.no_grad()
def stream_hf_tensors(chunks: list[Any], arch: Architecture, groups: ParallelGroups) -> Iterator[tuple[str, Tensor]]:
    """Yield every full HF tensor on global rank 0, in one fixed order; other ranks take part and yield nothing.

    A tensor is joined over the tensor axis, sent from its pipeline stage's head to rank 0 and forgotten again. All
    ranks must exhaust the iterator; replicas beyond the first do nothing.
    """
    if groups.data_context.rank != 0:
        return
    for stage in range(groups.pipeline.size):
        if stage == groups.pipeline.rank:
            # Of a tied output layer only the first stage's embedding is sent: they are the same tensor.
            plan = [
                (parameter, rule)
                for parameter, rule in _all_rules(chunks, arch)
                if not (arch.tied and rule.megatron == "output_layer.weight")
            ]
        else:
            plan = []
        if stage == 0:
            yield from _joined(plan, arch, groups)
        elif groups.pipeline.rank in (0, stage):
            yield from _relay(plan, stage, arch, groups, next(chunks[0].parameters()).device)


def _joined(
    plan: list[tuple[Tensor, Rule]], arch: Architecture, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Yield the stage's HF tensors on its head; the other tensor ranks contribute their shards."""
    for parameter, rule in plan:
        shards = _gather_shards(parameter.detach(), groups)
        if groups.tensor.rank == 0:
            yield from zip(rule.hf, (t.contiguous() for t in rule.layout.export(shards, arch)), strict=True)


def _gather_shards(shard: Tensor, groups: ParallelGroups) -> list[Tensor]:
    if groups.tensor.size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(groups.tensor.size)] if groups.tensor.rank == 0 else None
    dist.gather(shard.contiguous(), shards, group_dst=0, group=groups.tensor.group)
    return shards or []


def _relay(
    plan: list[tuple[Tensor, Rule]], stage: int, arch: Architecture, groups: ParallelGroups, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Bring a later stage's tensors from its head to global rank 0."""
    if groups.pipeline.rank == stage:
        for name, tensor in _joined(plan, arch, groups):
            header = [(name, tuple(tensor.shape), tensor.dtype)]
            dist.send_object_list(header, group_dst=0, group=groups.pipeline.group)
            dist.send(tensor, group_dst=0, group=groups.pipeline.group)
        if groups.tensor.rank == 0:
            dist.send_object_list([None], group_dst=0, group=groups.pipeline.group)
    elif groups.tensor.rank == 0:
        while True:
            header = [None]
            dist.recv_object_list(header, group_src=stage, group=groups.pipeline.group)
            if header[0] is None:
                return
            name, shape, dtype = header[0]
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, group_src=stage, group=groups.pipeline.group)
            yield name, tensor
