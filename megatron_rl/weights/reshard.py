"""Convert between a live model's Megatron shards and HF tensors: load slices, or export a stream of whole tensors.

Export handles one tensor at a time, in an order that is planned once. This module neither builds nor trains models. It
needs only a model's named parameters and the parallel layout.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_rl.config import LoraConfig
from megatron_rl.parallel import Axis, ParallelGroups
from megatron_rl.weights.adapter_rules import adapter_rule, adapter_shapes, is_adapter, matrix_of
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.mapping import hf_shapes, rule_for
from megatron_rl.weights.tensor_rules import Rule, WeightSource
from megatron_rl.weights.update_group import TensorSpec

EXPERTS_BYTES = 1 << 29
"""Maximum bytes of experts that a rank sends at a time. The receiver needs the same amount of extra memory."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
Entry = tuple[Tensor, Rule]


def rules_of(model: nn.Module, arch: Architecture) -> Iterator[Entry]:
    """Yield (tensor, rule) for each parameter and each router's bias of a model chunk, without adapters' parameters."""
    # A router's bias is updated from token counts, not gradients, so it is a buffer in Megatron. HF files contain it.
    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("router.expert_bias"))
    own = ((name, parameter) for name, parameter in model.named_parameters() if not is_adapter(name))
    for name, parameter in itertools.chain(own, biases):
        yield parameter, rule_for(*place_of(name, model), arch)


def place_of(name: str, model: nn.Module) -> tuple[str, int | None]:
    """Return a parameter's name within its layer and the layer's global number, from 0.

    If the parameter is in no layer, return its name unchanged and None.
    """
    if match := _LAYER.fullmatch(name):
        # The name counts layers within this chunk; `layer_number` counts over the whole model, from 1.
        return match[2], model.decoder.layers[int(match[1])].layer_number - 1
    return name, None


def _all_rules(chunks: list[Any], arch: Architecture, lora: LoraConfig | None) -> Iterator[Entry]:
    """Yield (tensor, rule) for each parameter of all chunks, without those of adapters.

    If `lora` is given, do so for the parameters of adapters only.
    """
    for chunk in chunks:
        if lora is None:
            yield from rules_of(chunk, arch)
            continue
        for name, parameter in chunk.named_parameters():
            if is_adapter(name):
                matrix, part = matrix_of(name)
                yield parameter, adapter_rule(rule_for(*place_of(matrix, chunk), arch), part, lora)


@torch.no_grad()
def load_shards(
    chunks: list[Any], source: WeightSource, arch: Architecture, groups: ParallelGroups, lora: LoraConfig | None = None
) -> None:
    """Load this rank's slices from the source into its model chunks.

    If `lora` is given, only the chunks' adapters are loaded. Collective: every rank calls it. Ranks that hold the same
    shard read different parameters of it in parallel, and broadcast them to each other.
    """

    def order(entry: tuple[Tensor, Rule]) -> tuple[bool, int]:
        return entry[1].expert is not None, -entry[0].numel()  # so that ranks reading in parallel read equally much

    entries = sorted(_all_rules(chunks, arch, lora), key=order)
    for is_expert, kind in itertools.groupby(entries, key=lambda entry: order(entry)[0]):
        replica = groups.expert_data if is_expert else groups.data_context
        while turn := list(itertools.islice(kind, replica.size)):
            for reader, (parameter, rule) in enumerate(turn):
                if not isinstance(parameter, nn.Parameter):  # a router's bias: float32 whatever the model's dtype
                    parameter.data = parameter.float()
                if reader == replica.rank:
                    axis, first_expert = _split_axis(rule, groups), _first_expert(groups.expert.rank, arch, groups)
                    shape = tuple(parameter.shape)
                    parameter.copy_(rule.load(source, shape, axis.rank, axis.size, arch, first_expert))
            for reader, (parameter, _) in enumerate(turn if replica.size > 1 else ()):
                dist.broadcast(parameter.data, group_src=reader, group=replica.group)


