"""Estimates activation memory: the tensors that a training pass keeps for its backward pass.

Covers megatron.core's local layers with this package's norms and attention (model.transformer_impl = local), as
measured on CPU in tests/megatron/test_plan_memory.py. Also covers Transformer Engine's layers, as rehearsed in
test_plan_rehearsed.py. Transformer Engine's layers keep less: neither a norm's float32 input nor the cosines and sines
that rotate queries and keys. Of a feed-forward block they keep only gate, up and their product.

On CUDA, bfloat16 attention uses the variable-length kernel. float32 runs on CUDA are meant for checks only; their
attention may keep all scores, which are not counted here. Routed tokens are assumed to spread evenly over the experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config import EngineConfig
from megatron_rl.weights.adapter_rules import adapted, adapter_rule
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.layout import layers_of_stages
from megatron_rl.weights.mapping import layer_rules

DELTA_CHUNK = 64
"""Rows per chunk of a delta net, as in engine/delta_rule.py. All chunks are assumed to be full."""


@dataclass(frozen=True)
class Run:
    """Consecutive layers that are recomputed together, or a single layer. Its fields are in bytes per row.

    kept: activations kept for the backward pass. formed_again: activations that recomputation adds during the backward
    pass.
    """

    kept: float
    formed_again: float


@dataclass(frozen=True)
class Activations:
    """Activation memory of a training pass on a rank.

    For example:

        activations = Activations(read_architecture(folder), config.actor, config.megatron)
        waiting, backward = activations.of_stage(0, rows=8192, microbatches=4)  # bytes at the two fullest moments
    """

    arch: Architecture
    config: EngineConfig
    megatron: dict[str, Any] = field(default_factory=dict)
    """The config's `megatron:` section, for its recomputation and pipeline layout."""
    uses_kernel: bool = True
    """True if attention uses CUDA's variable-length kernel; False if it uses SDPA, on pieces of equal shape."""
    keys_per_row: float = 1.0
    """Number of keys gathered per computed row. More than 1 if replies share their prompt's rows, because the prompt's
    keys are then gathered once for each reply."""

    has_fused_layers: bool = False
    """True for Transformer Engine's layers, False for megatron.core's local ones."""

    @property
    def itemsize(self) -> int:
        return 2 if self.config.model.dtype == "bfloat16" else 4

    @property
    def has_fused_activation(self) -> bool:
        """True if SwiGLU is one kernel, Transformer Engine's or a compiled one (`engine.model.compiles_activation`)."""
        is_compiled = self.uses_kernel and self.arch.activation == "silu"
        return bool(self.megatron.get("bias_activation_fusion", self.has_fused_layers or is_compiled))

    @property
    def own(self) -> float:
        """Share of the rows that this rank's norms process: 1 / parallel.tensor with sequence parallelism, else 1."""
        parallel = self.config.parallel
        return 1 / parallel.tensor if parallel.sequence_parallel else 1.0

    def of_stage(self, stage: int, rows: int, microbatches: int) -> tuple[float, float]:
        """Return the bytes at the two fullest moments of a pipeline stage, for all its microbatches in flight.

        The first moment is the end of the last forward pass, when the head needs additional memory, not counted here.
        The second is in the backward pass that follows, which recomputes activations. rows: number of rows of one
        microbatch on one context rank.
        """
        parallel = self.config.parallel
        chunks = [self._runs(chunk) for chunk in layers_of_stages(self.arch, parallel, self.megatron)[stage]]
        rotation = 2 * 4 * self.arch.head_dim if self.itemsize == 4 else 0  # cosines and sines, once for all layers
        kept = [sum(run.kept for run in runs) + rotation for runs in chunks]
        flying = chunks_in_flight(stage, parallel.pipeline, parallel.virtual_pipeline, microbatches)
        # All but the last in flight count as an average chunk, because the chunks of a stage take turns.
        before = (flying - 1) * sum(kept) / len(kept)
        last = self.norm(self.arch.hidden) if stage == parallel.pipeline - 1 else 0.0
        backward = 0.0
        for runs in chunks:
            for number, run in enumerate(runs):  # the backward pass has freed the runs after this one
                backward = max(backward, sum(r.kept for r in runs[: number + 1]) + run.formed_again + rotation)
        return rows * (before + max(kept) + last), rows * (before + backward)

    def working(self, stage: int, rows: int) -> float:
        """Return the bytes of a layer's temporary gradients in its backward pass, minus already freed activations."""
        arch, tensor = self.arch, self.config.parallel.tensor
        numbers = [
            number for chunk in layers_of_stages(arch, self.config.parallel, self.megatron)[stage] for number in chunk
        ]
        has_mixture = any(map(arch.has_mixture, numbers))
        width = 0.0 if all(map(arch.has_mixture, numbers)) else 2 * arch.ffn / tensor  # gate and up
        if has_mixture and arch.mixture is not None:
            width = max(width, 2 * self.own * arch.mixture.per_token * arch.hidden)  # rows sent to experts
        return rows * self.itemsize * (width + 3 * arch.hidden)

    def between_stages(self, stage: int, rows: int, microbatches: int) -> float:
        """Return the bytes of stage inputs and outputs that the schedule keeps: one of each per pass in flight."""
        parallel = self.config.parallel
        if parallel.pipeline == 1:
            return 0.0
        flying = chunks_in_flight(stage, parallel.pipeline, parallel.virtual_pipeline, microbatches)
        return 2 * flying * rows * self.itemsize * self.own * self.arch.hidden

    def _runs(self, chunk: range) -> list[Run]:
        """Return a model chunk's layers, grouped into the runs that are recomputed together."""
        options = self.megatron
        kinds = [self.arch.kind(number) for number in chunk]
        by_kind = {kind: self.layer(chunk[kinds.index(kind)]) for kind in set(kinds)}  # layers of a kind are identical
        whole = [by_kind[kind] for kind in kinds]
        inside = [self.inside_delta_net() if has_delta_net else 0.0 for has_delta_net, _ in kinds]
        if options.get("recompute_granularity") != "full":
            return [Run(kept, again) for kept, again in zip(whole, inside, strict=True)]
        count, is_block = options.get("recompute_num_layers") or 1, options.get("recompute_method") == "block"
        first = self.itemsize * self.own * self.arch.hidden
        again = first if self.itemsize == 4 else 0.0  # in float32 the first norm keeps the run's input itself
        # `block` recomputes the first `count` layers of a chunk one by one; `uniform` all layers in runs of `count`.
        if is_block:
            both = enumerate(zip(whole, inside, strict=True))
            return [Run(first, w + more - again) if n < count else Run(w, more) for n, (w, more) in both]
        runs = (slice(n, n + count) for n in range(0, len(whole), count))
        return [Run(first, sum(whole[run]) + max(inside[run]) - again) for run in runs]

    def layer(self, number: int) -> float:
        """Return the bytes per row of a layer that is not recomputed. number: the layer's index in the whole model."""
        if self.arch.has_delta_net(number):
            attention = self._delta_net()
        else:
            attention = self._latent_attention() if self.arch.latent else self._attention()
        feed_forward = self._mixture() if self.arch.has_mixture(number) else self._dense(self.arch.ffn)
        after = 2 * self.norm(self.arch.hidden) if self.arch.has_norms_behind and self.arch.has_norms_before else 0.0
        # Twice (before attention and before feed-forward): a norm, and its result, which the next matrix keeps.
        inputs = 2 * (self.norm(self.arch.hidden) + self.itemsize * self.own * self.arch.hidden)
        return inputs + attention + feed_forward + after + self._adapters(number)

    def _adapters(self, number: int) -> float:
        """Return the bytes per row of the low-rank activations between the A and B matrices of a layer's adapters.

        If B is sharded over the tensor axis, each rank keeps these activations for the rows of all tensor ranks.
        """
        lora, kept = self.config.lora, 0.0
        for rule in layer_rules(self.arch, number) if lora.rank > 0 else ():
            is_gathered = adapter_rule(rule, "lora_B", lora).layout.split_dim is not None
            rows = 1.0 if is_gathered else self.own
            if "{}" in rule.megatron:
                assert self.arch.mixture is not None
                rows = self.arch.mixture.per_token * self.own * self.config.parallel.expert_tensor
            kept += rows * len(adapted(rule, lora)) * lora.rank * self.itemsize
        return kept

    def norm(self, width: int, *, count: float = 1.0, share: float | None = None, keeps_input: bool = True) -> float:
        """Return the bytes per row of `count` norms of `width` elements.

        A norm keeps its float32 input, the normalized row before the weight is applied, and the row's scale. A fused
        norm keeps only its input, in the model's dtype, and the scale. share: share of the rows that this rank
        processes, by default `own`. keeps_input: False to leave out the float32 input.
        """
        share = self.own if share is None else share
        if self.has_fused_layers:
            return share * count * (self.itemsize * width + 4)
        result = 4 if self.arch.norm_offset else self.itemsize
        return share * count * ((4 * width if keeps_input else 0) + result * width + 4)

    def _recomputes_attention(self) -> bool:
        modules = self.megatron.get("recompute_modules") or ["core_attn"]
        return self.megatron.get("recompute_granularity") == "selective" and "core_attn" in modules

    def _attention(self) -> float:
        arch, b = self.arch, self.itemsize
        tensor = self.config.parallel.tensor
        heads, kv_heads = arch.heads / tensor, max(1, arch.kv_heads // tensor)
        query, key = heads * arch.head_dim, kv_heads * arch.head_dim
        projected = (query + 2 * key) * b  # includes the values, and with float32 the keys before their norm
        if arch.kv_heads < tensor:  # Megatron gathers the whole QKV, then each rank takes its part
            projected = (arch.heads + 2 * arch.kv_heads) * arch.head_dim * b
        norms = 0.0
        if arch.gated_attention:  # `projected` has the gate; kept too are its float32 sigmoid and what it multiplies
            norms += query * (2 * b + 4)
        if arch.qk_norm:
            norms += self.norm(arch.head_dim, count=heads, share=1.0)
            norms += self.norm(arch.head_dim, count=kv_heads, share=1.0, keeps_input=b == 2)
        if self._recomputes_attention():
            return norms + query * b + (key * b if arch.qk_norm else 0) + projected + query * b
        return norms + self._core(query, key, key, query, projected, heads)

    def _latent_attention(self) -> float:
        arch, b = self.arch, self.itemsize
        latent = arch.latent
        assert latent is not None
        heads = arch.heads / self.config.parallel.tensor
        width = latent.plain_dim + arch.head_dim
        # The input of the matrix that expands keys and values; context ranks gather it for all of their rows.
        gathered = b * self.own * self.config.parallel.context
        kept = gathered * latent.kv_rank
        if self.has_fused_layers:  # the norm's input is a view of rows that also contain the rotary keys
            kept += self.own * (b * (latent.kv_rank + arch.head_dim) + 4)
        else:
            kept += self.norm(latent.kv_rank, keeps_input=False)
            kept += self.own * (4 * latent.kv_rank if b == 2 else b * (latent.kv_rank + arch.head_dim))
        if latent.query_rank:
            kept += self.norm(latent.query_rank) + b * self.own * latent.query_rank
        query, projected = heads * width, heads * (latent.plain_dim + latent.value_dim) * b
        if self._recomputes_attention():
            return kept + gathered * arch.head_dim + (query + heads * latent.value_dim) * b
        # Values are a part of the matrix's output, even if pieces take their keys' rows from it.
        return kept + self._core(query, query, projected / b, heads * latent.value_dim, projected, heads)

    def _delta_net(self) -> float:
        """Return the bytes per row that a delta net keeps: its first matrix's output and its second matrix's input.

        Everything in between is recomputed.
        """
        delta, b = self.arch.delta_net, self.itemsize
        assert delta is not None
        return b * (delta.in_rows + delta.value_heads * delta.value_dim) / self.config.parallel.tensor

    def inside_delta_net(self) -> float:
        """Return the bytes per row of the activations between the two matrices of a delta net, mostly in float32."""
        delta, b = self.arch.delta_net, self.itemsize
        assert delta is not None
        keys, values = delta.key_heads, delta.value_heads
        key, value = keys * delta.key_dim, values * delta.value_dim
        mixed = 2 * key + value
        # The convolution's inputs, one row per kernel element; then before and after the function that follows it.
        convolution = 4 * delta.kernel * mixed + b * mixed + (4 * mixed if b == 4 else 8 * key)
        # For each pair of rows in a chunk: decays, corrections and scores of value heads, products of key heads.
        pairs = 4 * DELTA_CHUNK * (4 * values + 2 * keys)
        rows = 4 * (3 * values * delta.key_dim + 3 * value + 6 * key)
        state = 4 * value * delta.key_dim / DELTA_CHUNK
        behind = (20 if b == 4 else 16) * value  # norm and gate
        return (convolution + pairs + rows + state + behind + 40 * values) / self.config.parallel.tensor

    def _core(self, query: float, key: float, value: float, result: float, projected: float, heads: float) -> float:
        """Return the bytes per row that core attention keeps, including its result, which enters the output matrix.

        query, key, value, result: widths in elements per row. projected: bytes of the projection's output, which
        contains the values.
        """
        b = self.itemsize
        # Cosines and sines in bfloat16, for queries and for keys.
        rotation = 4 * b * self.arch.head_dim if b == 2 and not self.has_fused_layers else 0
        fixed = 4 * heads + rotation + b * (query + result)
        keys = self.keys_per_row * self.config.parallel.context
        # keys > 1: keys of a shared prompt or of other context ranks are gathered in addition.
        if not self.uses_kernel:
            return fixed + (keys * b * (key + value) + b * result if keys > 1 else b * key + projected)
        if result != query:  # the kernel wants values as wide as keys: it gets a padded copy, its result is trimmed
            return fixed + b * query + 2 * keys * b * key
        return fixed + (2 * keys * b * key if keys > 1 else b * key + projected)

    def _dense(self, width: int) -> float:
        """Return the bytes per row of a gated feed-forward block, without its input.

        It keeps five tensors: gate, up, the activated gate, another copy of up, and their product. With a fused
        activation it keeps three.
        """
        return (3 if self.has_fused_activation else 5) * self.itemsize * width / self.config.parallel.tensor

    def _mixture(self) -> float:
        """Return the bytes per row of a mixture of experts.

        The routed rows are gathered and kept once. Each expert's product is kept before and after it is scaled by the
        router's weight. Fused layers scale it in the same kernel and keep it once.
        """
        mixture, parallel, b = self.arch.mixture, self.config.parallel, self.itemsize
        assert mixture is not None
        routed = mixture.per_token * self.own * parallel.expert_tensor
        # Six widths: the five of a dense block, and the product scaled by the router's weight. With clamping eight:
        # also the clamped gate and up.
        widths = 3 if self.has_fused_activation else 8 if self.arch.activation == "clamped_swiglu" else 6
        experts = routed * (b * self.arch.hidden + widths * b * mixture.ffn / parallel.expert_tensor + 4)
        scores = self.own * ((9 if mixture.is_biased else 5) * mixture.experts + 20 * mixture.per_token)
        return experts + scores + self._dense(mixture.shared_ffn or 0)


def chunks_in_flight(stage: int, stages: int, chunks: int, microbatches: int) -> int:
    """Return the maximum number of a stage's forward passes that wait for their backward pass.

    A pass covers one model chunk. The numbers are those of Megatron's schedules. 1F1B warms up with one pass per later
    stage. The interleaved schedule warms up with two passes per later stage, plus one pass per stage for each further
    chunk.
    """
    if stages == 1:
        return 1
    warm_up = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(warm_up + 1, microbatches * chunks)
