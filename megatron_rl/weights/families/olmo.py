"""OLMo 2 and 3: norms only after attention and feed-forward, and query-key norms over all heads together."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.family import Config, Family, windows_by_kind
from megatron_rl.weights.tensor_rules import ATTENTION, DENSE, SANDWICH_NORMS, WIDE_QK_NORM


def read(config: Config) -> dict[str, Any]:
    return {
        "windows": windows_by_kind(config) or (None,) * config["num_hidden_layers"],  # OLMo 2 has no windows
        "wide_qk_norm": True,
        "has_norms_before": False,
        "has_norms_behind": True,
    }


def check(config: Config, arch: Architecture) -> str | None:
    rope = config.get("rope_parameters") or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)} - {None, "default"}
    if not kinds or not any(arch.windows):
        return None
    return (
        f"rope type {min(kinds)!r}: not supported beside layers with a window, which versions of "
        f"transformers scale or do not; pick a model with the default."
    )


FAMILY = Family(
    name="olmo",
    classes=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    attention=(SANDWICH_NORMS[1], SANDWICH_NORMS[3], *ATTENTION, *WIDE_QK_NORM),
    dense=DENSE,
    read=read,
    check=check,
)
