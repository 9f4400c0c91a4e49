"""Qwen2: Llama with biases on the query, key and value projections."""

from __future__ import annotations

from megatron_rl.weights.family import Family
from megatron_rl.weights.tensor_rules import ATTENTION, DENSE, NORMS, QKV_BIAS

FAMILY = Family(
    name="qwen2",
    classes=("Qwen2ForCausalLM",),
    attention=(*NORMS, *ATTENTION, *QKV_BIAS),
    dense=DENSE,
    read=lambda config: {"qkv_bias": True},
)
