"""How Megatron parameters are made of HF tensors: layouts in both directions, and the rules that many families share.

A Rule's layout says how: `load` cuts this tensor rank's shard out of the HF tensors and `export` joins all shards into
them again. The round trip is a test and returns the same bits.
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
        """Return the slice `[start, stop)` of dimension `dim`; 1-D tensors have dim 0 only."""


def _joined(shards: list[Tensor], dim: int = 0) -> Tensor:
    """The shards side by side; a single one as it is, without a copy."""
    return torch.cat(shards, dim=dim) if len(shards) > 1 else shards[0]


class Replicated:
    """Every tensor rank holds the whole tensor."""

    split_dim: int | None = None

    # `load` of all layouts: shape is the shard's, rank and size are those of the axis that the parameter is cut along.
    def load(self, source: WeightSource, names: list[str], shape: Shape, rank: int, size: int, arch: Architecture):
        return source.read(names[0], 0, 0, shape[0])

    def export(self, shards: list[Tensor], arch: Architecture) -> list[Tensor]:
        return shards[:1]


class VocabRows:
    """Vocabulary rows in rank order, padded with zeros to a multiple of the tensor axis."""

    split_dim: int | None = 0

    def load(self, source, names, shape, rank, size, arch):
        start = rank * shape[0]
        stop = min(start + shape[0], arch.vocab)
        if stop <= start:  # with many ranks the last one may have nothing but padding
            return torch.zeros(shape)
        rows = source.read(names[0], 0, start, stop)
        return rows if rows.shape == shape else torch.cat([rows, rows.new_zeros(shape[0] - len(rows), *shape[1:])])

    def export(self, shards, arch):
        return [_joined(shards)[: arch.vocab]]  # HF knows no padding


class Rows:
    """Split along the output dimension: column-parallel linear layers."""

    split_dim: int | None = 0

    def load(self, source, names, shape, rank, size, arch):
        return source.read(names[0], 0, rank * shape[0], (rank + 1) * shape[0])

    def export(self, shards, arch):
        return [_joined(shards)]


class Columns:
    """Split along the input dimension: row-parallel linear layers."""

    split_dim: int | None = 1

    def load(self, source, names, shape, rank, size, arch):
        return source.read(names[0], 1, rank * shape[1], (rank + 1) * shape[1])

    def export(self, shards, arch):
        return [_joined(shards, dim=1)]


Place = tuple[str, int]
"""An HF tensor, and the row in it where a part begins."""


class GateUp:
    """Each rank holds its gate rows above its up rows; the whole is not one split of [gate; up]."""

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
    """The same of files that have [gate; up] in one tensor."""

    def places(self, names, ffn):
        return [(names[0], 0), (names[0], ffn)]

    def export(self, shards, arch):
        return [torch.cat(super().export(shards, arch))]


class InterleavedGateUp(GateUp):
    """The same of files that have gate, up, gate, up, ... in one tensor, and a matrix's inputs before its outputs."""

    def load(self, source, names, shape, rank, size, arch):
        both = source.read(names[0], len(shape) - 1, rank * shape[0], (rank + 1) * shape[0]).movedim(-1, 0)
        return torch.cat([both[0::2], both[1::2]])

    def export(self, shards, arch):
        return [torch.stack(super().export(shards, arch), dim=1).flatten(0, 1).movedim(0, -1)]


class TransposedColumns(Columns):
    """Columns of files that have a matrix's inputs before its outputs."""

    def load(self, source, names, shape, rank, size, arch):
        return source.read(names[0], 0, rank * shape[1], (rank + 1) * shape[1]).T

    def export(self, shards, arch):
        return [_joined(shards, dim=1).T]