class HFExport:
    """Exports a live model's shards as HF tensors on global rank 0.

    Collective: every rank constructs it and exhausts its streams. The constructor fixes which rank sends which tensor,
    and in which order. A stream then transfers only weights.

        export = HFExport(model_chunks, arch, groups)
        publisher.publish(export.specs, export.stream(), version=7)

    chunks: this rank's model chunks; [] on ranks whose pipeline stage has nothing to export.
    lora: if given, the adapters are exported instead of the model.
    shard_of: function from a parameter to the tensor that is sent for it, such as one with the adapter merged.
    whole: function that yields (name, tensor) of further tensors, which every rank has whole. In the stream they follow
    the tensors of the first stage.
    device: device for tensors that arrive from other stages; None for that of the chunks' parameters.
    """

    def __init__(
        self,
        chunks: list[Any],
        arch: Architecture,
        groups: ParallelGroups,
        lora: LoraConfig | None = None,
        *,
        shard_of: Callable[[Tensor], Tensor] = Tensor.detach,
        whole: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
        device: torch.device | None = None,
    ) -> None:
        self.arch, self.groups, self.shard_of, self.whole = arch, groups, shard_of, whole
        self.shapes = hf_shapes(arch) if lora is None else adapter_shapes(arch, replace(lora, targets=[]))
        self.device = device or next(chunks[0].parameters()).device
        # A tied output layer is the same tensor as the first stage's embedding, so only the embedding is sent. Tensors
        # of another dtype (a router's bias) come last, so that the stream changes dtype rarely. Large tensors come
        # first, so that the publisher's buckets hold tensors of similar size.
        plan = [
            (parameter, rule)
            for parameter, rule in _all_rules(chunks, arch, lora)
            if not (arch.tied and rule.megatron == "output_layer.weight")
        ]
        dtype = plan[0][0].dtype if plan else None

        def order(entry: Entry) -> tuple[bool, int, str]:
            parameter, rule = entry
            return parameter.dtype != dtype, -parameter.numel(), next(iter(rule.hf)) if rule.is_stacked else ""

        self._plan = list(_batches(sorted(plan, key=order)))
        stages: list[Any] = [None] * groups.pipeline.size
        dist.all_gather_object(stages, list(self._own_specs()), group=groups.pipeline.group)
        self.stages: list[list[TensorSpec]] = stages
        """For each pipeline stage, the specs of its HF tensors in the order of the stream; the same on all ranks."""
        self.specs = list(itertools.chain.from_iterable(stages))
        """The specs of all HF tensors in the order of the stream; the same on all ranks."""

    def _own_specs(self) -> Iterator[TensorSpec]:
        # Same order as `_joined` and `_experts_of_all_ranks`: a tensor is identified by its place in the stream.
        for batch in self._plan:
            once = batch[0][1].expert is None or batch[0][1].is_stacked
            for rank in range(1 if once else self.groups.expert.size):
                for parameter, rule in batch[:1] if once else batch:
                    for name in rule.names(_first_expert(rank, self.arch, self.groups)):
                        yield TensorSpec(name, parameter.dtype, self.shapes[name])
        for name, tensor in self.whole() if self.groups.is_first_stage else ():
            yield TensorSpec(name, tensor.dtype, tuple(tensor.shape))

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole HF tensor) for all tensors, in the order of `specs`, on global rank 0.

        Other ranks contribute their shards and yield nothing. Each tensor is joined over the tensor axis, sent from its
        pipeline stage's head to rank 0, and released. Experts are first joined over the expert-tensor axis and sent to
        their stage's head.
        """
        return ((name, tensor) for name, tensor in self.stream_in_step() if tensor is not None)

    @torch.no_grad()
    def stream_of_stage(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole HF tensor) for this pipeline stage's tensors, in the order of `stages`, on its head.

        The stage's other ranks take part and yield nothing. No stage waits for another.
        """
        own = self.stages[self.groups.pipeline.rank]
        for spec, tensor in zip(own, self._joined(), strict=True):
            if tensor is not None:
                yield spec.name, tensor

    @torch.no_grad()
    def stream_in_step(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the same as `stream` on rank 0. Other ranks yield (name, None) once they have contributed to a tensor.

        So all ranks are at the same place in the stream and can run other collectives between two tensors.
        """
        pipeline = self.groups.pipeline
        for stage, specs in enumerate(self.stages):
            own = self._joined() if stage == pipeline.rank else itertools.repeat(None)
            for spec, tensor in zip(specs, own, strict=False):
                if pipeline.rank > 0 and tensor is not None:
                    dist.send(tensor, group_dst=0, group=pipeline.group)
                    tensor = None
                elif stage > 0 and pipeline.rank == 0 and _is_stage_head(self.groups):
                    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                    dist.recv(tensor, group_src=stage, group=pipeline.group)
                yield spec.name, tensor

    def _joined(self) -> Iterator[Tensor | None]:
        """Yield each HF tensor of this pipeline stage: the whole tensor on the stage's head, None on its other ranks.

        Ranks of the first replica contribute their shards of a tensor. Ranks of further replicas contribute nothing.
        """
        groups = self.groups
        for batch in self._plan:
            # Experts use separate axes over the same ranks. A rank may be in the first replica for experts but not for
            # dense parameters, or the reverse, so each kind is checked separately.
            parameter, rule = batch[0]
            if rule.expert is not None:
                experts = self._experts_of_all_ranks(batch)
                yield from _stack(experts) if rule.is_stacked else experts
                continue
            tensors: list[Tensor | None] = [None] * len(rule.hf)
            if groups.data_context.rank == 0 and (shards := _gather_shards(self.shard_of(parameter), groups.tensor)):
                tensors = [t.contiguous() for t in rule.layout.export(shards, self.arch)]
            yield from tensors
        for _, tensor in self.whole() if groups.is_first_stage else ():
            yield tensor if _is_stage_head(groups) else None

    def _experts_of_all_ranks(self, batch: list[Entry]) -> Iterator[Tensor | None]:
        """Yield the experts in this batch of every rank of the expert axis, one rank after the other, as HF tensors.

        Only the first expert rank yields tensors; the others yield None in place of each tensor. A rank's batch is sent
        as one message, because a single expert is too small to fill a link.
        """
        groups = self.groups
        axis, is_first_replica = groups.expert, groups.expert_data.rank == 0
        for rank in range(axis.size):
            shards: list[Any] = []  # for each rank of the expert-tensor axis, its shards of the batch's experts
            if is_first_replica and rank == axis.rank:
                own = [self.shard_of(parameter) for parameter, _ in batch]
                stays = rank == 0 and groups.expert_tensor.size == 1
                shards = [own] if stays else _gather_shards(torch.stack(own), groups.expert_tensor)
                for shard in shards if rank > 0 else ():
                    dist.send(shard, group_dst=0, group=axis.group)
            elif is_first_replica and axis.rank == 0 and groups.expert_tensor.rank == 0:
                # Fresh memory: tensors yielded before may still be on the wire to a server.
                like = batch[0][0].new_empty(len(batch), *batch[0][0].shape)
                shards = [like, *(torch.empty_like(like) for _ in range(groups.expert_tensor.size - 1))]
                for shard in shards:
                    dist.recv(shard, group_src=rank, group=axis.group)
            for number, (_, rule) in enumerate(batch):
                if shards and axis.rank == 0:
                    yield from (t.contiguous() for t in rule.layout.export([s[number] for s in shards], self.arch))
                else:
                    yield from itertools.repeat(None, len(rule.hf))


def _split_axis(rule: Rule, groups: ParallelGroups) -> Axis:
    return groups.tensor if rule.expert is None else groups.expert_tensor


def _first_expert(expert_rank: int, arch: Architecture, groups: ParallelGroups) -> int:
    """Return the global number of the first expert that a rank of the expert axis holds."""
    return 0 if arch.mixture is None else expert_rank * (arch.mixture.experts // groups.expert.size)


def _is_stage_head(groups: ParallelGroups) -> bool:
    """Return True if this rank is its pipeline stage's head.

    A rank that is rank 0 of the tensor and the data-context axis is also rank 0 of all other axes in the stage.
    """
    return groups.tensor.rank == 0 and groups.data_context.rank == 0


def _batches(plan: list[Entry]) -> Iterator[list[Entry]]:
    """Divide the plan into batches, each of which is gathered at once.

    A batch has one parameter, or the parameters of one kind of a layer's experts. It has at most EXPERTS_BYTES bytes,
    unless one HF tensor stacks its experts.
    """
    batch: list[Entry] = []
    for parameter, rule in plan:
        is_more = bool(batch) and rule.expert is not None and rule.hf == batch[0][1].hf
        if batch and not (is_more and (rule.is_stacked or parameter.nbytes * (len(batch) + 1) <= EXPERTS_BYTES)):
            yield batch
            batch = []
        batch.append((parameter, rule))
    if batch:
        yield batch


def _stack(experts: Iterator[Tensor | None]) -> Iterator[Tensor | None]:
    found = [expert for expert in experts if expert is not None]
    yield torch.stack(found) if found else None


def _gather_shards(shard: Tensor, axis: Axis) -> list[Tensor]:
    if axis.size == 1:
        return [shard]
    # Not an all-gather: the other ranks need no whole tensor and have no memory for it.
    shards = [torch.empty_like(shard) for _ in range(axis.size)] if axis.rank == 0 else None
    dist.gather(shard.contiguous(), shards, group_dst=0, group=axis.group)
    return shards or []
