"""A model's own multi-token-prediction layer as draft head, built from megatron.core's layers.

It learns as the head in draft_head.py does. The next token's embedding and the policy's last hidden state, each after a
norm, are projected to the input of one layer of the model's kind. The layer's output passes a norm and then the
policy's output layer (DeepSeek-V3, arXiv 2412.19437, section 2.2). The layer is on the last pipeline stage. It is
divided over tensor, expert and expert-tensor ranks like the model's layers. A context rank computes whole sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from tensordict import TensorDict
from torch import Tensor, nn

from megatron_rl.config import DraftConfig, EngineConfig, LoraConfig
from megatron_rl.engine.draft_head import DraftHead, gradient_of
from megatron_rl.engine.layers import WholeLinear, block_spec, norm_class, place_attention
from megatron_rl.engine.model import DTYPES, transformer_config
from megatron_rl.engine.packed_rows import PackedRows, own_rows
from megatron_rl.engine.sharded_module import ShardedModule
from megatron_rl.parallel import Axis, ParallelGroups
from megatron_rl.types import MicroBatch, prefix_sums
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.mtp_layers import mtp_source
from megatron_rl.weights.reshard import HFExport, load_shards, rules_of
from megatron_rl.weights.tensor_rules import Rule, WeightSource

STATE, MOMENTS = "draft", ("exp_avg", "exp_avg_sq")
"""The prefix of the layer's names in a checkpoint, and the names of the two tensors that Adam keeps for each weight."""


class MTPLayer(ShardedModule):
    """The modules of the layer. They map states and embeddings, `[R, H]` each, to new states `[R, H]`.

    All three have this tensor rank's rows.
    """

    def __init__(self, arch: Architecture, config: TransformerConfig) -> None:
        super().__init__()
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = pg_collection.tp
        spec, norm = block_spec(arch, config), norm_class(arch)
        self.input_proj = WholeLinear(config, 2 * arch.hidden, arch.hidden)
        self.token_norm = norm(config, arch.hidden, eps=arch.norm_eps)
        self.hidden_norm = norm(config, arch.hidden, eps=arch.norm_eps)
        self.decoder = TransformerBlock(config, spec, post_layer_norm=True, pg_collection=pg_collection)
        place_attention(self.decoder, arch)

    def forward(self, hidden: Tensor, embedded: Tensor, packed: PackedRows) -> Tensor:
        x = self.input_proj(torch.cat([self.token_norm(embedded), self.hidden_norm(hidden)], -1))
        rows: Tensor = self.decoder(hidden_states=x[:, None], attention_mask=None, packed_seq_params=packed)
        return rows[:, 0]


def layer_config(arch: Architecture, config: EngineConfig, passed_through: dict[str, Any]) -> TransformerConfig:
    """Return Megatron's config of the layer.

    arch: the architecture of the whole model. passed_through: the `megatron:` section.
    """
    parallel = replace(config.parallel, pipeline=1, virtual_pipeline=1)
    own = replace(config, parallel=parallel, lora=LoraConfig(), draft=DraftConfig(), exact=False, routing_replay="off")
    if not arch.fits_transformer_engine:  # nor does the layer, whose norms and attention are the model's
        own = replace(own, model=replace(own.model, transformer_impl="local"))
    found = transformer_config(arch.mtp_layer(), own, passed_through)
    found.gradient_accumulation_fusion = False  # its gradients are not in Megatron's buffers
    return found


