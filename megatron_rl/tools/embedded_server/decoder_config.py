"""Reads the parts of a Hugging Face `config.json` that the embedded server's forward pass needs.

Supports Llama-like models and Qwen3's mixture-of-experts models; the trainer's Architecture supports more. Other models
raise ValueError.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.weights.json_files import read_object

_ALIKE = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
    **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": None},
}
_QWEN = _ALIKE | {"intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768}
_MIXTURE = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
    **{"decoder_sparse_step": 1},
}
_LLAMA = {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048, "num_key_value_heads": None}
_MISTRAL = {"intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072, "sliding_window": 4096}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _ALIKE | _LLAMA | {"eos_token_id": 2},
    "mistral": _ALIKE | _MISTRAL | {"num_key_value_heads": 8, "eos_token_id": 2},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN | _MIXTURE,
}
"""{model_type: {key: transformers' default if config.json lacks the key}}.

The defaults are copied here because importing transformers takes seconds.
"""
KINDS = tuple(DEFAULTS)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Sizes of the mixture-of-experts layers."""

    count: int
    per_token: int
    size: int
    """Intermediate size of one expert."""
    renormalised: bool
    """True if the router weights of a token's chosen experts are rescaled to sum to 1."""
    layers: frozenset[int]
    """Indices of the mixture-of-experts layers, counted from 0."""

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Experts":
        dense, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step", 1)
        return cls(
            count=raw["num_experts"],
            per_token=raw["num_experts_per_tok"],
            size=raw["moe_intermediate_size"],
            renormalised=raw.get("norm_topk_prob", False),
            layers=frozenset(i for i in range(raw["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0),
        )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a model: `DecoderConfig.read(Path("models/qwen3")).num_layers`."""

    model_type: str
    architectures: list[str]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope: dict[str, Any]
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: frozenset[int]
    experts: Experts | None = None

    @classmethod
    def read(cls, folder: Path) -> "DecoderConfig":
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {folder}: no config.json there; give a folder in Hugging Face format")
        said = read_object(folder / "config.json", "copy the model folder again")
        kind = said.get("model_type")
        if kind not in KINDS:
            raise ValueError(
                f"config.json: model_type = {kind!r}: the embedded server runs {', '.join(KINDS)}; serve this model "
                f"with SGLang"
            )
        raw = DEFAULTS[kind] | said
        if "num_local_experts" in said:  # transformers 5's name for it
            raw["num_experts"] = said.get("num_experts", said["num_local_experts"])
        window = raw.get("sliding_window") if kind == "mistral" else None
        if window is not None and window < raw["max_position_embeddings"]:
            raise ValueError(
                f"config.json: sliding_window = {window}: the embedded server attends to all tokens; serve this model "
                f"with SGLang, or lower max_position_embeddings to the window"
            )
        if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
            raise ValueError("config.json: sliding-window attention is not supported; set use_sliding_window to false")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config.json: hidden_act = {raw['hidden_act']!r}; only 'silu' is supported")
        # transformers 5 writes rope_parameters; transformers 4 wrote rope_theta and rope_scaling.
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        rope.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
        heads = raw["num_attention_heads"]
        # Some features are in a family's code, not in its config: qwen2's biases (qkv_bias), qwen3's norms (qk_norm).
        attention_bias = bool(raw.get("attention_bias", False))
        eos = _ids(raw["eos_token_id"])
        # Chat models list the end-of-turn tokens here. As in SGLang, the tokens of both files end a reply.
        if (folder / "generation_config.json").is_file():
            eos |= _ids(read_object(folder / "generation_config.json").get("eos_token_id"))
        return cls(
            model_type=kind,
            architectures=raw.get("architectures") or [],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab_size=raw["vocab_size"],
            max_positions=raw["max_position_embeddings"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope=rope,
            tied=bool(raw["tie_word_embeddings"]),
            qkv_bias=kind == "qwen2" or attention_bias,
            o_bias=kind != "qwen2" and attention_bias,
            mlp_bias=kind == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            eos_token_ids=eos,
            experts=Experts.read(raw) if kind == "qwen3_moe" else None,
        )


def _ids(said: int | list[int] | None) -> frozenset[int]:
    return frozenset([said] if isinstance(said, int) else said or ())


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Return the rotary frequencies `[head_dim / 2]` float32. Rope scaling may be `default`, `linear` or `llama3`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"config.json: partial_rotary_factor = {rope['partial_rotary_factor']} is not supported (only 1)"
        )
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope["rope_theta"] ** steps)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        periods = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        # Below `low` periods in the original context: 0 (scaled by factor). Above `high`: 1 (kept). Between: linear.
        keep = ((periods - low) / (high - low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / rope["factor"])
    raise ValueError(f"config.json: rope_type = {kind!r}; the embedded server knows default, linear and llama3")
