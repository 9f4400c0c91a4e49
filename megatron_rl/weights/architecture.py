"""What a Hugging Face `config.json` says about a model, checked and in one vocabulary for all families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture of experts: where it stands and how its router spreads a token."""

    experts: int
    per_token: int
    ffn: int
    """Width of one expert."""
    layers: tuple[bool, ...]
    """For each layer, whether it has the mixture (or one dense feed-forward)."""
    renormalised: bool
    """The chosen experts' weights sum to 1."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a decoder: counts of layers and heads, widths in elements, the vocabulary in tokens."""

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
    mixture: Mixture | None = None

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")

    def has_mixture(self, layer_number: int) -> bool:
        """Whether the layer (counted from 0 over the whole model) is a mixture of experts."""
        return self.mixture is not None and self.mixture.layers[layer_number]


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
            mixture=_mixture(config, family),
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


def _mixture(config: dict[str, Any], family: str) -> Mixture | None:
    layers = range(config["num_hidden_layers"])
    if family == "mixtral":
        return Mixture(
            experts=config["num_local_experts"],
            per_token=config["num_experts_per_tok"],
            ffn=config["intermediate_size"],
            layers=tuple(True for _ in layers),
            renormalised=True,
        )
    if family == "qwen3_moe":
        dense, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
        return Mixture(
            # transformers 5 writes the second name.
            experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
            per_token=config["num_experts_per_tok"],
            ffn=config["moe_intermediate_size"],
            layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in layers),
            renormalised=config.get("norm_topk_prob", False),
        )
    return None


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
    window = config.get("sliding_window")
    if arch.family in ("mistral", "mixtral") and window is not None and window < arch.max_positions:
        raise ValueError(
            f"{path}: sliding_window = {window}: attention within a window is not supported, and "
            f"max_position_embeddings = {arch.max_positions} reaches beyond it; lower that to {window}."
        )
    if arch.heads % arch.kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads = {arch.heads}: must be a multiple of num_key_value_heads = {arch.kv_heads}; "
            f"correct config.json."
        )
