"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.decoder import Mixture
from megatron_rl.weights.family import Config, Family, windows_everywhere
from megatron_rl.weights.tensor_rules import ATTENTION, DENSE, EXPERTS, NORMS, QK_NORM


def read(config: Config) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    dense, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    mixture = Mixture(
        # transformers 5 writes the second name.
        experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        # decoder_sparse_step counts layers from 1, mlp_only_layers from 0.
        layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in layers),
        renormalised=config.get("norm_topk_prob", False),
    )
    fields = {"qk_norm": True, "mixture": mixture}
    if config.get("use_sliding_window", False):  # Qwen3MoeModel applies it to all layers, despite max_window_layers
        fields["windows"] = windows_everywhere(config)
    return fields


FAMILY = Family(
    name="qwen3_moe",
    classes=("Qwen3MoeForCausalLM",),
    attention=(*NORMS, *ATTENTION, *QK_NORM),
    dense=DENSE,
    mixture=EXPERTS,
    read=read,
)