class FusedQKV:
    """Query heads, key and value of each KV group side by side; ranks take equal runs of those rows."""

    split_dim: int | None = 0

    def places(self, names: list[str], arch: Architecture) -> list[Place]:
        return [(name, 0) for name in names]

    def load(self, source, names, shape, rank, size, arch):
        q_rows, kv_rows = arch.heads // arch.kv_heads * arch.head_dim, arch.head_dim
        group_rows = q_rows + 2 * kv_rows
        start, stop = rank * shape[0], (rank + 1) * shape[0]
        # With fewer KV heads than ranks a rank's rows may begin and end within a group: its groups are read whole, and
        # cut at the end.
        first, last = start // group_rows, (stop - 1) // group_rows + 1
        parts = []
        for group in range(first, last):
            for (name, begin), rows in zip(self.places(names, arch), (q_rows, kv_rows, kv_rows), strict=True):
                parts.append(source.read(name, 0, begin + group * rows, begin + (group + 1) * rows))
        return torch.cat(parts)[start - first * group_rows : stop - first * group_rows]

    def export(self, shards, arch):
        q_rows, kv_rows = arch.heads // arch.kv_heads * arch.head_dim, arch.head_dim
        whole = _joined(shards)
        # `shape[1:]` is empty of a bias. HF has all query heads in one tensor, then all keys, then all values.
        groups = whole.view(arch.kv_heads, q_rows + 2 * kv_rows, *whole.shape[1:])
        return [part.reshape(-1, *whole.shape[1:]) for part in groups.split([q_rows, kv_rows, kv_rows], dim=1)]


class OneQKV(FusedQKV):
    """The same of files that have [all queries; all keys; all values] in one tensor."""

    def places(self, names, arch):
        queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        return [(names[0], 0), (names[0], queries), (names[0], queries + keys)]

    def export(self, shards, arch):
        return [torch.cat(super().export(shards, arch))]


class Part(NamedTuple):
    """Rows of one HF tensor that belong to each of several groups of heads: `rows` at `start` + group x `stride`."""

    tensor: int
    start: int
    stride: int
    rows: int


