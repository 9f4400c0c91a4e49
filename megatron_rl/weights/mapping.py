"""List a model's HF tensors, find the rule for each Megatron parameter, and open a folder's weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.family import MTPNames
from megatron_rl.weights.hf_files import HFFolder, RandomWeights, ValueHeadFromZero, packed_shapes
from megatron_rl.weights.tensor_rules import Replicated, Rule, Shape, VocabRows, WeightSource

EDGES = (
    Rule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vocab hidden"}, VocabRows()),
    Rule("decoder.final_layernorm.weight", {"model.norm.weight": "hidden"}, Replicated()),
    Rule("output_layer.weight", {"lm_head.weight": "vocab hidden"}, VocabRows()),
)
VALUE_HEAD = "score.weight"
# The value head has a single row, so every tensor-parallel rank holds all of it.
VALUE_EDGES = (*EDGES[:2], Rule("output_layer.weight", {VALUE_HEAD: "label hidden"}, Replicated()))
# Transformer Engine fuses a norm into the following matrix and keeps all experts of a rank in one module.
TRANSFORMER_ENGINE = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight"), "pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)"), r"mlp.experts.local_experts.\2.\1.weight"),
)
ROWS_COMPARED, NAMED_KINDS = 8192, 6
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def sizes(arch: Architecture) -> dict[str, int]:
    """Return {word: size} for the words that stand for dimensions in rules. Words of absent features are left out."""
    words = {
        "vocab": arch.vocab,
        "label": 1,
        "heads": arch.heads,
        "hidden": arch.hidden,
        "ffn": arch.ffn,
        "query": arch.heads * arch.head_dim,
        "key": arch.kv_heads * arch.head_dim,
        "query_key_value": (arch.heads + 2 * arch.kv_heads) * arch.head_dim,
        "two_hidden": 2 * arch.hidden,
        "gate_up": 2 * arch.ffn,
    }
    if arch.gated_attention:
        words["query_gate"] = 2 * words["query"]
    if arch.qkv_bias:
        words |= {"query_bias": words["query"], "key_bias": words["key"]}
    if arch.qk_norm:
        words["head_norm"] = arch.head_dim
    if arch.mixture is not None:
        words |= {"experts": arch.mixture.experts, "expert": arch.mixture.ffn, "expert_gate_up": 2 * arch.mixture.ffn}
        if arch.mixture.shared_ffn is not None:
            words["shared"] = arch.mixture.shared_ffn
        if arch.mixture.shared_gate:
            words["one"] = 1
    if (delta := arch.delta_net) is not None:
        key, value = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
        words |= {
            "delta_mixed": 2 * key + value,
            "delta_mixed_gate": 2 * (key + value),
            "delta_value": value,
            "delta_heads": delta.value_heads,
            "delta_two_heads": 2 * delta.value_heads,
            "delta_width": delta.value_dim,
            "channel": 1,
            "kernel": delta.kernel,
        }
    if arch.latent is not None:
        latent = arch.latent
        words |= {
            "kv_rank": latent.kv_rank,
            "kv_rank_and_head": latent.kv_rank + arch.head_dim,
            "latent_query": arch.heads * (latent.plain_dim + arch.head_dim),
            "latent_kv": arch.heads * (latent.plain_dim + latent.value_dim),
            "latent_value": arch.heads * latent.value_dim,
            # Defines only one of the two words, so that only the rules of one kind of queries apply.
            "query_rank" if latent.query_rank else "no_query_rank": latent.query_rank or arch.hidden,
        }
    return words


def hf_shapes(arch: Architecture) -> dict[str, Shape]:
    """Return {name: shape} of all HF tensors of the model, in the order of its layers."""
    words = sizes(arch)

    def shapes_of(rule: Rule, prefix: str = "") -> dict[str, Shape]:
        shapes = {prefix + name: tuple(words[word] for word in dims.split()) for name, dims in rule.hf.items()}
        if "{}" not in rule.megatron:
            return shapes
        return {name.format(n): shape for n in range(arch.mixture.experts) for name, shape in shapes.items()}

    first, *last = edges(arch)
    shapes = shapes_of(first)
    for number in range(arch.layers):
        for rule in layer_rules(arch, number):
            shapes |= shapes_of(rule, layer_prefix(arch, number))
    for rule in last:
        if not (arch.tied and rule is EDGES[-1]):  # a tied output layer is the embedding
            shapes |= shapes_of(rule)
    return shapes


def edges(arch: Architecture) -> tuple[Rule, ...]:
    """Return the rules for the tensors outside of the layers: embedding, final norm and head.

    If `arch` is that of a multi-token-prediction layer, they are the rules for its projection and norms instead.
    """
    if arch.behind is not None:
        names = mtp_names(arch)
        return (
            Rule("input_proj.weight", {names.input_proj: "hidden two_hidden"}, Replicated()),
            Rule("token_norm.weight", {names.token_norm: "hidden"}, Replicated()),
            Rule("hidden_norm.weight", {names.hidden_norm: "hidden"}, Replicated()),
            Rule("decoder.final_layernorm.weight", {names.final_norm: "hidden"}, Replicated()),
        )
    return VALUE_EDGES if arch.head == "value" else EDGES


def mtp_names(arch: Architecture) -> MTPNames:
    """Return the HF names of a multi-token-prediction layer's tensors. arch: result of `Architecture.mtp_layer`."""
    names = FAMILIES[arch.family].mtp
    assert names is not None and arch.behind is not None
    return names.of(arch.behind)


