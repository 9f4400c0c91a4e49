"""Seed-OSS: Qwen2, except that config.json decides whether there are biases."""

from __future__ import annotations

from megatron_rl.weights.family import Family
from megatron_rl.weights.tensor_rules import ATTENTION, DENSE, NORMS, QKV_BIAS

FAMILY = Family(
    name="seed_oss",
    classes=("SeedOssForCausalLM",),
    attention=(*NORMS, *ATTENTION, *QKV_BIAS),
    dense=DENSE,
    read=lambda config: {"qkv_bias": config.get("attention_bias", True)},
    demands={"attention_out_bias": False},
    may_say=frozenset({"attention_bias"}),
)
