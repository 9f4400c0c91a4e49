"""MiniMax-M2: Mixtral's tensor names, biased sigmoid routing, and query-key norms over all heads together."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.decoder import Mixture
from megatron_rl.weights.family import Config, Family, rotary_share
from megatron_rl.weights.tensor_rules import (
    ATTENTION,
    EXPERT_BIAS,
    MIXTRAL_EXPERTS,
    NORMS,
    WIDE_QK_NORM,
    Replicated,
    Rule,
)

BIAS = (Rule(EXPERT_BIAS, {"block_sparse_moe.e_score_correction_bias": "experts"}, Replicated()),)


def read(config: Config) -> dict[str, Any]:
    mixture = Mixture(
        experts=config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn=config["intermediate_size"],
        layers=(True,) * config["num_hidden_layers"],
        is_biased=True,
    )
    return {"mixture": mixture, "wide_qk_norm": True, "rotary_share": rotary_share(config, 1.0)}


FAMILY = Family(
    name="minimax_m2",
    classes=("MiniMaxM2ForCausalLM",),
    attention=(*NORMS, *ATTENTION, *WIDE_QK_NORM),
    mixture=(*MIXTRAL_EXPERTS, *BIAS),
    read=read,
    demands={"scoring_func": "sigmoid", "shared_intermediate_size": 0, "qk_norm_type": "per_layer"},
)