class MTPHead(DraftHead):
    """The layer with its optimizer.

    `weights` are float32 copies of this rank's parameters. On pipeline stages other than the last, it is {}.
    """

    def __init__(
        self,
        arch: Architecture,
        config: EngineConfig,
        groups: ParallelGroups,
        source: WeightSource,
        tf_config: TransformerConfig,
        *,
        device: torch.device,
    ) -> None:
        layer, self.layer = arch.mtp_layer(), None
        self.tf_config, self.rules = tf_config, {}
        weights: dict[str, Tensor] = {}
        if groups.is_last_stage:
            with device:
                self.layer = MTPLayer(layer, tf_config)
            load_shards([self.layer], source, layer, groups)
            rules = {id(parameter): rule for parameter, rule in rules_of(self.layer, layer)}
            self.rules = {name: rules[id(parameter)] for name, parameter in self.layer.named_parameters()}
            weights = {name: parameter.detach() for name, parameter in self.layer.named_parameters()}
        super().__init__(layer, config.draft, groups, weights, device=device, dtype=DTYPES[config.model.dtype])
        self.updates = 0

    @property
    def splits_rows(self) -> bool:  # type: ignore[override]
        return self.arch.mixture is not None and self.groups.expert.size * self.groups.expert_tensor.size > 1

    def states(self, hidden: Tensor, embedded: Tensor, positions: Tensor, lengths: list[int]) -> Tensor:
        assert self.layer is not None
        tensor, count = self.groups.tensor, len(hidden)
        split = tensor.size if self.tf_config.sequence_parallel else 1
        packed = self._packed(positions, lengths, split)
        total = len(packed.positions)
        hidden, embedded = (F.pad(rows, (0, 0, 0, total - count)) for rows in (hidden, embedded))
        if split == 1:
            return self.layer(hidden, embedded, packed)[:count]
        # Each tensor rank has the gradient of the rows that it reads, and another rank may have computed these.
        hidden = copy_to_tensor_model_parallel_region(hidden, group=tensor.group)
        own = slice(tensor.rank * total // split, (tensor.rank + 1) * total // split)
        states = self.layer(hidden[own], embedded[own], packed)
        # Every tensor rank computes the same loss of all rows.
        states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False, group=tensor.group)
        return states[:count]

    def _packed(self, positions: Tensor, lengths: list[int], split: int) -> PackedRows:
        """Return the plan of sequences that share nothing, one after the other, padded to a multiple of `split` rows.

        positions: the position of each row in its sequence. lengths: the number of rows of each sequence.
        """
        if not lengths:  # a row without a meaning: layers need one
            positions, lengths = torch.zeros(1, dtype=torch.int64), [1]
        rows, sizes = torch.arange(len(positions)), torch.tensor(lengths)
        columns = torch.stack([prefix_sums(sizes)[:-1], sizes, torch.full_like(sizes, -1), torch.zeros_like(sizes)], 1)
        none = torch.zeros_like(rows)
        labels = TensorDict({"input_ids": none, "labels": none - 1})
        plain = {"source": rows, "computed": rows, "read": rows}
        microbatch = MicroBatch(rows=labels, positions=positions, segments=columns, **plain)
        alone = Axis(self.groups.context.group, 1, 0)
        return own_rows(microbatch, alone, multiple_of=split, device=self.device, dtype=self.dtype)[1]

    def learn(self, *args: Any, **kwargs: Any) -> None:
        super().learn(*args, **kwargs)
        # The sum over microbatches needs float32, whatever the dtype of the computation.
        for weight, parameter in zip(self.weights.values(), self._parameters(), strict=True):
            if parameter.grad is not None:
                weight.grad = gradient_of(weight) + parameter.grad.to(weight.dtype)
                parameter.grad = None

    def _summed_gradients(self) -> tuple[list[Tensor], float]:
        gradients = {name: gradient_of(weight) for name, weight in self.weights.items()}
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        groups = self.groups
        experts = {name for name, rule in self.rules.items() if rule.expert is not None}
        parts = {name for name, rule in self.rules.items() if self._has_part(name, rule)}
        others = gradients.keys() - experts
        for axis, names in ((groups.data_context, others), (groups.expert_data, experts), (groups.tensor, parts)):
            _sum_over(axis, [gradient for name, gradient in gradients.items() if name in names])
        for name, gradient in gradients.items():
            copies = groups.expert_data.size if name in experts else groups.data_context.size
            if name not in experts and self.rules[name].layout.split_dim is None:
                copies *= groups.tensor.size
            squares += gradient.double().square().sum() / copies
        if groups.world_size > 1:
            dist.all_reduce(squares)
        return list(gradients.values()), float(squares)

    def _has_part(self, name: str, rule: Rule) -> bool:
        """Return True if each tensor rank has this whole weight, but only a part of its gradient.

        The part is that of the rank's own rows or heads.
        """
        if rule.expert is not None or rule.layout.split_dim is not None:
            return False
        of_heads = self.arch.qk_norm and name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        return self.tf_config.sequence_parallel or of_heads

    def step(self) -> bool:
        is_applied = super().step()
        self.updates += is_applied
        self._write_back()
        return is_applied

    @torch.no_grad()
    def _write_back(self) -> None:
        for weight, parameter in zip(self.weights.values(), self._parameters(), strict=True):
            parameter.copy_(weight)

    def _parameters(self) -> list[nn.Parameter]:
        return [] if self.layer is None else list(self.layer.parameters())

    def movable(self) -> tuple[list[Tensor], list[Tensor]]:
        weights, moments = super().movable()
        return [parameter.data for parameter in self._parameters()], weights + moments

    @functools.cached_property
    def export(self) -> HFExport:
        """The export plan from which `hf_tensors` streams. The first access is collective."""
        chunks = [] if self.layer is None else [self.layer]
        return HFExport(chunks, self.arch, self.groups, device=self.device)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the layer's tensors in the policy's dtype, on the main rank. Collective: every rank exhausts it."""
        return self.export.stream()

    @torch.no_grad()
    def load_folder(self, path: str | Path, policy: Architecture) -> None:
        source = mtp_source(path, policy)
        if self.layer is not None:
            load_shards([self.layer], source, self.arch, self.groups)
            for weight, parameter in zip(self.weights.values(), self._parameters(), strict=True):
                weight.copy_(parameter)

    def is_in(self, common: dict[str, Any]) -> bool:
        return "mtp_updates" in common

    def checkpoint_state(self, metadata: dict[str, Any], *, with_moments: bool = True) -> dict[str, Any]:
        """Return the weights and Adam's moments as shards, which any layout can load. The arguments are DraftHead's."""
        state: dict[str, Any] = {}
        if self.layer is not None:
            whole = self.layer.sharded_state_dict(metadata=metadata)
            shards = get_param_id_to_sharded_param_map(whole, self._parameters())
            state = {kind: {} for kind in ("weight", *(MOMENTS if with_moments else ()))}
            for number, (name, weight) in enumerate(self.weights.items()):
                tensors = {"weight": weight.detach()} | (self._moments_of(weight) if with_moments else {})
                for kind in state:
                    state[kind][name] = make_sharded_optimizer_tensor(shards[number], tensors[kind], f"{STATE}.{kind}")
        return {"mtp_updates": self.updates, "draft": state}

    @torch.no_grad()
    def load_checkpoint(self, state: dict[str, Any], *, with_moments: bool = True) -> None:
        if not with_moments:
            self.optimizer.state.clear()
        self.updates = state["mtp_updates"] if with_moments else 0
        for name, weight in self.weights.items():
            weight.copy_(state["draft"]["weight"][name])
            if with_moments:
                moments = self._moments_of(weight)
                moments["step"].fill_(self.updates)
                for kind in MOMENTS:
                    moments[kind].copy_(state["draft"][kind][name])
        self._write_back()

    def _moments_of(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """Return Adam's state of a weight. If there is none yet, it is created as Adam's first step would create it."""
        state: dict[str, Tensor] = self.optimizer.state[weight]
        if not state:
            state |= {"step": torch.zeros(()), **{kind: torch.zeros_like(weight) for kind in MOMENTS}}
        return state


def _sum_over(axis: Axis, gradients: list[Tensor]) -> None:
    """Sum the gradients over the ranks of an axis, in place and in one message."""
    if axis.size == 1 or not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=axis.group)
    for gradient, whole in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(whole.view_as(gradient))
