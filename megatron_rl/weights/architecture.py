"""The architecture in a Hugging Face `config.json`, checked and in one vocabulary for all families."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FAMILIES = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma3ForCausalLM": "gemma3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SeedOssForCausalLM": "seed_oss",
}
CLASSIFIERS = {name.replace("ForCausalLM", "ForSequenceClassification"): name for name in FAMILIES}
# Gemma3ForSequenceClassification is the classifier of the model with images; the one of text has a name of its own.
CLASSIFIERS["Gemma3TextForSequenceClassification"] = CLASSIFIERS.pop("Gemma3ForSequenceClassification")
"""The models of these families whose head is one number per token, and what they are called as language models."""

WITH_QK_NORM = ("gemma3", "qwen3", "qwen3_moe")
WITH_WIDE_QK_NORM = ("minimax_m2", "olmo")
WITH_NORMS_BEHIND = ("gemma3", "olmo")
"""Attention and feed-forward are followed by a norm."""
BIASED = {"glm4_moe": False, "seed_oss": True}
"""Families whose config.json says whether queries, keys and values have a bias, and transformers' default."""
PARTLY_ROTATED = {"glm4_moe": 0.5, "minimax_m2": 1.0, "phi3": 1.0}
"""Those whose config.json may say that a share of each head is rotated, and transformers' default."""
LIKE_DEEPSEEK = ("deepseek_v3", "glm4_moe")
"""Mixtures with shared experts whose router adds a bias to sigmoids."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture of experts: where it stands and how its router spreads a token."""

    experts: int
    per_token: int
    ffn: int
    """Width of one expert."""
    layers: tuple[bool, ...]
    """For each layer, whether it has the mixture (or one dense feed-forward)."""
    renormalised: bool = True
    """The chosen experts' weights sum to 1."""
    shared_ffn: int | None = None
    """Width of the experts that every token takes, together."""
    groups: int | None = None
    """Groups of experts; a token chooses from `groups_per_token` of them only."""
    groups_per_token: int | None = None
    scale: float | None = None
    """Factor on the chosen experts' weights."""
    is_biased: bool = False
    """Scores are sigmoids, and a bias that gradients do not reach takes part in choosing (arXiv 2412.19437)."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): ranks of its projections, widths of each head's parts."""

    query_rank: int | None
    """None: queries are projected from the hidden state at once."""
    kv_rank: int
    plain_dim: int
    """The part of a query and a key that is not rotated."""
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a decoder: counts of layers and heads, widths in elements, the vocabulary in tokens.

    For example:

        arch = read_architecture("models/qwen3-4b")
        arch.family, arch.layers, arch.heads, arch.kv_heads  # ("qwen3", 36, 32, 8)
        arch.with_head("value")  # the same trunk as a critic
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of latent attention the rotated part alone."""
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_positions: int
    windows: tuple[int | None, ...]
    """For each layer, the most tokens that one attends to, itself included; None is all."""
    mixture: Mixture | None = None
    latent: Latent | None = None
    window_rope_theta: float | None = None
    """Base of the rotary embedding of layers with a window, which is not scaled; None is as in the other layers."""
    qkv_bias: bool = False
    """The projections of queries, keys and values have one; that of the output never has."""
    qk_norm: bool = False
    """Queries and keys go through a norm over each head's width."""
    wide_qk_norm: bool = False
    """They go through one over the width of all heads together."""
    rotary_share: float = 1.0
    """The share of each head's width, from its beginning, that is rotated."""
    softmax_scale: float | None = None
    """Factor on the products of queries and keys; None is 1 / sqrt(head_dim)."""
    head: str = "policy"
    """The layer after the last norm: `policy`, logits over the vocabulary, or `value`, one number per token."""

    def with_head(self, head: str) -> Architecture:
        """Return the same trunk under `head`. A value head may be put on any; a policy head is there or is not."""
        if head == "policy" and self.head == "value":
            raise ValueError(
                "model.path: a ForSequenceClassification folder has a scalar head and no language-model head; give a "
                "ForCausalLM folder for the policy, and this one as critic or reward model."
            )
        # One row of numbers cannot be the embedding's transpose: a value head is never tied.
        return replace(self, head=head, tied=self.tied and head == "policy")

    @property
    def norm_offset(self) -> float:
        """The number that a norm adds to its weights."""
        return 1.0 if self.family == "gemma3" else 0.0

    def has_mixture(self, layer_number: int) -> bool:
        """Return True if the layer (counted from 0 over the whole model) is a mixture of experts."""
        return self.mixture is not None and self.mixture.layers[layer_number]


