"""LoRA adapters on Megatron's linear layers: y = W x + scale lora_B (lora_A x), with W frozen.

Adapters are split over tensor ranks like W: if W is split by columns, so is lora_A; if W is split by rows, so is
lora_B. Ranks exchange only lora_A x, which has `rank` numbers per token and projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_rl.config import LoraConfig
from megatron_rl.parallel import Axis, ParallelGroups
from megatron_rl.weights.adapter_rules import MODULE, adapted, adapter_rule
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.reshard import rules_of
from megatron_rl.weights.tensor_rules import Columns, GateUp, Replicated, Rule


class Adapter(nn.Module):
    """This rank's part of the adapter of one matrix. It maps the matrix's input and output to the adapted output.

    lora_A: `[projections x rank, this rank's columns]`. A fused matrix consists of several projections.
    lora_B: `[this rank's rows, rank]`.
    """

    lent: tuple[Tensor, Tensor, float] | None = None
    """lora_A, lora_B and scale of another model with the same base weights. If set, they are used instead of this
    adapter's own."""

    def __init__(
        self, weight: Tensor, rule: Rule, arch: Architecture, lora: LoraConfig, axis: Axis, *, config: TransformerConfig
    ) -> None:
        super().__init__()
        self.rule, self.axis, self.scale, self.is_on = rule, axis, lora.alpha / lora.rank, True
        self.sequence_parallel = config.sequence_parallel and rule.expert is None
        self.is_cut_by_columns = isinstance(rule.layout, Columns)
        self.is_whole = isinstance(rule.layout, Replicated)
        parts = adapted(rule, lora)
        like: dict[str, Any] = {"dtype": config.params_dtype, "device": weight.device}
        rows, columns = weight.shape
        self.lora_A = nn.Parameter(torch.empty(len(parts) * lora.rank, columns, **like))
        self.lora_B = nn.Parameter(torch.empty(rows, lora.rank, **like))
        # The projection that each row of a fused matrix belongs to, and whose part of lora_A x the row uses.
        chosen: Tensor | None = None
        if len(rule.hf) > 1:
            of_row = rule.layout.load(_Numbered(parts), list(rule.hf), (rows, 1), axis.rank, axis.size, arch)
            chosen = (of_row == torch.arange(len(parts))).to(**like)  # [rows, projections]
        self.register_buffer("chosen", chosen, persistent=False)
        for name, part in self.named_parameters():
            dim = adapter_rule(rule, name, lora).layout.split_dim
            is_expert = rule.expert is not None
            # Megatron's gradient norm counts replicas on tensor rank 0 only, but other ranks have other experts.
            tensor_parallel.set_tensor_model_parallel_attributes(
                part, is_expert or dim is not None, -1 if dim is None else dim, 1
            )
            if is_expert:
                part.allreduce = False  # an expert's replicas are on other ranks than those of the rest of the layer
                part.shared = dim is None and axis.rank > 0  # excluded from the norm, which counts another rank's copy
            elif dim is None and self.sequence_parallel:
                part.sequence_parallel = True  # each rank has the gradient of its rows, which Megatron sums

    def wide_b(self, lora_b: Tensor) -> Tensor:
        """Return lora_B widened to `[rows, projections x rank]`: each row is 0 outside its projection's columns."""
        if self.chosen is None:
            return lora_b
        return (self.chosen[:, :, None] * lora_b[:, None]).flatten(1)

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        if not self.is_on:
            return output
        group, is_shared = self.axis.group, self.axis.size > 1
        lora_a, lora_b, scale = self.lent or (self.lora_A, self.lora_B, self.scale)
        if self.rule.expert is not None:
            # The dispatcher gives each rank all rows, and sums outputs and input gradients over the ranks. The gradient
            # of the replicated matrix must be summed here.
            if is_shared and self.is_cut_by_columns:
                lora_b = tensor_parallel.copy_to_tensor_model_parallel_region(lora_b, group)
            elif is_shared:
                lora_a = tensor_parallel.copy_to_tensor_model_parallel_region(lora_a, group)
            up = lora_b if self.is_cut_by_columns else self.wide_b(lora_b)
            return self._add(F.linear(x, lora_a), up, output, scale)
        inner = F.linear(x, lora_a)
        if is_shared and not self.is_whole:
            if self.is_cut_by_columns and self.sequence_parallel:  # each rank has a partial sum
                inner = tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner, group=group)
            elif self.is_cut_by_columns:
                inner = tensor_parallel.reduce_from_tensor_model_parallel_region(inner, group=group)
            elif self.sequence_parallel:  # each rank has some of the rows
                inner = tensor_parallel.gather_from_sequence_parallel_region(inner, group=group)
            else:  # each rank has all rows, and a partial sum in the backward pass
                inner = tensor_parallel.copy_to_tensor_model_parallel_region(inner, group=group)
        return self._add(inner, self.wide_b(lora_b), output, scale)

    def adapt(self, linear: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        """Return the matrix's output, adapted. This is a forward hook of the matrix."""
        if isinstance(output, Tensor):
            return self(inputs[0], output)
        return self(inputs[0], output[0]), *output[1:]

    def _add(self, inner: Tensor, up: Tensor, output: Tensor, scale: float) -> Tensor:
        """Return `output + scale * inner @ up.T` from one call that forms no separate tensor for the product."""
        rows = output.view(-1, output.shape[-1])
        return torch.addmm(rows, inner.flatten(0, -2), up.t(), alpha=scale).view(output.shape)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's shard of W + scale lora_B lora_A, summed in float32 and rounded once."""
        delta = self.wide_b(self.lora_B).float() @ self.lora_A.float()
        return torch.add(weight.float(), delta, alpha=self.scale).to(weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        own = self.state_dict(keep_vars=True)
        cut = {} if self.is_whole else {"lora_A": 1} if self.is_cut_by_columns else {"lora_B": 0}
        groups = {"tp_group": self.axis.group, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        state = make_sharded_tensors_for_checkpoint(own, prefix, cut, sharded_offsets, **groups)
        if isinstance(self.rule.layout, GateUp):  # gate and up are separate shards
            key = f"{prefix}lora_B"
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        return state


class _Numbered:
    """A weight source that fills each projection's tensor with the index of the projection in `names`, or with -1."""

    def __init__(self, names: list[str]) -> None:
        self.numbers = {name: number for number, name in enumerate(names)}

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return torch.full((stop - start, 1), self.numbers.get(name, -1))


class Adapters:
    """All adapters of this rank. The constructor freezes the model's weights; the adapters' values are loaded later."""

    def __init__(self, chunks: list[Any], arch: Architecture, lora: LoraConfig, groups: ParallelGroups) -> None:
        self._of: dict[Tensor, Adapter] = {}  # maps each adapted matrix to its adapter
        self._in_order: list[Adapter] = []
        self.sum_of_base = 0
        self._base: list[tuple[Tensor, Rule]] = []
        for chunk in chunks:
            self._attach(chunk, arch, lora, groups)
            self._in_order += [module for module in chunk.modules() if isinstance(module, Adapter)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """lora_A and lora_B of each of this rank's adapters, in the order of the model's parameters."""
        return [part for adapter in self._in_order for part in (adapter.lora_A, adapter.lora_B)]

    def set_scale(self, scale: float) -> None:
        for adapter in self._in_order:
            adapter.scale = scale

    def lend(self, parts: Sequence[Tensor], scale: float) -> None:
        """Make the adapters use another model's lora_A and lora_B until `give_back`.

        parts: the other model's parameters, in the order of `parameters`. scale: the other model's scale.
        """
        for number, adapter in enumerate(self._in_order):
            adapter.lent = (parts[2 * number], parts[2 * number + 1], scale)

    def give_back(self) -> None:
        for adapter in self._in_order:
            adapter.lent = None

    def _attach(self, chunk: Any, arch: Architecture, lora: LoraConfig, groups: ParallelGroups) -> None:
        modules = dict(chunk.named_modules())
        names = {parameter: name for name, parameter in chunk.named_parameters()}
        entries = list(rules_of(chunk, arch))
        # A tied output layer is a copy of another stage's embedding.
        is_copy = {weight: arch.tied and rule.megatron == "output_layer.weight" for weight, rule in entries}
        self._base += [entry for entry in entries if isinstance(entry[0], nn.Parameter) and not is_copy[entry[0]]]
        chosen = [(weight, rule) for weight, rule in entries if adapted(rule, lora)]
        chunk.requires_grad_(False)
        for weight, rule in chosen:
            name = names[weight].removesuffix(".weight")
            above, _, own = name.rpartition(".")
            linear = modules[name]
            if rule.expert is None and getattr(linear, "explicit_expert_comm", False):
                raise ValueError(
                    f"megatron.moe_shared_expert_overlap = True: it moves the communication of {name} out of its "
                    f"layer, which lora.rank = {lora.rank} does not support; remove it, or choose other lora.targets."
                )
            axis = groups.tensor if rule.expert is None else groups.expert_tensor
            adapter = Adapter(weight, rule, arch, lora, axis, config=chunk.config)
            modules[above].add_module(own + MODULE, adapter)
            linear.register_forward_hook(adapter.adapt, prepend=True)  # before a norm that follows the matrix
            self._of[weight] = adapter
        if chunk.pre_process:
            # Recomputed layers propagate gradients only if their input requires one. Nothing else here makes it do so.
            chunk.embedding.register_forward_hook(_wanting_gradient)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable all adapters inside this context."""
        for adapter in self._in_order:
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._in_order:
                adapter.is_on = True

    def note_base(self, groups: ParallelGroups) -> None:
        """Set `sum_of_base`, a checksum of all frozen weights that is the same in every layout. Collective."""
        total = torch.zeros((), dtype=torch.int64, device=self._base[0][0].device)
        for weight, rule in self._base:
            is_expert, is_cut = rule.expert is not None, rule.layout.split_dim is not None
            replica, axis = (
                (groups.expert_data, groups.expert_tensor) if is_expert else (groups.data_context, groups.tensor)
            )
            if replica.rank == 0 and (is_cut or axis.rank == 0):
                total += weight.detach().view(torch.int16).sum(dtype=torch.int64)
        dist.all_reduce(total)
        self.sum_of_base = int(total)

    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's shard of the weight with its adapter merged, for servers that cannot apply adapters."""
        adapter = self._of.get(weight)
        return weight.detach() if adapter is None else adapter.merged(weight)


def _wanting_gradient(embedding: nn.Module, inputs: Any, rows: Tensor) -> Tensor:
    return rows.requires_grad_() if torch.is_grad_enabled() else rows
