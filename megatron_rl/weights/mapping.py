"""One table per model family: which HF tensors make up each Megatron parameter, readable in both directions.

A Rule's layout says how: `load` cuts this tensor rank's shard out of the HF tensors and `export` joins all shards into
them again. The round trip is a test and returns the same bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.weights.architecture import Architecture, read_architecture
from megatron_rl.weights.hf_files import HFFolder, RandomWeights, Shape, ValueHeadFromZero, WeightSource


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


@dataclass(frozen=True)
class Rule:
    """Megatron parameter <-> HF tensors with the sizes of their dimensions (the words of `sizes`).

        rule = rule_for("mlp.linear_fc1.weight", 3, arch)
        rule.names()  # ["model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.up_proj.weight"]
        shard = rule.layout.load(source, rule.names(), shape, rank=0, size=2, arch=arch)

    A rule with a word that the architecture has no size for is not the model's. Of an expert's rule `{}` in both names
    is its number, on this rank in Megatron's and in the whole model in HF's.
    """

    megatron: str
    hf: dict[str, str]
    layout: Replicated | VocabRows | Rows | Columns | GateUp | FusedQKV
    expert: int | None = None
    """Which of this rank's experts the parameter belongs to."""

    def names(self, first_expert: int = 0) -> list[str]:
        """The HF names; `first_expert` is the number of the rank's first expert in the whole model."""
        return list(self.hf) if self.expert is None else [name.format(first_expert + self.expert) for name in self.hf]


EDGES = (
    Rule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vocab hidden"}, VocabRows()),
    Rule("decoder.final_layernorm.weight", {"model.norm.weight": "hidden"}, Replicated()),
    Rule("output_layer.weight", {"lm_head.weight": "vocab hidden"}, VocabRows()),
)
VALUE_HEAD = "score.weight"
# One row cannot be cut: every tensor rank has the whole value head.
VALUE_EDGES = (*EDGES[:2], Rule("output_layer.weight", {VALUE_HEAD: "label hidden"}, Replicated()))
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
NORMS_BEHIND = (SANDWICH_NORMS[1], SANDWICH_NORMS[3])
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
# Queries go through a low rank or not: `sizes` has the words of one kind only, so the other kind's rules are left out.
# What projects down is small and stands before a norm over its whole width: every tensor rank has all of it. `with_mqa`
# is the rotated part of the keys, one for all heads, in the same tensor.
LATENT_ATTENTION = (
    Rule("self_attention.linear_q_proj.weight", {"self_attn.q_proj.weight": "latent_query no_query_rank"}, Rows()),
    Rule("self_attention.linear_q_down_proj.weight", {"self_attn.q_a_proj.weight": "query_rank hidden"}, Replicated()),
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_a_layernorm.weight": "query_rank"}, Replicated()),
    Rule("self_attention.linear_q_up_proj.weight", {"self_attn.q_b_proj.weight": "latent_query query_rank"}, Rows()),
    Rule(
        "self_attention.linear_kv_down_proj.weight",
        {"self_attn.kv_a_proj_with_mqa.weight": "kv_rank_and_head hidden"},
        Replicated(),
    ),
    Rule("self_attention.kv_layernorm.weight", {"self_attn.kv_a_layernorm.weight": "kv_rank"}, Replicated()),
    Rule("self_attention.linear_kv_up_proj.weight", {"self_attn.kv_b_proj.weight": "latent_kv kv_rank"}, Rows()),
    Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "hidden latent_value"}, Columns()),
)
PHI_ATTENTION = (
    Rule("self_attention.linear_qkv.weight", {"self_attn.qkv_proj.weight": "query_key_value hidden"}, OneQKV()),
    ATTENTION[1],
)
PHI_DENSE = (
    Rule("mlp.linear_fc1.weight", {"mlp.gate_up_proj.weight": "gate_up hidden"}, OneGateUp()),
    Rule("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "hidden ffn"}, Columns()),
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
MINIMAX_BIAS = (Rule("mlp.router.expert_bias", {"block_sparse_moe.e_score_correction_bias": "experts"}, Replicated()),)
LAYERS = {  # of each family: norms and attention, the dense feed-forward, the mixture of experts
    "deepseek_v3": ((*NORMS, *LATENT_ATTENTION), DENSE, (*EXPERTS, *SHARED_EXPERTS, *ROUTER_BIAS)),
    "glm4_moe": (
        (*NORMS, *ATTENTION, *QKV_BIAS, *QK_NORM),
        DENSE,
        (*EXPERTS, *SHARED_EXPERTS, *ROUTER_BIAS),
    ),
    "gemma3": ((*SANDWICH_NORMS, *ATTENTION, *QK_NORM), DENSE, ()),
    "llama": ((*NORMS, *ATTENTION), DENSE, ()),
    "minimax_m2": ((*NORMS, *ATTENTION, *WIDE_QK_NORM), (), (*MIXTRAL_EXPERTS, *MINIMAX_BIAS)),
    "mistral": ((*NORMS, *ATTENTION), DENSE, ()),
    "mixtral": ((*NORMS, *ATTENTION), (), MIXTRAL_EXPERTS),
    "olmo": ((*NORMS_BEHIND, *ATTENTION, *WIDE_QK_NORM), DENSE, ()),
    "phi3": ((*NORMS, *PHI_ATTENTION), PHI_DENSE, ()),
    "qwen2": ((*NORMS, *ATTENTION, *QKV_BIAS), DENSE, ()),
    "qwen3": ((*NORMS, *ATTENTION, *QK_NORM), DENSE, ()),
    "qwen3_moe": ((*NORMS, *ATTENTION, *QK_NORM), DENSE, EXPERTS),
    "seed_oss": ((*NORMS, *ATTENTION, *QKV_BIAS), DENSE, ()),
}
# Transformer Engine fuses a norm into the matrix behind it and keeps a rank's experts in one module.
TRANSFORMER_ENGINE = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight"), "pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)"), r"mlp.experts.local_experts.\2.\1.weight"),
)
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def sizes(arch: Architecture) -> dict[str, int]:
    """The words that rules describe the dimensions of HF tensors with."""
    words = {
        "vocab": arch.vocab,
        "label": 1,
        "hidden": arch.hidden,
        "ffn": arch.ffn,
        "query": arch.heads * arch.head_dim,
        "key": arch.kv_heads * arch.head_dim,
        "query_key_value": (arch.heads + 2 * arch.kv_heads) * arch.head_dim,
        "gate_up": 2 * arch.ffn,
    }
    if arch.qkv_bias:
        words |= {"query_bias": words["query"], "key_bias": words["key"]}
    if arch.qk_norm:
        words["head_norm"] = arch.head_dim
    if arch.mixture is not None:
        words |= {"experts": arch.mixture.experts, "expert": arch.mixture.ffn}
        if arch.mixture.shared_ffn is not None:
            words["shared"] = arch.mixture.shared_ffn
    if arch.latent is not None:
        latent = arch.latent
        words |= {
            "kv_rank": latent.kv_rank,
            "kv_rank_and_head": latent.kv_rank + arch.head_dim,
            "latent_query": arch.heads * (latent.plain_dim + arch.head_dim),
            "latent_kv": arch.heads * (latent.plain_dim + latent.value_dim),
            "latent_value": arch.heads * latent.value_dim,
            # One of two words, so that only the rules of one kind of queries are the model's.
            "query_rank" if latent.query_rank else "no_query_rank": latent.query_rank or arch.hidden,
        }
    return words


