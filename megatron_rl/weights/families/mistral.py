"""Mistral: Llama with the same attention window in all layers."""

from __future__ import annotations

from megatron_rl.weights.family import Family, windows_everywhere
from megatron_rl.weights.tensor_rules import ATTENTION, DENSE, NORMS

FAMILY = Family(
    name="mistral",
    classes=("MistralForCausalLM",),
    attention=(*NORMS, *ATTENTION),
    dense=DENSE,
    read=lambda config: {"windows": windows_everywhere(config)},
)
