"""GLM-4.5 and later: DeepSeek-V3's mixture. config.json decides whether there are QKV biases and query-key norms."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.family import (
    MTP_LAYER_BEHIND,
    SIGMOID_DEMANDS,
    Config,
    Family,
    check_groups,
    rotary_share,
    sigmoid_mixture,
)
from megatron_rl.weights.tensor_rules import (
    ATTENTION,
    DENSE,
    EXPERTS,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
)


def read(config: Config) -> dict[str, Any]:
    return {
        "qkv_bias": config.get("attention_bias", False),
        "qk_norm": config.get("use_qk_norm", False),
        "rotary_share": rotary_share(config, 0.5),
        "mixture": sigmoid_mixture(config),
    }


FAMILY = Family(
    name="glm4_moe",
    classes=("Glm4MoeForCausalLM",),
    attention=(*NORMS, *ATTENTION, *QKV_BIAS, *QK_NORM),
    dense=DENSE,
    mixture=(*EXPERTS, *SHARED_EXPERTS, *ROUTER_BIAS),
    mtp=MTP_LAYER_BEHIND,
    read=read,
    demands=SIGMOID_DEMANDS | {"rope_interleave": False},
    may_say=frozenset({"attention_bias"}),
    check=check_groups,
)
