"""The shape of a decoder, in one vocabulary for all families of models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


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
    shared_gate: bool = False
    """A sigmoid of the token weighs what the shared experts make of it."""
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
class DeltaNet:
    """Gated delta nets in the place of attention (arXiv 2412.06464): heads, their widths, and where they stand."""

    key_heads: int
    value_heads: int
    """A multiple of the key heads: neighbours share one."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution before it sees, the last one included."""
    layers: tuple[bool, ...]
    """For each layer, whether it has one (or attention)."""

    @property
    def in_rows(self) -> int:
        """Rows of its projections together: queries, keys, values, gates, and two numbers for each value head."""
        return 2 * (self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1))


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
    delta_net: DeltaNet | None = None
    gated_attention: bool = False
    """Queries come with a gate of their width, whose sigmoid multiplies the result of attention."""
    window_rope_theta: float | None = None
    """Base of the rotary embedding of layers with a window, which is not scaled; None is as in the other layers."""
    qkv_bias: bool = False
    """The projections of queries, keys and values have one."""
    has_biases: bool = False
    """So have all other matrices of the layers, routers and experts included."""
    has_sinks: bool = False
    """Each head has a number that takes part in the softmax over its scores, as if it were one more."""
    qk_norm: bool = False
    """Queries and keys go through a norm over each head's width."""
    wide_qk_norm: bool = False
    """They go through one over the width of all heads together."""
    rotary_share: float = 1.0
    """The share of each head's width, from its beginning, that is rotated."""
    softmax_scale: float | None = None
    """Factor on the products of queries and keys; None is 1 / sqrt(head_dim)."""
    activation: str = "silu"
    """The function on the gate of a feed-forward: `silu`, `gelu_tanh`, or `clamped_swiglu`, x * sigmoid(1.702 x) of a
    gate of at most 7, which multiplies 1 + up with up from -7 to 7."""
    embedding_scale: float | None = None
    """Factor on the rows of the embedding, rounded to the model's precision."""
    norm_offset: float = 0.0
    """The number that a norm adds to its weights."""
    has_norms_before: bool = True
    """Attention and feed-forward follow a norm."""
    has_norms_behind: bool = False
    """Attention and feed-forward are followed by a norm."""
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
    def beyond_transformer_engine(self) -> str | None:
        """The first part of the layers that Transformer Engine's modules cannot build; None: they build all."""
        parts = {"norms behind matrices": self.has_norms_behind, "delta nets": self.delta_net, "sinks": self.has_sinks}
        return next((part for part, has in parts.items() if has), None)

    @property
    def fits_transformer_engine(self) -> bool:
        return self.beyond_transformer_engine is None

    def has_delta_net(self, layer_number: int) -> bool:
        """Return True if the layer (counted from 0 over the whole model) has a delta net in the place of attention."""
        return self.delta_net is not None and self.delta_net.layers[layer_number]

    def kind(self, layer_number: int) -> tuple[bool, bool]:
        """Return what tells layers apart: has it a delta net, has it a mixture?"""
        return self.has_delta_net(layer_number), self.has_mixture(layer_number)

    def has_mixture(self, layer_number: int) -> bool:
        """Return True if the layer (counted from 0 over the whole model) is a mixture of experts."""
        return self.mixture is not None and self.mixture.layers[layer_number]
