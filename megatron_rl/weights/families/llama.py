"""Llama, and models with exactly its architecture."""

from __future__ import annotations

from megatron_rl.weights.family import Family
from megatron_rl.weights.tensor_rules import ATTENTION, DENSE, NORMS

FAMILY = Family(name="llama", classes=("LlamaForCausalLM",), attention=(*NORMS, *ATTENTION), dense=DENSE)
