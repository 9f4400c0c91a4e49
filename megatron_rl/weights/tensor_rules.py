"""Convert between Megatron parameters and HF tensors: layouts, and the rules that many model families share.

A Rule maps a Megatron parameter to HF tensors, and its layout converts them. The layout's `load` reads the shard of one
tensor-parallel rank from the HF tensors. Its `export` joins all shards into HF tensors again. Tests check that the
round trip returns the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_rl.weights.decoder import Architecture

Shape = tuple[int, ...]


class WeightSource(Protocol):
    """Named HF tensors that can be read by rows or columns."""

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return the slice `[start, stop)` of the tensor `name` along `dim`: 0 for rows, 1 for columns."""


def _joined(shards: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate the shards. A single shard is returned without a copy."""
    return torch.cat(shards, dim=dim) if len(shards) > 1 else shards[0]


class Replicated:
    """Layout in which every tensor-parallel rank holds the whole tensor."""

    split_dim: int | None = None

    # In every layout's `load`, `shape` is the shard's; `rank` and `size` are of the axis the parameter is split over.
    def load(self, source: WeightSource, names: list[str], shape: Shape, rank: int, size: int, arch: Architecture):
        return source.read(names[0], 0, 0, shape[0])

    def export(self, shards: list[Tensor], arch: Architecture) -> list[Tensor]:
        return shards[:1]


class VocabRows:
    """Layout of matrices with one row per token of the vocabulary: split by rows over the tensor-parallel ranks.

    Rows of zeros are added until the ranks have equally many.
    """

    split_dim: int | None = 0

    def load(self, source, names, shape, rank, size, arch):
        start = rank * shape[0]
        stop = min(start + shape[0], arch.vocab)
        if stop <= start:  # with many ranks the last one may have only padding
            return torch.zeros(shape)
        rows = source.read(names[0], 0, start, stop)
        return rows if rows.shape == shape else torch.cat([rows, rows.new_zeros(shape[0] - len(rows), *shape[1:])])

    def export(self, shards, arch):
        return [_joined(shards)[: arch.vocab]]  # HF has no padding


class Rows:
    """Layout of column-parallel linear layers: the matrix is split along the output dimension, that is by rows."""

    split_dim: int | None = 0

    def load(self, source, names, shape, rank, size, arch):
        return source.read(names[0], 0, rank * shape[0], (rank + 1) * shape[0])

    def export(self, shards, arch):
        return [_joined(shards)]


class Columns:
    """Layout of row-parallel linear layers: the matrix is split along the input dimension, that is by columns."""

    split_dim: int | None = 1

    def load(self, source, names, shape, rank, size, arch):
        return source.read(names[0], 1, rank * shape[1], (rank + 1) * shape[1])

    def export(self, shards, arch):
        return [_joined(shards, dim=1)]


Place = tuple[str, int]
"""(Name of an HF tensor, number of its row at which a part of a parameter begins)."""


class GateUp:
    """Layout of gate and up projections as one parameter.

    A rank's shard is [its rows of gate; its rows of up], which is no slice of [gate; up].
    """

    split_dim: int | None = 0

    def places(self, names: list[str], ffn: int) -> list[Place]:
        return [(name, 0) for name in names]

    def load(self, source, names, shape, rank, size, arch):
        rows = shape[0] // 2
        first = [(name, start + rank * rows) for name, start in self.places(names, rows * size)]
        return torch.cat([source.read(name, 0, start, start + rows) for name, start in first])

    def export(self, shards, arch):
        halves = [shard.chunk(2) for shard in shards]
        return [_joined([half[i] for half in halves]) for i in (0, 1)]


class OneGateUp(GateUp):
    """`GateUp` for files that have [gate; up] in one tensor."""

    def places(self, names, ffn):
        return [(names[0], 0), (names[0], ffn)]

    def export(self, shards, arch):
        return [torch.cat(super().export(shards, arch))]


class InterleavedGateUp(GateUp):
    """`GateUp` for files that interleave gate and up outputs in one tensor. Their matrices are `[inputs, outputs]`."""

    def load(self, source, names, shape, rank, size, arch):
        both = source.read(names[0], len(shape) - 1, rank * shape[0], (rank + 1) * shape[0]).movedim(-1, 0)
        return torch.cat([both[0::2], both[1::2]])

    def export(self, shards, arch):
        return [torch.stack(super().export(shards, arch), dim=1).flatten(0, 1).movedim(0, -1)]


class TransposedColumns(Columns):
    """`Columns` for files that store matrices as `[inputs, outputs]`."""

    def load(self, source, names, shape, rank, size, arch):
        return source.read(names[0], 0, rank * shape[1], (rank + 1) * shape[1]).T

    def export(self, shards, arch):
        return [_joined(shards, dim=1).T]


class Part(NamedTuple):
    """Rows of one HF tensor that belong to a group of heads, described for all groups at once.

    The rows of group `group` (from 0) are the `rows` consecutive rows from row `start + group * stride` on.
    tensor: index of the HF tensor in the rule's `hf`.
    """

    tensor: int
    start: int
    stride: int
    rows: int


class HeadGroups:
    """Layout of a parameter whose rows are ordered by group of heads, and within a group by part.

    Each tensor-parallel rank holds an equal run of rows. parts: function from an architecture to the number of groups
    and the parts of a group. The parts of all groups together cover all rows of the HF tensors.
    """

    split_dim: int | None = 0

    def __init__(self, parts: Callable[[Architecture], tuple[int, list[Part]]]) -> None:
        self.parts = parts

    def load(self, source, names, shape, rank, size, arch):
        parts = self.parts(arch)[1]
        group_rows = sum(part.rows for part in parts)
        start, stop = rank * shape[0], (rank + 1) * shape[0]
        # With fewer groups than ranks, a rank's rows may begin and end within a group. Groups are read whole and
        # trimmed at the end.
        first, last = start // group_rows, (stop - 1) // group_rows + 1
        begins = [(part, part.start + group * part.stride) for group in range(first, last) for part in parts]
        rows = torch.cat([source.read(names[part.tensor], 0, begin, begin + part.rows) for part, begin in begins])
        return rows[start - first * group_rows : stop - first * group_rows]

    def export(self, shards, arch):
        groups, parts = self.parts(arch)
        whole = _joined(shards)
        # [groups, rows of a group, ...], divided into parts. There are no further dimensions for a bias.
        each = whole.view(groups, -1, *whole.shape[1:]).split([part.rows for part in parts], dim=1)
        tensors = []
        for number in range(max(part.tensor for part in parts) + 1):
            own = [(part, rows) for part, rows in zip(parts, each, strict=True) if part.tensor == number]
            tensor = whole.new_empty(groups * sum(part.rows for part, _ in own), *whole.shape[1:])
            for part, rows in own:
                # A view of the part's rows in all groups, in the shape of `rows`.
                view = tensor[part.start :].unfold(0, part.rows, part.stride)[:groups].movedim(-1, 1)
                view.copy_(rows)
            tensors.append(tensor)
        return tensors


def query_key_value(arch: Architecture) -> tuple[int, list[Part]]:
    """Return the number of KV groups, and the parts of each group: its query heads, its key and its value.

    They come from three HF tensors. For use as `HeadGroups.parts`.
    """
    queries, width = arch.heads // arch.kv_heads * arch.head_dim, arch.head_dim
    return arch.kv_heads, [Part(0, 0, queries, queries), Part(1, 0, width, width), Part(2, 0, width, width)]


@dataclass(frozen=True)
class ExpertOfStack:
    """Source of the weights of one expert, which reads tensors whose first dimension counts the layer's experts."""

    stack: WeightSource
    number: int

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.stack.read(name, 0, self.number, self.number + 1)[0].narrow(dim, start, stop - start)


@dataclass(frozen=True)
class Rule:
    """Maps a Megatron parameter to the HF tensors it is made of.

        rule = rule_for("mlp.linear_fc1.weight", 3, arch)
        rule.names()  # ["model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.up_proj.weight"]
        shard = rule.load(source, shape, rank=0, size=2, arch=arch)

    megatron: the parameter's name within its layer, or within the model if it is in no layer.
    hf: {HF tensor name: its dimensions, as words that `mapping.sizes` translates to numbers}. A rule applies to a model
    only if `sizes` defines all words of the rule.
    expert: number of the parameter's expert among the experts of this rank; None if the parameter is no expert's.

    In an expert's rule, `{}` in names stands for the expert's number: the number on this rank in the Megatron name, the
    global number in the HF names. HF names have no `{}` if one tensor stacks all experts of a layer.
    """

    megatron: str
    hf: dict[str, str]
    layout: Replicated | VocabRows | Rows | Columns | GateUp | HeadGroups
    expert: int | None = None

    def names(self, first_expert: int = 0) -> list[str]:
        """Return the names of the HF tensors. first_expert: global number of the rank's first expert."""
        return list(self.hf) if self.expert is None else [name.format(first_expert + self.expert) for name in self.hf]

    @property
    def is_stacked(self) -> bool:
        """True if each HF tensor stacks all experts of the layer."""
        return "{}" in self.megatron and not any("{}" in name for name in self.hf)

    def load(
        self, source: WeightSource, shape: Shape, rank: int, size: int, arch: Architecture, first_expert: int = 0
    ) -> Tensor:
        """Read the parameter's shard for rank `rank` out of `size` ranks. shape: the shape of the shard.

        first_expert: global number of the rank's first expert.
        """
        if self.is_stacked:
            assert self.expert is not None
            source = ExpertOfStack(source, first_expert + self.expert)
        return self.layout.load(source, self.names(first_expert), shape, rank, size, arch)


# HF names the norm before the feed-forward after the block it follows: `post_attention_layernorm`. Gemma has norms in
# both places, and there this name means the norm directly after attention.
NORMS = (
    Rule("input_layernorm.weight", {"input_layernorm.weight": "hidden"}, Replicated()),
    Rule("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": "hidden"}, Replicated()),
)
SANDWICH_NORMS = (
    Rule("input_layernorm.weight", {"input_layernorm.weight": "hidden"}, Replicated()),
    Rule("self_attention.linear_proj.norm.weight", {"post_attention_layernorm.weight": "hidden"}, Replicated()),
    Rule("pre_mlp_layernorm.weight", {"pre_feedforward_layernorm.weight": "hidden"}, Replicated()),
    Rule("mlp.linear_fc2.norm.weight", {"post_feedforward_layernorm.weight": "hidden"}, Replicated()),
)
ATTENTION = (
    Rule(
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": "query hidden",
            "self_attn.k_proj.weight": "key hidden",
            "self_attn.v_proj.weight": "key hidden",
        },
        HeadGroups(query_key_value),
    ),
    Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "hidden query"}, Columns()),
)
QKV_BIAS = (
    Rule(
        "self_attention.linear_qkv.bias",
        {
            "self_attn.q_proj.bias": "query_bias",
            "self_attn.k_proj.bias": "key_bias",
            "self_attn.v_proj.bias": "key_bias",
        },
        HeadGroups(query_key_value),
    ),
)
QK_NORM = (  # all heads share one weight vector of a head's width
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "head_norm"}, Replicated()),
    Rule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "head_norm"}, Replicated()),
)
WIDE_QK_NORM = (  # one weight vector over all heads: each rank holds the part of its heads
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "query"}, Rows()),
    Rule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "key"}, Rows()),
)


