"""GPT-OSS: attention sinks, a window in every other layer, biases, and one stacked tensor for a layer's experts."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.decoder import Mixture
from megatron_rl.weights.family import Config, Family
from megatron_rl.weights.tensor_rules import (
    ATTENTION,
    NORMS,
    QKV_BIAS,
    InterleavedGateUp,
    Replicated,
    Rows,
    Rule,
    TransposedColumns,
)

SINKS = (
    Rule("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": "hidden"}, Replicated()),
    Rule("self_attention.core_attention.sinks", {"self_attn.sinks": "heads"}, Rows()),
)
_EXPERT = "mlp.experts.local_experts.{}."
EXPERTS = (
    Rule("mlp.router.weight", {"mlp.router.weight": "experts hidden"}, Replicated()),
    Rule("mlp.router.bias", {"mlp.router.bias": "experts"}, Replicated()),
    Rule(
        _EXPERT + "linear_fc1.weight",
        {"mlp.experts.gate_up_proj": "experts hidden expert_gate_up"},
        InterleavedGateUp(),
    ),
    Rule(_EXPERT + "linear_fc1.bias", {"mlp.experts.gate_up_proj_bias": "experts expert_gate_up"}, InterleavedGateUp()),
    Rule(_EXPERT + "linear_fc2.weight", {"mlp.experts.down_proj": "experts expert hidden"}, TransposedColumns()),
    Rule(_EXPERT + "linear_fc2.bias", {"mlp.experts.down_proj_bias": "experts hidden"}, Replicated()),
)


def read(config: Config) -> dict[str, Any]:
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    kinds = config.get("layer_types") or [("sliding_attention", "full_attention")[n % 2] for n in range(layers)]
    return {
        "windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "qkv_bias": True,
        "has_biases": True,
        "has_sinks": True,
        "activation": "clamped_swiglu",
        "mixture": Mixture(
            experts=config["num_local_experts"],
            per_token=config["num_experts_per_tok"],
            ffn=config["intermediate_size"],
            layers=(True,) * layers,
        ),
    }


FAMILY = Family(
    name="gpt_oss",
    classes=("GptOssForCausalLM",),
    attention=(*NORMS, *ATTENTION, *QKV_BIAS, *SINKS),
    mixture=EXPERTS,
    read=read,
    demands={"attention_bias": True, "swiglu_limit": 7.0},
)
