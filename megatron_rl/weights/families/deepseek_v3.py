"""DeepSeek-V3, Kimi-K2 and Moonlight: latent attention, and expert groups chosen by biased sigmoid scores."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.decoder import Latent
from megatron_rl.weights.family import MTP_LAYER_BEHIND, SIGMOID_DEMANDS, Config, Family, check_groups, sigmoid_mixture
from megatron_rl.weights.tensor_rules import (
    DENSE,
    EXPERTS,
    NORMS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Columns,
    Replicated,
    Rows,
    Rule,
)

# Queries have a low-rank projection or a direct one. `sizes` defines only the words of one kind, which disables the
# rules of the other. Down projections are small and a norm over their whole width follows, so every tensor rank has a
# full copy. `with_mqa`: the tensor also projects the rotated part of the keys, which all heads share.
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


def read(config: Config) -> dict[str, Any]:
    latent = Latent(
        query_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        plain_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    return {"head_dim": config["qk_rope_head_dim"], "latent": latent, "mixture": sigmoid_mixture(config)}


FAMILY = Family(
    name="deepseek_v3",
    classes=("DeepseekV3ForCausalLM",),
    attention=(*NORMS, *LATENT_ATTENTION),
    dense=DENSE,
    mixture=(*EXPERTS, *SHARED_EXPERTS, *ROUTER_BIAS),
    mtp=MTP_LAYER_BEHIND,
    read=read,
    demands=SIGMOID_DEMANDS | {"rope_interleave": True},
    check=check_groups,
)
