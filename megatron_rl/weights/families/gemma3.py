"""Gemma 3: norms before and after each block, norm weights offset by 1, scaled embeddings, own RoPE for windows."""

from __future__ import annotations

from typing import Any

from megatron_rl.weights.family import Config, Family, windows_by_kind
from megatron_rl.weights.tensor_rules import ATTENTION, DENSE, QK_NORM, SANDWICH_NORMS


def read(config: Config) -> dict[str, Any]:
    layers, window = range(config["num_hidden_layers"]), config.get("sliding_window")
    if (windows := windows_by_kind(config)) is None:
        every = config["sliding_window_pattern"]
        windows = tuple(window if (layer + 1) % every else None for layer in layers)
    return {
        "tied": config.get("tie_word_embeddings", True),
        "windows": windows,
        "qk_norm": True,
        "window_rope_theta": _window_rope_theta(config),
        # Not head_dim: in Gemma 3 27B the two differ.
        "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
        "activation": "gelu_tanh",
        "embedding_scale": config["hidden_size"] ** 0.5,
        "norm_offset": 1.0,
        "has_norms_behind": True,
    }


def _window_rope_theta(config: Config) -> float:
    if "rope_local_base_freq" in config:  # before transformers 5
        return config["rope_local_base_freq"]
    return config["rope_parameters"]["sliding_attention"]["rope_theta"]


FAMILY = Family(
    name="gemma3",
    classes=("Gemma3ForCausalLM",),
    # Gemma3ForSequenceClassification is the image model's classifier; the text model's has another name.
    classifiers=("Gemma3TextForSequenceClassification",),
    attention=(*SANDWICH_NORMS, *ATTENTION, *QK_NORM),
    dense=DENSE,
    read=read,
    demands={
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
)
