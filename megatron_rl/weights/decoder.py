"""Dataclasses that describe a decoder's architecture in the same terms for all model families."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Mixture-of-experts settings: the layers with experts, expert sizes and routing."""

    experts: int
    per_token: int
    ffn: int
    """Width of one expert."""
    layers: tuple[bool, ...]
    """Per layer: True for a mixture of experts, False for a dense feed-forward."""
    renormalised: bool = True
    """True if the routing weights of a token's chosen experts are renormalised to sum to 1."""
    shared_ffn: int | None = None
    """Total width of the shared experts, which process every token."""
    groups: int | None = None
    """Number of groups into which the experts are divided. A token's experts come from `groups_per_token` groups."""
    groups_per_token: int | None = None
    shared_gate: bool = False
    """True if the shared experts' output is multiplied by a sigmoid gate computed from the token."""
    scale: float | None = None
    """Factor by which the routing weights of the chosen experts are multiplied."""
    is_biased: bool = False
    """True if the experts' scores are sigmoids, to which a bias is added only when experts are chosen.

    The bias has no gradient (arXiv 2412.19437).
    """


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): the ranks of its projections and the widths of a head's parts."""

    query_rank: int | None
    """Rank of the query projection. None if queries are projected directly from the hidden state."""
    kv_rank: int
    plain_dim: int
    """Width of the unrotated part of a query or key head."""
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Gated delta nets that replace attention in some layers (arXiv 2412.06464)."""

    key_heads: int
    value_heads: int
    """Number of value heads, a multiple of `key_heads`. Adjacent value heads share a key head."""
    key_dim: int
    value_dim: int
    kernel: int
    """Kernel size of the preceding causal convolution, in tokens, including the current one."""
    layers: tuple[bool, ...]
    """Per layer: True for a delta net, False for attention."""

    @property
    def in_rows(self) -> int:
        """Number of output rows of all input projections together.

        The rows are for queries, keys, values, gates, and two numbers per value head.
        """
        return 2 * (self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1))


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder's sizes (widths in elements, vocabulary in tokens) and the features that differ between families.

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
    """Width of an attention head. With latent attention, the width of the head's part that RoPE rotates."""
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_positions: int
    windows: tuple[int | None, ...]
    """Per layer: the attention window in tokens, including the current one; None means unlimited."""
    mixture: Mixture | None = None
    latent: Latent | None = None
    delta_net: DeltaNet | None = None
    gated_attention: bool = False
    """True if queries come with a gate of equal width. Attention's output is multiplied by the gate's sigmoid."""
    window_rope_theta: float | None = None
    """RoPE base of the layers with a window. These layers then use no RoPE scaling.

    None: they have the same RoPE as the other layers.
    """
    qkv_bias: bool = False
    has_biases: bool = False
    """True if all matrices of the layers have biases, including routers and experts. `qkv_bias` is separate."""
    has_sinks: bool = False
    """True if each head has an attention sink: a learned number that joins the softmax as one more score."""
    qk_norm: bool = False
    """True if queries and keys are normalised per head."""
    wide_qk_norm: bool = False
    """True if queries and keys are normalised over all heads together."""
    rotary_share: float = 1.0
    """Fraction of each head's width that is rotated, starting at its beginning."""
    softmax_scale: float | None = None
    """Factor by which the query-key products are multiplied. None stands for 1 / sqrt(head_dim)."""
    activation: str = "silu"
    """Feed-forward activation on the gate: `silu`, `gelu_tanh` or `clamped_swiglu`. The last is
    `gate * sigmoid(1.702 gate) * (1 + up)`, with `gate` clamped to at most 7, and `up` clamped to [-7, 7]."""
    embedding_scale: float | None = None
    """Factor by which the embedding's output is multiplied. The factor is rounded to the model's dtype."""
    norm_offset: float = 0.0
    """Number that the norms add to their weights before they multiply with them."""
    has_norms_before: bool = True
    has_norms_behind: bool = False
    """has_norms_before: True if a norm precedes each attention and each feed-forward. has_norms_behind: True if a norm
    follows each of them."""
    behind: int | None = None
    """For the architecture of a multi-token-prediction layer: number of layers of the model that it belongs to.

    None for the architecture of a whole model.
    """
    head: str = "policy"
    """The layer after the last norm: `policy` (logits over the vocabulary) or `value` (one number per token)."""

    def with_head(self, head: str) -> Architecture:
        """Return the architecture with the same trunk and another head: `policy` or `value`.

        Raises ValueError if a policy head is requested for a model with a value head.
        """
        if head == "policy" and self.head == "value":
            raise ValueError(
                "model.path: a ForSequenceClassification folder has a scalar head and no language-model head; give a "
                "ForCausalLM folder for the policy, and this one as critic or reward model."
            )
        # A value head has one row, so it cannot be tied to the embedding.
        return replace(self, head=head, tied=self.tied and head == "policy")

    def mtp_layer(self) -> Architecture:
        """Return the architecture of this model's multi-token-prediction layer: one layer with attention."""
        mixture = None if self.mixture is None else replace(self.mixture, layers=(True,))
        return replace(self, layers=1, windows=(None,), mixture=mixture, delta_net=None, behind=self.layers)

    @property
    def beyond_transformer_engine(self) -> str | None:
        """Name of one feature of this architecture that Transformer Engine's modules lack; None if they have all."""
        parts = {"norms behind matrices": self.has_norms_behind, "delta nets": self.delta_net, "sinks": self.has_sinks}
        return next((part for part, has in parts.items() if has), None)

    @property
    def fits_transformer_engine(self) -> bool:
        return self.beyond_transformer_engine is None

    def has_delta_net(self, layer_number: int) -> bool:
        """Return True if a layer has a delta net instead of attention. layer_number: global, from 0."""
        return self.delta_net is not None and self.delta_net.layers[layer_number]

    def kind(self, layer_number: int) -> tuple[bool, bool]:
        """Return two flags: whether a layer has a delta net, and whether it has a mixture of experts.

        Layers with equal flags have parameters of the same names and shapes.
        """
        return self.has_delta_net(layer_number), self.has_mixture(layer_number)

    def has_mixture(self, layer_number: int) -> bool:
        """Return True if a layer has a mixture of experts. layer_number: global, from 0."""
        return self.mixture is not None and self.mixture.layers[layer_number]
