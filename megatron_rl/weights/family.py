"""Define `Family`: how a model family's config.json is read, and which HF tensors its layers have.

Each family is one file in families/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.weights.decoder import Architecture, Mixture
from megatron_rl.weights.tensor_rules import Rule

Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MTPNames:
    """Names, in a family's HF files, of the tensors of the multi-token-prediction layer.

    The layer computes `final_norm(layer(input_proj @ [token_norm(embedding); hidden_norm(state)]))`. `embedding` is
    that of the next token, and `state` is the model's last hidden state. In the names, `{}` stands for the number of
    layers of the model itself.
    """

    layer: str
    """Prefix of the tensors of `layer`. After the prefix, the names are the same as in the model's own layers."""
    token_norm: str
    hidden_norm: str
    input_proj: str
    final_norm: str
    copies: Mapping[str, str] = field(default_factory=dict)
    """{name of a copy of the model's embedding or output layer: name of the original}.

    A folder need not contain the copies.
    """

    def of(self, layers: int) -> MTPNames:
        """Return these names with `{}` replaced. layers: number of layers of the model itself."""
        own = {name: getattr(self, name).format(layers) for name in vars(self) if name != "copies"}
        return MTPNames(**own, copies={name.format(layers): original for name, original in self.copies.items()})


_LAYER_BEHIND = "model.layers.{}."
MTP_LAYER_BEHIND = MTPNames(
    layer=_LAYER_BEHIND,
    token_norm=f"{_LAYER_BEHIND}enorm.weight",
    hidden_norm=f"{_LAYER_BEHIND}hnorm.weight",
    input_proj=f"{_LAYER_BEHIND}eh_proj.weight",
    final_norm=f"{_LAYER_BEHIND}shared_head.norm.weight",
    copies={
        f"{_LAYER_BEHIND}embed_tokens.weight": "model.embed_tokens.weight",
        f"{_LAYER_BEHIND}shared_head.head.weight": "lm_head.weight",
    },
)
"""DeepSeek-V3's names. The layer is named like a further layer after the model's last one."""
MTP_LAYER_APART = MTPNames(
    layer="mtp.layers.0.",
    token_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    input_proj="mtp.fc.weight",
    final_norm="mtp.norm.weight",
)
"""Qwen's names. The layer has a prefix of its own."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family, described by its differences from other Llama-like decoders.

    FAMILY = Family(name="llama", classes=("LlamaForCausalLM",), attention=(*NORMS, *ATTENTION), dense=DENSE)
    """

    name: str
    classes: tuple[str, ...]
    """Language model class names, as in `architectures` of config.json."""
    attention: tuple[Rule, ...]
    """Rules for a layer's norms and attention."""
    dense: tuple[Rule, ...] = ()
    delta_net: tuple[Rule, ...] = ()
    """Rules for the norms and the delta net in layers without attention."""
    mixture: tuple[Rule, ...] = ()
    mtp: MTPNames | None = None
    """Names of the multi-token-prediction layer, or None if the family's models never have one.

    The layer always has attention, never a delta net.
    """
    classifiers: tuple[str, ...] = ()
    """Names of the classifier classes that belong to `classes`, in the same order.

    If empty, they are the names in `classes` with ForSequenceClassification instead of ForCausalLM.
    """
    read: Callable[[Config], dict[str, Any]] = lambda config: {}
    """Function that returns the Architecture fields whose values differ from Llama's."""
    demands: Mapping[str, Any] = field(default_factory=dict)
    """{key of config.json: its only supported value in this family}. That value is also transformers' default."""
    may_say: frozenset[str] = frozenset()
    """Keys of `DEMANDS` that may have any value in this family, because `read` handles them."""
    check: Callable[[Config, Architecture], str | None] = lambda config, arch: None
    """Function that returns why a model is not supported, or None if it is. It runs after `demands` are checked."""


DEMANDS: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False}
"""{key of config.json: its only supported value}. They hold for every family, except for keys in `Family.may_say`."""


def rope_of(config: Config) -> dict[str, Any]:
    """Return config.json's RoPE settings for layers without a window.

    transformers 5 writes `rope_parameters`; earlier versions write `rope_scaling` and `rope_theta`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("full_attention", rope)  # Gemma has one entry per layer type


def rotary_share(config: Config, default: float) -> float:
    """Return the fraction of each head's width that RoPE rotates. default: transformers' default for the family."""
    if "rotary_dim" in config:  # MiniMax's key
        default = config["rotary_dim"] / config["head_dim"]
    return rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor", default))


def windows_everywhere(config: Config) -> tuple[int | None, ...]:
    """Return each layer's attention window in tokens, None for an unlimited one.

    If config.json has no layer types, all layers have the window `sliding_window`.
    """
    return windows_by_kind(config) or (config.get("sliding_window"),) * config["num_hidden_layers"]


def windows_by_kind(config: Config) -> tuple[int | None, ...] | None:
    """Return each layer's attention window in tokens, None for an unlimited one, according to `layer_types`.

    Return None instead of a tuple if config.json has no layer types.
    """
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    return kinds and tuple(window if kind == "sliding_attention" else None for kind in kinds)


def sigmoid_mixture(config: Config) -> Mixture:
    """Read the settings of a mixture in DeepSeek-V3's style: shared experts, expert groups, biased sigmoid scores."""
    is_grouped, shared = config.get("n_group", 1) > 1, config.get("n_shared_experts") or 0
    return Mixture(
        experts=config["n_routed_experts"],
        per_token=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        layers=tuple(layer >= config["first_k_dense_replace"] for layer in range(config["num_hidden_layers"])),
        # In the model's files all shared experts are one feed-forward of their total width.
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
    # The model ranks groups by their two best experts. group_limited_topk in megatron.core 0.20 ranks them by their
    # best `per_token // groups_per_token`.
    mixture = arch.mixture
    if mixture is None or mixture.groups is None or mixture.per_token == 2 * mixture.groups_per_token:
        return None
    return (
        f"num_experts_per_tok = {mixture.per_token}: megatron.core ranks groups of experts as the model does only with "
        f"twice topk_group = {mixture.groups_per_token}; pick another model."
    )
