"""One table per model family: which HF tensors make up each Megatron parameter, readable in both directions.

A Rule's layout says how: `load` cuts this tensor rank's shard out of the HF tensors and `export` joins all shards into
them again. The round trip is a test and returns the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.weights.architecture import Architecture
from megatron_rl.weights.hf_files import Shape, WeightSource


class Replicated:
    """Every tensor rank holds the whole tensor."""

    split_dim: int | None = None

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
        if stop <= start:
            return torch.zeros(shape)
        rows = source.read(names[0], 0, start, stop)
        return rows if rows.shape == shape else torch.cat([rows, rows.new_zeros(shape[0] - len(rows), *shape[1:])])

    def export(self, shards, arch):
        return [torch.cat(shards)[: arch.vocab]]


class Columns:
    """Split along the input dimension: row-parallel linear layers."""

    split_dim: int | None = 1

    def load(self, source, names, shape, rank, size, arch):
        return source.read(names[0], 1, rank * shape[1], (rank + 1) * shape[1])

    def export(self, shards, arch):
        return [torch.cat(shards, dim=1)]


class GateUp:
    """Each rank holds its gate rows above its up rows; the whole is not one split of [gate; up]."""

    split_dim: int | None = 0

    def load(self, source, names, shape, rank, size, arch):
        rows = shape[0] // 2
        return torch.cat([source.read(name, 0, rank * rows, (rank + 1) * rows) for name in names])

    def export(self, shards, arch):
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in (0, 1)]


class FusedQKV:
    """Query heads, key and value of each KV group side by side; ranks take equal runs of those rows."""

    split_dim: int | None = 0

    def load(self, source, names, shape, rank, size, arch):
        q_rows, kv_rows = arch.heads // arch.kv_heads * arch.head_dim, arch.head_dim
        group_rows = q_rows + 2 * kv_rows
        start, stop = rank * shape[0], (rank + 1) * shape[0]
        first, last = (
            start // group_rows,
            (stop - 1) // group_rows + 1,
        )  # with fewer KV heads than ranks groups are shared
        parts = []
        for group in range(first, last):
            for name, rows in zip(names, (q_rows, kv_rows, kv_rows), strict=True):
                parts.append(source.read(name, 0, group * rows, (group + 1) * rows))
        return torch.cat(parts)[start - first * group_rows : stop - first * group_rows]

    def export(self, shards, arch):
        q_rows, kv_rows = arch.heads // arch.kv_heads * arch.head_dim, arch.head_dim
        whole = torch.cat(shards)
        groups = whole.view(arch.kv_heads, q_rows + 2 * kv_rows, *whole.shape[1:])
        return [part.reshape(-1, *whole.shape[1:]) for part in groups.split([q_rows, kv_rows, kv_rows], dim=1)]


@dataclass(frozen=True)
class Rule:
    """Megatron parameter <-> HF tensors; in a layer rule `{}` of the HF prefix is the global layer number."""

    megatron: str
    hf: tuple[str, ...]
    layout: Replicated | VocabRows | Columns | GateUp | FusedQKV


def _heads(suffix: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{part}_proj.{suffix}" for part in "qkv")


EDGES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VocabRows()),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
    Rule("output_layer.weight", ("lm_head.weight",), VocabRows()),
)
LLAMA = (  # left to right to publish, right to left to load
    Rule("input_layernorm.weight", ("input_layernorm.weight",), Replicated()),
    Rule("self_attention.linear_qkv.weight", _heads("weight"), FusedQKV()),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Columns()),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Replicated()),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateUp()),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), Columns()),
)
QWEN2 = (*LLAMA, Rule("self_attention.linear_qkv.bias", _heads("bias"), FusedQKV()))
QWEN3 = (
    *LLAMA,
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Replicated()),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Replicated()),
)
LAYERS = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


def hf_shapes(arch: Architecture) -> dict[str, Shape]:
    """Name and shape of every HF tensor of the model, in the order of its layers."""
    q, kv, h = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.hidden
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (arch.ffn, h),
        "mlp.up_proj.weight": (arch.ffn, h),
        "mlp.down_proj.weight": (h, arch.ffn),
    }
    if arch.qkv_bias:
        layer |= {f"self_attn.{part}_proj.bias": (rows,) for part, rows in zip("qkv", (q, kv, kv), strict=True)}
    if arch.qk_norm:
        layer |= {f"self_attn.{part}_norm.weight": (arch.head_dim,) for part in "qk"}
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (arch.vocab, h)}
    for number in range(arch.layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (h,)
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab, h)
    return shapes


def rule_for(name: str, layer_number: int | None, arch: Architecture) -> Rule:
    """Return the rule of a Megatron parameter, with full HF names.

    name: the parameter's name within the model, or within its layer where `layer_number` (global, from 0) is given.
    """
    table = EDGES if layer_number is None else LAYERS[arch.family]
    for rule in table:
        if rule.megatron == name:
            if layer_number is not None:
                return Rule(name, tuple(f"model.layers.{layer_number}.{hf}" for hf in rule.hf), rule.layout)
            if name == "output_layer.weight" and arch.tied:  # a last pipeline stage keeps its own copy
                return Rule(name, ("model.embed_tokens.weight",), rule.layout)
            return rule
    raise KeyError(f"{name}: no rule for this parameter in the {arch.family} table of weights/mapping.py; add one.")