def hf_shapes(arch: Architecture) -> dict[str, Shape]:
    """Name and shape of every HF tensor of the model, in the order of its layers."""
    words = sizes(arch)

    def shapes_of(rule: Rule, prefix: str = "") -> dict[str, Shape]:
        shapes = {prefix + name: tuple(words[word] for word in dims.split()) for name, dims in rule.hf.items()}
        if "{}" not in rule.megatron:
            return shapes
        return {name.format(n): shape for n in range(arch.mixture.experts) for name, shape in shapes.items()}

    embedding, final_norm, output = map(shapes_of, edges(arch))
    shapes = embedding
    for number in range(arch.layers):
        for rule in layer_rules(arch, number):
            shapes |= shapes_of(rule, f"model.layers.{number}.")
    return shapes | final_norm | ({} if arch.tied else output)


def edges(arch: Architecture) -> tuple[Rule, ...]:
    """The rules of the embedding, of the last norm and of the head."""
    return VALUE_EDGES if arch.head == "value" else EDGES


def layer_rules(arch: Architecture, layer_number: int) -> list[Rule]:
    """The rules of one layer, counted from 0 over the whole model."""
    attention, dense, mixture = LAYERS[arch.family]
    words = sizes(arch).keys()
    rules = attention + (mixture if arch.has_mixture(layer_number) else dense)
    return [rule for rule in rules if all(words >= set(dims.split()) for dims in rule.hf.values())]


def weight_source(folder: str | Path, arch: Architecture, *, random_seed: int | None = None) -> WeightSource:
    """Open a folder's weights for a model of `arch`, or draw them where a seed is given.

    A value head that the folder lacks is zeros. ValueError where the folder does not hold what `arch` needs.
    """
    found, shapes = read_architecture(folder), hf_shapes(arch)
    # Of a critic that starts from a policy, whose folder has a head of another kind.
    starts_at_zero = found.head != found.with_head(arch.head).head
    head = shapes.pop(VALUE_HEAD) if starts_at_zero else None
    source: WeightSource = (
        HFFolder(folder, shapes)
        if random_seed is None
        else RandomWeights(shapes, random_seed, norm=1.0 - arch.norm_offset)  # a norm that adds 1 starts at 0
    )
    return source if head is None else ValueHeadFromZero(source, VALUE_HEAD, head)


def rule_for(name: str, layer_number: int | None, arch: Architecture) -> Rule:
    """Return the rule of a Megatron parameter, with full HF names.

    name: the parameter's name within the model, or within its layer where `layer_number` (global, from 0) is given; as
    upstream's local layers or those of Transformer Engine have it.
    """
    # First to the names of local layers, as the tables are in these.
    for pattern, local in TRANSFORMER_ENGINE:
        if match := pattern.fullmatch(name):
            name = match.expand(local)
    expert = _EXPERT.search(name)
    general = _EXPERT.sub("{}", name)
    for rule in edges(arch) if layer_number is None else layer_rules(arch, layer_number):
        if rule.megatron == general:
            if layer_number is not None:
                hf = {f"model.layers.{layer_number}.{hf}": dims for hf, dims in rule.hf.items()}
                return replace(rule, hf=hf, expert=int(expert[0]) if expert else None)
            if name == "output_layer.weight" and arch.tied:  # a last pipeline stage keeps its own copy
                return replace(rule, hf=EDGES[0].hf)
            return rule
    raise KeyError(f"{name}: no rule for this parameter in the {arch.family} table of weights/mapping.py; add one.")