def layer_prefix(arch: Architecture, layer_number: int) -> str:
    """Return the prefix of the names of a layer's HF tensors. layer_number: global, from 0."""
    return f"model.layers.{layer_number}." if arch.behind is None else mtp_names(arch).layer


def layer_rules(arch: Architecture, layer_number: int) -> list[Rule]:
    """Return the rules for the parameters of one layer. layer_number: global, from 0."""
    family, words = FAMILIES[arch.family], sizes(arch).keys()
    attention = family.delta_net if arch.has_delta_net(layer_number) else family.attention
    rules = attention + (family.mixture if arch.has_mixture(layer_number) else family.dense)
    return [rule for rule in rules if all(words >= set(dims.split()) for dims in rule.hf.values())]


def weight_source(folder: str | Path, arch: Architecture, *, random_seed: int | None = None) -> WeightSource:
    """Open a folder's weights for a model of architecture `arch`, or return random weights if `random_seed` is given.

    If the folder has no value head but `arch` has one, the value head starts at zero. Raises ValueError if the folder
    lacks any other tensor of the model.
    """
    found, shapes = read_architecture(folder), hf_shapes(arch)
    starts_at_zero = found.head != found.with_head(arch.head).head  # a critic that starts from a policy's folder
    head = shapes.pop(VALUE_HEAD) if starts_at_zero else None
    source: WeightSource
    if random_seed is None:
        source = HFFolder(folder, shapes)
        if arch.head == "policy":
            _refuse_another_head(source, found)
    else:
        source = RandomWeights(shapes, random_seed, norm=1.0 - arch.norm_offset)  # a norm that adds 1 starts at 0
    return source if head is None else ValueHeadFromZero(source, VALUE_HEAD, head)


def _refuse_another_head(source: HFFolder, arch: Architecture) -> None:
    """Raise ValueError if the head is tied to the embedding, but the folder also has a separate, different head.

    transformers would compute with the separate head, and SGLang with the embedding.
    """
    embedding, head = (next(iter(rule.hf)) for rule in (EDGES[0], EDGES[2]))
    if not arch.tied or head not in source.file_of:
        return
    is_same = source.shape(head) == source.shape(embedding) and all(
        torch.equal(*(source.read(name, 0, start, start + ROWS_COMPARED) for name in (head, embedding)))
        for start in range(0, arch.vocab, ROWS_COMPARED)
    )
    if not is_same:
        raise ValueError(
            f"{source.folder}: {head} is not {embedding}, and tie_word_embeddings = true in config.json makes them "
            f"one; set it to false there to train both, or remove {head}."
        )


def tensors_without_rule(folder: str | Path) -> list[str]:
    """Return the names of a folder's tensors that no rule uses, such as those of multi-token-prediction layers."""
    arch = read_architecture(folder)
    known = {*hf_shapes(arch), *(name for rule in (*EDGES, *VALUE_EDGES) for name in rule.hf)}
    packed = {part for name in known for part in packed_shapes(name, ())}
    return sorted(HFFolder(folder, {}).file_of.keys() - known - packed)


def carried_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the folder's tensors that no rule uses, unchanged.

    Raises OSError if they cannot be read.
    """
    try:
        yield from whole_tensors(folder, tensors_without_rule(folder))
    except ValueError as error:
        raise OSError(f"{folder}: {error}") from error


def whole_tensors(folder: str | Path, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for tensors of a folder, unchanged. names: None for all tensors."""
    source = HFFolder(folder, {})
    yield from ((name, source.whole(name)) for name in (source.file_of if names is None else names))


def without_rule_text(folder: str | Path) -> str:
    """Return a log line that lists the folder's tensors that no rule uses, or '' if there are none."""
    if not (kinds := kinds_without_rule(folder)):
        return ""
    return (
        f"{folder}: {len(tensors_without_rule(folder))} tensors are not trained, as no parameter is made of them: "
        f"{kinds}. They go along unchanged in what is saved."
    )


def kinds_without_rule(folder: str | Path) -> str:
    """Return the kinds of the folder's tensors that no rule uses, separated by commas. At most NAMED_KINDS are named.

    A kind is a tensor's name with * in place of numbers.
    """
    names = tensors_without_rule(folder) if any(Path(folder).glob("*.safetensors")) else []
    kinds = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names})
    more = f" and {len(kinds) - NAMED_KINDS} more kinds" if len(kinds) > NAMED_KINDS else ""
    return ", ".join(kinds[:NAMED_KINDS]) + more


def rule_for(name: str, layer_number: int | None, arch: Architecture) -> Rule:
    """Return the rule for a Megatron parameter, with full HF names. Raises KeyError if there is none.

    layer_number: global number, from 0, of the parameter's layer; None if it is in no layer.
    name: the parameter's name within that layer, or within the model if it is in no layer. It may be a name from
    Megatron's local layers, which the rules use, or from Transformer Engine's layers.
    """
    for pattern, local in TRANSFORMER_ENGINE:
        if match := pattern.fullmatch(name):
            name = match.expand(local)
    expert = _EXPERT.search(name)
    general = _EXPERT.sub("{}", name)
    for rule in edges(arch) if layer_number is None else layer_rules(arch, layer_number):
        if rule.megatron == general:
            if layer_number is not None:
                hf = {layer_prefix(arch, layer_number) + hf: dims for hf, dims in rule.hf.items()}
                return replace(rule, hf=hf, expert=int(expert[0]) if expert else None)
            if name == "output_layer.weight" and arch.tied:  # the last pipeline stage has its own copy
                return replace(rule, hf=EDGES[0].hf)
            return rule
    raise KeyError(f"{name}: no rule for this parameter in weights/families/{arch.family}.py; add one.")
