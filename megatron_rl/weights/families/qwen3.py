"""Qwen3: Llama with query-key norms."""

from __future__ import annotations

from megatron_rl.weights.family import Family
from megatron_rl.weights.tensor_rules import ATTENTION, DENSE, NORMS, QK_NORM

FAMILY = Family(
    name="qwen3",
    classes=("Qwen3ForCausalLM",),
    attention=(*NORMS, *ATTENTION, *QK_NORM),
    dense=DENSE,
    read=lambda config: {"qk_norm": True},
)
