"""DeepSeek-V3, Kimi-K2 and Moonlight: latent attention, groups of experts chosen by biased sigmoids."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.decoder import Latent
from megatron_rl.weights.family import SIGMOID_DEMANDS, Config, Family, check_groups, sigmoid_mixture
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
    read=read,
    demands=SIGMOID_DEMANDS | {"rope_interleave": True},
    check=check_groups,
)