def read_architecture(folder: str | Path) -> Architecture:
    """Read and check `folder/config.json`. ValueError names the key, the value, the rule and the remedy."""
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        name = str(folder) if str(folder).count("/") == 1 else f"OWNER/{folder.name}"
        raise ValueError(
            f"model.path = {str(folder)!r}: no config.json there; give a Hugging Face model folder (config.json, "
            f"safetensors, tokenizer), made by megatron-rl convert or fetched: hf download {name} --local-dir "
            f"models/{name.rpartition('/')[2].lower()}, and model.path=models/{name.rpartition('/')[2].lower()}."
        )
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); copy the model folder again.") from error
    head, names = _head(config, path)
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ValueError(
            f"{path}: architectures = {names}: supported are {', '.join(FAMILIES)}; convert or pick one of these."
        )
    family = FAMILIES[names[0]]
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        # A key that is not there has its class's default in transformers, which these repeat, family by family.
        arch = Architecture(
            family=family,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            ffn=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,  # absent or null in models without grouped queries
            # DeepSeek's first: the rotary embedding is what needs the width, and it turns a part of each head only.
            head_dim=config.get("qk_rope_head_dim") or config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            tied=config.get("tie_word_embeddings", family == "gemma3") and head == "policy",
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=_rope(config).get("rope_theta", config.get("rope_theta", 10_000.0)),
            rope_scaling=_scaling(config, path),
            max_positions=config.get("max_position_embeddings", 4096),
            windows=_windows(config, family),
            mixture=_mixture(config, family),
            latent=_latent(config) if family == "deepseek_v3" else None,
            qkv_bias=config.get("attention_bias", BIASED[family]) if family in BIASED else family == "qwen2",
            qk_norm=config.get("use_qk_norm", False) if family == "glm4_moe" else family in WITH_QK_NORM,
            wide_qk_norm=family in WITH_WIDE_QK_NORM,
            rotary_share=_rotary_share(config, PARTLY_ROTATED[family]) if family in PARTLY_ROTATED else 1.0,
            window_rope_theta=_window_rope_theta(config) if family == "gemma3" else None,
            # Not of head_dim: in Gemma 3 of 27 billion the two differ.
            softmax_scale=config["query_pre_attn_scalar"] ** -0.5 if family == "gemma3" else None,
            head=head,
        )
    except KeyError as error:
        raise ValueError(f"{path}: key {error} is missing; copy config.json of the original model again.") from error
    _refuse_unsupported(config, arch, path)
    return arch


