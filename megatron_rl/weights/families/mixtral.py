"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.decoder import Mixture
from megatron_rl.weights.family import Config, Family, windows_everywhere
from megatron_rl.weights.tensor_rules import ATTENTION, MIXTRAL_EXPERTS, NORMS


def read(config: Config) -> dict[str, Any]:
    mixture = Mixture(
        experts=config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn=config["intermediate_size"],
        layers=(True,) * config["num_hidden_layers"],
    )
    return {"windows": windows_everywhere(config), "mixture": mixture}


FAMILY = Family(
    name="mixtral",
    classes=("MixtralForCausalLM",),
    attention=(*NORMS, *ATTENTION),
    mixture=MIXTRAL_EXPERTS,
    read=read,
)
