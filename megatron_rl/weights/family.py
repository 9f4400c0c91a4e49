"""A family of models: what its config.json says and which HF tensors its layers have. Each is one file in families/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.weights.decoder import Architecture, Mixture
from megatron_rl.weights.tensor_rules import Rule

Config = dict[str, Any]
"""A config.json."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one shape, beside what all Llama-like decoders have in common.

    For example:

        FAMILY = Family(name="llama", classes=("LlamaForCausalLM",), attention=(*NORMS, *ATTENTION), dense=DENSE)
    """

    name: str
    classes: tuple[str, ...]
    """Their language models in `architectures` of config.json."""
    attention: tuple[Rule, ...]
    """The rules of a layer's norms and attention."""
    dense: tuple[Rule, ...] = ()
    """The rules of a dense feed-forward."""
    delta_net: tuple[Rule, ...] = ()
    """The rules of norms and of the gated delta net, in layers that have one in place of attention."""
    mixture: tuple[Rule, ...] = ()
    """The rules of a mixture of experts."""
    classifiers: tuple[str, ...] = ()
    """The same models with one number per token, where they are not called ForSequenceClassification."""
    read: Callable[[Config], dict[str, Any]] = lambda config: {}
    """Returns the fields of Architecture that config.json or the family decides otherwise than Llama."""
    demands: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json with the one value that is supported, which is transformers' default, too."""
    may_say: frozenset[str] = frozenset()
    """Keys of `DEMANDS` whose value the family reads."""
    check: Callable[[Config, Architecture], str | None] = lambda config, arch: None
    """Returns what else is refused and why, or None."""


DEMANDS: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False}
"""What every family's config.json may say alone, unless the family reads the key."""


def rope_of(config: Config) -> dict[str, Any]:
    """Return what config.json says of the rotation of layers without a window.

    transformers 5 writes `rope_parameters`, earlier versions `rope_scaling` beside `rope_theta`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("full_attention", rope)  # Gemma's has one entry for each kind of layer


def rotary_share(config: Config, default: float) -> float:
    """Return the share of each head that is rotated; transformers' default of the family where nothing is said."""
    if "rotary_dim" in config:  # MiniMax's own way to say it
        default = config["rotary_dim"] / config["head_dim"]
    return rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor", default))


def windows_everywhere(config: Config) -> tuple[int | None, ...]:
    """Return each layer's window, the same for all where config.json tells no kinds of layers apart."""
    return windows_by_kind(config) or (config.get("sliding_window"),) * config["num_hidden_layers"]


def windows_by_kind(config: Config) -> tuple[int | None, ...] | None:
    """Return each layer's window by `layer_types`, None where there are none."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    return kinds and tuple(window if kind == "sliding_attention" else None for kind in kinds)


def sigmoid_mixture(config: Config) -> Mixture:
    """Return a mixture as DeepSeek-V3 has it: shared experts, groups, and a bias on sigmoids."""
    is_grouped, shared = config.get("n_group", 1) > 1, config.get("n_shared_experts") or 0
    return Mixture(
        experts=config["n_routed_experts"],
        per_token=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        layers=tuple(layer >= config["first_k_dense_replace"] for layer in range(config["num_hidden_layers"])),
        # All shared experts are one feed-forward in the model's files, as wide as they are together.
        shared_ffn=shared * config["moe_intermediate_size"] or None,
        groups=config["n_group"] if is_grouped else None,
        groups_per_token=config["topk_group"] if is_grouped else None,
        scale=config.get("routed_scaling_factor", 1.0),
        is_biased=True,
    )


SIGMOID_DEMANDS: dict[str, Any] = {
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


def check_groups(config: Config, arch: Architecture) -> str | None:
    # The model ranks groups by their two best experts, group_limited_topk in megatron.core 0.20 by their best
    # `per_token // groups_per_token`.
    mixture = arch.mixture
    if mixture is None or mixture.groups is None or mixture.per_token == 2 * mixture.groups_per_token:
        return None
    return (
        f"num_experts_per_tok = {mixture.per_token}: megatron.core ranks groups of experts as the model does only with "
        f"twice topk_group = {mixture.groups_per_token}; pick another model."
    )
