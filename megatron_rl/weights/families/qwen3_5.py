"""Qwen3.5 and Qwen3.6, dense and MoE: Qwen3-Next, but HF files store the delta nets' four projections separately."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.families.qwen3_next import (
    DELTA_NET,
    GATED_ATTENTION,
    SHARED_EXPERT,
    check,
    mixed_parts,
    read_layers,
    read_mixture,
)
from megatron_rl.weights.family import MTP_LAYER_APART, Config, Family
from megatron_rl.weights.tensor_rules import DENSE, EXPERTS, NORMS, HeadGroups, Part, Rule


def _projections(arch: Architecture) -> tuple[int, list[Part]]:
    heads, mixed = mixed_parts(arch)
    per_key = arch.delta_net.value_heads // heads
    gates = per_key * arch.delta_net.value_dim
    return heads, [*mixed, Part(1, 0, gates, gates), Part(2, 0, per_key, per_key), Part(3, 0, per_key, per_key)]


PROJECTIONS = Rule(
    "self_attention.linear_in.weight",
    {
        "linear_attn.in_proj_qkv.weight": "delta_mixed hidden",
        "linear_attn.in_proj_z.weight": "delta_value hidden",
        "linear_attn.in_proj_b.weight": "delta_heads hidden",
        "linear_attn.in_proj_a.weight": "delta_heads hidden",
    },
    HeadGroups(_projections),
)


def read(config: Config) -> dict[str, Any]:
    fields = read_layers(config)
    if config.get("num_experts"):
        # There is no dense feed-forward, so config.json has no width for it.
        mixture = replace(read_mixture(config, (True,) * config["num_hidden_layers"]), renormalised=True)
        fields |= {"mixture": mixture, "ffn": mixture.ffn}
    return fields


FAMILY = Family(
    name="qwen3_5",
    classes=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    # Qwen3_5ForSequenceClassification is the image model's classifier.
    classifiers=("Qwen3_5TextForSequenceClassification", "Qwen3_5MoeTextForSequenceClassification"),
    attention=(*NORMS, *GATED_ATTENTION),
    delta_net=(*NORMS, PROJECTIONS, *DELTA_NET),
    dense=DENSE,
    mixture=(*EXPERTS, *SHARED_EXPERT),
    mtp=MTP_LAYER_APART,
    read=read,
    demands={"attn_output_gate": True},
    check=check,
)
