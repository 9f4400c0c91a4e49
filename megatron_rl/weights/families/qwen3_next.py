"""Qwen3-Next: three delta-net layers per gated-attention layer, norm weights offset by 1, gated shared expert."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.decoder import Architecture, DeltaNet, Mixture
from megatron_rl.weights.family import MTP_LAYER_APART, Config, Family, rotary_share
from megatron_rl.weights.tensor_rules import (
    ATTENTION,
    DENSE,
    EXPERTS,
    NORMS,
    QK_NORM,
    Columns,
    HeadGroups,
    Part,
    Replicated,
    Rows,
    Rule,
    feed_forward,
)


def query_gate_key_value(arch: Architecture) -> tuple[int, list[Part]]:
    """Return the number of KV groups, and the parts of each group, for gated attention. For use as `HeadGroups.parts`.

    HF stores each query head followed by its gate. Megatron stores a group's queries, then its gates, key and value.
    """
    width, heads = arch.head_dim, arch.heads // arch.kv_heads
    queries = [Part(0, 2 * head * width, 2 * heads * width, width) for head in range(heads)]
    gates = [Part(0, (2 * head + 1) * width, 2 * heads * width, width) for head in range(heads)]
    return arch.kv_heads, [*queries, *gates, Part(1, 0, width, width), Part(2, 0, width, width)]


def mixed_parts(arch: Architecture) -> tuple[int, list[Part]]:
    """Return the number of key heads, and the parts of each head in one HF tensor [all queries; all keys; all values].

    For use as `HeadGroups.parts`.
    """
    delta = arch.delta_net
    values = delta.value_heads // delta.key_heads * delta.value_dim
    keys = delta.key_heads * delta.key_dim
    of_key = [Part(0, start, delta.key_dim, delta.key_dim) for start in (0, keys)]
    return delta.key_heads, [*of_key, Part(0, 2 * keys, values, values)]


def _projections(arch: Architecture) -> tuple[int, list[Part]]:
    """Return the number of key heads, and the parts of each head in the two HF tensors of a delta net's projections.

    HF already orders the rows of these tensors by key head. For use as `HeadGroups.parts`.
    """
    delta = arch.delta_net
    values = delta.value_heads // delta.key_heads
    wide, narrow = 2 * delta.key_dim + 2 * values * delta.value_dim, 2 * values
    return delta.key_heads, [Part(0, 0, wide, wide), Part(1, 0, narrow, narrow)]


GATED_ATTENTION = (
    Rule(
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": "query_gate hidden",
            "self_attn.k_proj.weight": "key hidden",
            "self_attn.v_proj.weight": "key hidden",
        },
        HeadGroups(query_gate_key_value),
    ),
    ATTENTION[1],
    *QK_NORM,
)
DELTA_NET = (  # without its input projections
    Rule(
        "self_attention.conv_weight",
        {"linear_attn.conv1d.weight": "delta_mixed channel kernel"},
        HeadGroups(mixed_parts),
    ),
    Rule("self_attention.decay_rate", {"linear_attn.A_log": "delta_heads"}, Rows()),
    Rule("self_attention.decay_bias", {"linear_attn.dt_bias": "delta_heads"}, Rows()),
    Rule("self_attention.norm_weight", {"linear_attn.norm.weight": "delta_width"}, Replicated()),
    Rule("self_attention.linear_out.weight", {"linear_attn.out_proj.weight": "hidden delta_value"}, Columns()),
)
PROJECTIONS = Rule(
    "self_attention.linear_in.weight",
    {
        "linear_attn.in_proj_qkvz.weight": "delta_mixed_gate hidden",
        "linear_attn.in_proj_ba.weight": "delta_two_heads hidden",
    },
    HeadGroups(_projections),
)
SHARED_EXPERT = (
    *feed_forward("mlp.shared_experts", "mlp.shared_expert", "shared"),
    Rule("mlp.shared_experts.gate_weight", {"mlp.shared_expert_gate.weight": "one hidden"}, Replicated()),
)


def read_layers(config: Config) -> dict[str, Any]:
    """Return the Architecture fields that Qwen3-Next and Qwen3.5 share: norms, gated attention and delta nets."""
    layers, every = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
    ]
    delta_net = DeltaNet(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
        layers=tuple(kind == "linear_attention" for kind in kinds),
    )
    return {
        "windows": (None,) * layers,
        "delta_net": delta_net,
        "gated_attention": True,
        "qk_norm": True,
        "norm_offset": 1.0,
        "rotary_share": rotary_share(config, 0.25),
    }


def read_mixture(config: Config, layers: tuple[bool, ...]) -> Mixture:
    return Mixture(
        experts=config["num_experts"],
        per_token=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        layers=layers,
        renormalised=config.get("norm_topk_prob", True),
        shared_ffn=config["shared_expert_intermediate_size"],
        shared_gate=True,
    )


def check(config: Config, arch: Architecture) -> str | None:
    kinds = set(config.get("layer_types") or ())
    if kinds <= {"linear_attention", "full_attention"}:
        return None
    return f"layer_types has {sorted(kinds)}: supported are linear_attention and full_attention; pick another model."


def read(config: Config) -> dict[str, Any]:
    dense, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    layers = range(config["num_hidden_layers"])
    has_mixture = tuple(layer not in dense and (layer + 1) % every == 0 for layer in layers)
    return read_layers(config) | {"mixture": read_mixture(config, has_mixture)}


FAMILY = Family(
    name="qwen3_next",
    classes=("Qwen3NextForCausalLM",),
    attention=(*NORMS, *GATED_ATTENTION),
    delta_net=(*NORMS, PROJECTIONS, *DELTA_NET),
    dense=DENSE,
    mixture=(*EXPERTS, *SHARED_EXPERT),
    mtp=MTP_LAYER_APART,
    read=read,
    check=check,
)