def with_value_head(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the same model as a critic or reward model is saved."""
    classifier_of = {causal: name for name, causal in CLASSIFIERS.items()}
    names = [classifier_of.get(name, name) for name in config["architectures"]]
    # transformers counts the labels of id2label and saves them alone; other readers look for num_labels.
    labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config | {"architectures": names} | labels


def _head(config: dict[str, Any], path: Path) -> tuple[str, list[str]]:
    """Return the head of config.json's model, and its `architectures` as their language models are called."""
    names = config.get("architectures") or []
    if not any(name in CLASSIFIERS for name in names):
        return "policy", names
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)  # 2: transformers' own
    if labels != 1:
        raise ValueError(
            f"{path}: num_labels = {labels}: a critic or reward model gives one number; pick a model with one label."
        )
    return "value", [CLASSIFIERS.get(name, name) for name in names]


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_scaling` beside `rope_theta`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("full_attention", rope)  # Gemma's has one entry for each kind of layer


def _rotary_share(config: dict[str, Any], default: float) -> float:
    if "rotary_dim" in config:  # MiniMax's own way to say it
        default = config["rotary_dim"] / config["head_dim"]
    return _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", default))


def _window_rope_theta(config: dict[str, Any]) -> float:
    if "rope_local_base_freq" in config:  # before transformers 5
        return config["rope_local_base_freq"]
    return config["rope_parameters"]["sliding_attention"]["rope_theta"]


ROPE_SCALINGS = ("linear", "llama3", "yarn")


def _scaling(config: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the scaling as transformers 5 writes it, or None. Scalings that depend on the batch are refused."""
    rope = dict(_rope(config))
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))  # `type`: as early versions wrote it
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
    if family in ("mixtral", "minimax_m2"):
        return Mixture(
            experts=config["num_local_experts"],
            per_token=config["num_experts_per_tok"],
            ffn=config["intermediate_size"],
            layers=tuple(True for _ in layers),
            is_biased=family == "minimax_m2",
        )
    if family == "qwen3_moe":
        dense, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
        return Mixture(
            # transformers 5 writes the second name.
            experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
            per_token=config["num_experts_per_tok"],
            ffn=config["moe_intermediate_size"],
            # The step counts layers from 1, the list from 0.
            layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in layers),
            renormalised=config.get("norm_topk_prob", False),
        )
    if family in LIKE_DEEPSEEK:
        is_grouped, shared = config.get("n_group", 1) > 1, config.get("n_shared_experts") or 0
        return Mixture(
            experts=config["n_routed_experts"],
            per_token=config["num_experts_per_tok"],
            ffn=config["moe_intermediate_size"],
            layers=tuple(layer >= config["first_k_dense_replace"] for layer in layers),
            # All shared experts are one feed-forward in the model's files, as wide as they are together.
            shared_ffn=shared * config["moe_intermediate_size"] or None,
            groups=config["n_group"] if is_grouped else None,
            groups_per_token=config["topk_group"] if is_grouped else None,
            scale=config.get("routed_scaling_factor", 1.0),
            is_biased=True,
        )
    return None


def _latent(config: dict[str, Any]) -> Latent:
    return Latent(
        query_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        plain_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
    )


def _windows(config: dict[str, Any], family: str) -> tuple[int | None, ...]:
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if "layer_types" in config:
        return tuple(window if kind == "sliding_attention" else None for kind in config["layer_types"])
    if family in ("mistral", "mixtral", "phi3"):
        return (window,) * layers
    if family == "olmo":  # without layer_types it is OLMo 2, whose layers have no window
        return (None,) * layers
    if family == "gemma3":
        every = config["sliding_window_pattern"]
        return tuple(window if (layer + 1) % every else None for layer in range(layers))
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    # Qwen3MoeModel gives every layer the window, whatever max_window_layers says; of the others the first have none.
    whole = 0 if family == "qwen3_moe" else config["max_window_layers"]
    return tuple(None if layer < whole else window for layer in range(layers))


def _refuse_unsupported(config: dict[str, Any], arch: Architecture, path: Path) -> None:
    # A key that is not there has the supported value: these are transformers' defaults, too.
    demands: dict[str, Any] = {
        "hidden_act": "silu",
        "mlp_bias": False,
    }
    if arch.family not in BIASED:
        demands["attention_bias"] = False
    if arch.family == "seed_oss":
        demands["attention_out_bias"] = False
    if arch.family == "gemma3":
        demands |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        }
    if arch.family in LIKE_DEEPSEEK:
        demands |= {
            "norm_topk_prob": True,
            "rope_interleave": arch.family == "deepseek_v3",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        }
    if arch.family == "minimax_m2":
        demands |= {"scoring_func": "sigmoid", "shared_intermediate_size": 0, "qk_norm_type": "per_layer"}
    for key, supported in demands.items():
        value = config.get(key, supported)
        if value != supported:
            raise ValueError(
                f"{path}: {key} = {value!r}: only {supported!r} is supported for {arch.family}; pick another model."
            )
    if arch.family == "olmo" and arch.rope_scaling is not None and any(arch.windows):
        raise ValueError(
            f"{path}: rope type {arch.rope_scaling['rope_type']!r}: not supported beside layers with a window, which "
            f"versions of transformers scale or do not; pick a model with the default."
        )
    # The model ranks groups by their two best experts, group_limited_topk in megatron.core 0.20 by their best
    # `per_token // groups_per_token`.
    mixture = arch.mixture
    if mixture is not None and mixture.groups is not None and mixture.per_token != 2 * mixture.groups_per_token:
        raise ValueError(
            f"{path}: num_experts_per_tok = {mixture.per_token}: megatron.core ranks groups of experts as the model "
            f"does only with twice topk_group = {mixture.groups_per_token}; pick another model."
        )
    if arch.heads % arch.kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads = {arch.heads}: must be a multiple of num_key_value_heads = {arch.kv_heads}; "
            f"correct config.json."
        )
