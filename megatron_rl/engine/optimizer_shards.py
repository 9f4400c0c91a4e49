"""The distributed optimizer's state in a checkpoint: each rank saves its own part of each parameter, without a copy.

A rank owns a range of each flattened parameter. The range is saved as blocks of the unflattened parameter, so any
layout can find its part again. megatron.core's formats either gather all parts on every host (`fully_reshardable`) or
cannot be loaded in another layout (`dp_reshardable`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

NAMES = ("param", "exp_avg", "exp_avg_sq")  # Megatron's names of a main parameter and its moments


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the range from `start` to `stop` of a flattened tensor into blocks of the tensor, whose shape is `shape`.

    Yields the offset and the shape of each block.

        list(blocks((4, 3), 2, 9))  # [((0, 2), (1, 1)), ((1, 0), (2, 3))]
    """
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    while start < stop:
        number, inside = divmod(start, row)
        rows = (stop - start) // row
        if inside == 0 and rows:
            yield (number, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
        else:
            end = min(row, inside + stop - start)
            for offset, size in blocks(shape[1:], inside, end):
                yield (number, *offset), (1, *size)
            start += end - inside


class OptimizerShards:
    """This rank's part of the state of one of Megatron's distributed optimizers.

    models: the model's weights as shards, the result of `model_state`.
    """

    def __init__(self, optimizer: Any, models: dict[str, Any]) -> None:
        self.optimizer = optimizer
        weights = {id(part.data): part for part in nested_values(extract_sharded_tensors_and_factories(models)[0])}
        buckets = [bucket for buffer in optimizer.gbuf_ranges for parts in buffer.values() for bucket in parts]
        self.owned = []
        """The parameters of which this rank owns a range, as (parameter, its shard of the model, range, the range's
        state)."""
        for bucket in buckets:
            for parameter, ranges in bucket["param_map"].items():
                state = optimizer._get_main_param_and_optimizer_states(parameter)
                self.owned.append((parameter, weights[id(parameter)], ranges["param"], state))

    def state(self) -> dict[str, Any]:
        mine = (block for owned in self.owned for block in self._blocks_of(*owned))
        if self.owned:
            common = self.optimizer.state_dict()
        else:  # for example, a stage without experts: Megatron would read the number of updates from a parameter
            common = {"optimizer": {"param_groups": self.optimizer.optimizer.state_dict()["param_groups"]}}
        for group in common["optimizer"]["param_groups"]:
            for name in [name for name, value in group.items() if name == "params" or isinstance(value, type)]:
                del group[name]  # for example, an offloaded Adam's classes: checkpoints hold only data
        return common | {"param_state": dict(enumerate(mine))}

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy the loaded state into the optimizer, which may store it in another form or dtype."""
        for parameter, _, _, tensors in self.owned:
            self.optimizer._set_main_param_and_optimizer_states(parameter, {name: tensors[name] for name in NAMES})
        if isinstance(inner := self.optimizer.optimizer, HybridDeviceOptimizer):
            inner._sync_hdo_state_to_sub_optimizers()
            for group in inner.param_groups:
                group.pop("step", None)  # its parts have their own counts, which this one would overwrite each time

    def _blocks_of(
        self, parameter: Tensor, weight: Any, place: Any, tensors: dict[str, Tensor]
    ) -> Iterator[ShardedTensor]:
        model, parts = torch.empty(parameter.shape, dtype=torch.float32, device="meta"), [weight]
        if not isinstance(weight, ShardedTensor):  # stored in parts in the checkpoint, such as gate and up
            parts = weight.build_fn(weight.key, model, weight.replica_id, None)
        for part in parts:
            first = part.data.storage_offset() if part is not weight else 0
            start, stop = max(place.start - first, 0), min(place.end - first, math.prod(part.local_shape))
            for name in NAMES if start < stop else ():
                flat = tensors[name].detach()[first + start - place.start : first + stop - place.start]
                yield from self._blocks(part, name, flat, start)

    def _blocks(self, part: ShardedTensor, name: str, flat: Tensor, start: int) -> Iterator[ShardedTensor]:
        """Yield a range of a flattened parameter as blocks of the parameter, each a ShardedTensor.

        part: the parameter's shard. flat: the range's values, which begin at index `start` of the flattened shard.
        """
        above = (1,) * part.prepend_axis_num  # axes of layers and experts
        for offset, size in blocks(part.local_shape, start, start + len(flat)):
            data, flat = flat[: math.prod(size)].view(above + size), flat[math.prod(size) :]
            offset = (0,) * len(above) + offset
            yield replace(
                part,
                key=f"optimizer.state.{name}.{part.key}",
                data=data,
                dtype=data.dtype,
                local_shape=above + size,
                global_offset=tuple(a + b for a, b in zip(part.global_offset, offset, strict=True)),
                axis_fragmentations=None,  # blocks may have any size
                prepend_axis_num=0,
                # Only one data-parallel rank owns the block. Replicas on the other axes are those of the weight.
                replica_id=(*part.replica_id[:2], self.optimizer.distributed_optimizer_instance_id),
            )
