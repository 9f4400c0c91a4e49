"""What a Hugging Face `config.json` says about a model, checked and in one vocabulary for all families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a dense decoder: counts of layers and heads, widths in elements, the vocabulary in tokens."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_positions: int

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"


def read_architecture(folder: str | Path) -> Architecture:
    """Read and check `folder/config.json`. ValueError names the key, the value, the rule and the way out."""
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model.path = {str(folder)!r}: no config.json there; give a Hugging Face model folder (config.json, "
            f"safetensors, "
            f"tokenizer), or make one with megatron-rl convert."
        )
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); copy the model folder again.") from error
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ValueError(
            f"{path}: architectures = {names}: supported are {', '.join(FAMILIES)}; convert or pick one of these."
        )
    family = FAMILIES[names[0]]
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        arch = Architecture(
            family=family,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            ffn=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=_rope(config).get("rope_theta", config.get("rope_theta", 10_000.0)),
            rope_scaling=_scaling(config, path),
            max_positions=config.get("max_position_embeddings", 4096),
        )
    except KeyError as error:
        raise ValueError(f"{path}: key {error} is missing; copy config.json of the original model again.") from error
    _refuse_unsupported(config, arch, path)
    return arch


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_scaling` beside `rope_theta`."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


ROPE_SCALINGS = ("linear", "llama3", "yarn")


def _scaling(config: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the scaling as transformers 5 writes it, or None. Scalings that depend on the batch are refused."""
    rope = dict(_rope(config))
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    if kind == "default":
        return None
    if kind not in ROPE_SCALINGS:
        raise ValueError(
            f"{path}: rope type {kind!r}: supported are default, {', '.join(ROPE_SCALINGS)}; pick a model with one of "
            f"these."
        )
    return rope


def _refuse_unsupported(config: dict[str, Any], arch: Architecture, path: Path) -> None:
    demands = {
        "hidden_act": ("silu", "silu"),
        "use_sliding_window": (False, False),
        "mlp_bias": (False, False),
        "attention_bias": (False, False),
    }
    for key, (default, supported) in demands.items():
        value = config.get(key, default)
        if value != supported:
            raise ValueError(
                f"{path}: {key} = {value!r}: only {supported!r} is supported for {arch.family}; pick another model."
            )
    if arch.heads % arch.kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads = {arch.heads}: must be a multiple of num_key_value_heads = {arch.kv_heads}; "
            f"correct config.json."
        )