def feed_forward(
    megatron: str, hf: str, width: str, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Rule, Rule]:
    """Return the two rules for a gated feed-forward: for gate and up together, and for down.

    megatron, hf: prefixes of the Megatron and HF names. width: word (see `Rule`) for the inner width.
    parts: last components of the HF names of gate, up and down.
    """
    gate, up, down = (f"{hf}.{part}.weight" for part in parts)
    return (
        Rule(f"{megatron}.linear_fc1.weight", {gate: f"{width} hidden", up: f"{width} hidden"}, GateUp()),
        Rule(f"{megatron}.linear_fc2.weight", {down: f"hidden {width}"}, Columns()),
    )


DENSE = feed_forward("mlp", "mlp", "ffn")
_EXPERT = "mlp.experts.local_experts.{}"
EXPERTS = (  # HF's `mlp.gate` is the router; `gate_proj` is a part of each expert
    Rule("mlp.router.weight", {"mlp.gate.weight": "experts hidden"}, Replicated()),
    *feed_forward(_EXPERT, "mlp.experts.{}", "expert"),
)
SHARED_EXPERTS = feed_forward("mlp.shared_experts", "mlp.shared_experts", "shared")
MIXTRAL_EXPERTS = (
    Rule("mlp.router.weight", {"block_sparse_moe.gate.weight": "experts hidden"}, Replicated()),
    *feed_forward(_EXPERT, "block_sparse_moe.experts.{}", "expert", ("w1", "w3", "w2")),
)
EXPERT_BIAS = "mlp.router.expert_bias"
"""Megatron's name of the bias that selects experts: a float32 buffer without gradient, exported like a parameter."""
ROUTER_BIAS = (Rule(EXPERT_BIAS, {"mlp.gate.e_score_correction_bias": "experts"}, Replicated()),)