class HeadGroups:
    """The parts of each group of heads side by side, as `parts` names them; ranks take equal numbers of groups.

    parts: architecture -> the number of groups and each one's parts, which together are all rows of the HF tensors.
    """

    split_dim: int | None = 0

    def __init__(self, parts: Callable[[Architecture], tuple[int, list[Part]]]) -> None:
        self.parts = parts

    def load(self, source, names, shape, rank, size, arch):
        groups, parts = self.parts(arch)
        own = range(rank * groups // size, (rank + 1) * groups // size)
        first = [(group, part, part.start + group * part.stride) for group in own for part in parts]
        return torch.cat([source.read(names[part.tensor], 0, start, start + part.rows) for _, part, start in first])

    def export(self, shards, arch):
        groups, parts = self.parts(arch)
        whole = _joined(shards)
        whole = whole.view(groups, -1, *whole.shape[1:])
        each = whole.split([part.rows for part in parts], dim=1)
        tensors = []
        for number in range(max(part.tensor for part in parts) + 1):
            own = [(part, rows) for part, rows in zip(parts, each, strict=True) if part.tensor == number]
            tensor = whole.new_empty(groups * sum(part.rows for part, _ in own), *whole.shape[2:])
            for part, rows in own:
                for group in range(groups):
                    start = part.start + group * part.stride
                    tensor[start : start + part.rows] = rows[group]
            tensors.append(tensor)
        return tensors


@dataclass(frozen=True)
class ExpertOfStack:
    """One expert's part of tensors that begin with a dimension for the experts of a layer."""

    stack: WeightSource
    number: int

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.stack.read(name, 0, self.number, self.number + 1)[0].narrow(dim, start, stop - start)


@dataclass(frozen=True)
class Rule:
    """Megatron parameter <-> HF tensors with the sizes of their dimensions (the words of `sizes`).

        rule = rule_for("mlp.linear_fc1.weight", 3, arch)
        rule.names()  # ["model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.up_proj.weight"]
        shard = rule.load(source, shape, rank=0, size=2, arch=arch)

    A rule with a word that the architecture has no size for is not the model's. Of an expert's rule `{}` in both names
    is its number, on this rank in Megatron's and in the whole model in HF's. Files with one tensor for all experts of a
    layer have none in HF's.
    """

    megatron: str
    hf: dict[str, str]
    layout: Replicated | VocabRows | Rows | Columns | GateUp | FusedQKV | HeadGroups
    expert: int | None = None
    """Which of this rank's experts the parameter belongs to."""

    def names(self, first_expert: int = 0) -> list[str]:
        """The HF names; `first_expert` is the number of the rank's first expert in the whole model."""
        return list(self.hf) if self.expert is None else [name.format(first_expert + self.expert) for name in self.hf]

    @property
    def is_stacked(self) -> bool:
        """Do the HF tensors have all experts of the layer?"""
        return "{}" in self.megatron and not any("{}" in name for name in self.hf)

    def load(
        self, source: WeightSource, shape: Shape, rank: int, size: int, arch: Architecture, first_expert: int = 0
    ) -> Tensor:
        """Read the parameter's part on one of `size` ranks, of `shape`."""
        if self.is_stacked:
            assert self.expert is not None
            source = ExpertOfStack(source, first_expert + self.expert)
        return self.layout.load(source, self.names(first_expert), shape, rank, size, arch)


# Parts of a layer: left to right to publish, right to left to load.
# HF calls the norm before the feed-forward after what it follows: `post_attention_layernorm`. Gemma has norms in both
# places, and there the same name is that of the norm right behind attention.
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
        FusedQKV(),
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
        FusedQKV(),
    ),
)
QK_NORM = (  # one weight for all heads, of a head's width
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "head_norm"}, Replicated()),
    Rule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "head_norm"}, Replicated()),
)
WIDE_QK_NORM = (  # one for all heads together: each rank has its heads' part
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "query"}, Rows()),
    Rule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "key"}, Rows()),
)
DENSE = (
    Rule(
        "mlp.linear_fc1.weight",
        {"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"},
        GateUp(),
    ),
    Rule("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "hidden ffn"}, Columns()),
)
EXPERTS = (  # HF's `mlp.gate` is the router; `gate_proj` is a part of each expert
    Rule("mlp.router.weight", {"mlp.gate.weight": "experts hidden"}, Replicated()),
    Rule(
        "mlp.experts.local_experts.{}.linear_fc1.weight",
        {"mlp.experts.{}.gate_proj.weight": "expert hidden", "mlp.experts.{}.up_proj.weight": "expert hidden"},
        GateUp(),
    ),
    Rule(
        "mlp.experts.local_experts.{}.linear_fc2.weight",
        {"mlp.experts.{}.down_proj.weight": "hidden expert"},
        Columns(),
    ),
)
SHARED_EXPERTS = (
    Rule(
        "mlp.shared_experts.linear_fc1.weight",
        {"mlp.shared_experts.gate_proj.weight": "shared hidden", "mlp.shared_experts.up_proj.weight": "shared hidden"},
        GateUp(),
    ),
    Rule("mlp.shared_experts.linear_fc2.weight", {"mlp.shared_experts.down_proj.weight": "hidden shared"}, Columns()),
)
# A buffer in Megatron, and always float32: gradients do not reach it (reshard.py adds it to the parameters).
ROUTER_BIAS = (Rule("mlp.router.expert_bias", {"mlp.gate.e_score_correction_bias": "experts"}, Replicated()),)
MIXTRAL_EXPERTS = (  # w1 is the gate, w3 goes up, w2 down
    Rule("mlp.router.weight", {"block_sparse_moe.gate.weight": "experts hidden"}, Replicated()),
    Rule(
        "mlp.experts.local_experts.{}.linear_fc1.weight",
        {
            "block_sparse_moe.experts.{}.w1.weight": "expert hidden",
            "block_sparse_moe.experts.{}.w3.weight": "expert hidden",
        },
        GateUp(),
    ),
    Rule(
        "mlp.experts.local_experts.{}.linear_fc2.weight",
        {"block_sparse_moe.experts.{}.w2.weight": "hidden expert"},
        Columns(),
    ),
)
