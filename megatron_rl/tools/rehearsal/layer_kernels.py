"""Counts the kernels of a layer of the engine and of a reference layer, forward and backward, without recomputation.

The reference consists of Transformer Engine's modules. Its first half is LayerNormLinear, norms of queries and keys if
the model has them, rotation, attention, Linear. Its second half is LayerNormLinear, SwiGLU, Linear. In a mixture, the
second half is RMSNorm, the router, permutation, sorting by expert, GroupedLinear, weighted SwiGLU, GroupedLinear, and
the inverse sorting and permutation. The router is a matrix product and one kernel, in each direction. Each half has a
residual connection.

Matrix products accumulate into the gradient buffers, SwiGLU is one kernel in each direction, and both layers use
torch's attention. The reference has neither collectives nor the token counts that collectives need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.packed_rows import PackedRows
from megatron_rl.engine.rope import Rope, rotate
from megatron_rl.tools.rehearsal.device_ledger import Ledger


def kernels_of_layers(engine: MegatronEngine, packed: PackedRows, ledger: Ledger) -> dict[str, int]:
    """Return the kernel counts of the engine's last layer and of the reference layer on these rows.

    Returns {} if the engine's layers are not Transformer Engine's, or have latent attention.
    """
    layer, config = engine.chunks[-1].decoder.layers[-1], engine.tf_config
    if config.transformer_impl != "transformer_engine" or config.multi_latent_attention:
        return {}
    engine.onload()
    split = engine.groups.tensor.size if config.sequence_parallel else 1
    modules = ModulesAlone(engine, is_mixture=engine.arch.has_mixture(layer.layer_number - 1))

    def count(forward: Callable[[Tensor], Tensor]) -> int:
        rows = len(packed.positions) // split
        hidden = torch.zeros(rows, 1, config.hidden_size, dtype=engine.dtype, device=engine.device)
        before = ledger.memory.kernels
        out = forward(hidden.requires_grad_())
        out.backward(out.detach())
        return ledger.memory.kernels - before

    return {
        "engine": count(lambda hidden: layer(hidden, attention_mask=None, packed_seq_params=packed)[0]),
        "transformer_engine": count(lambda hidden: modules(hidden, packed)),
    }


class ModulesAlone(nn.Module):
    """The reference layer: bare Transformer Engine modules with the shapes of the trainer's layers."""

    def __init__(self, engine: MegatronEngine, *, is_mixture: bool) -> None:
        from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear, RMSNorm

        super().__init__()
        config = self.config = engine.tf_config
        self.rope, head_dim = Rope.of(engine.arch), config.kv_channels
        self.rope.is_fused = True
        self.groups = max(1, config.num_query_groups // config.tensor_model_parallel_size)
        """Key-value heads of this rank. Ranks share one if there are fewer heads than ranks."""
        kv_heads = self.groups * config.tensor_model_parallel_size
        options = {"bias": False, "params_dtype": engine.dtype, "fuse_wgrad_accumulation": True}
        cut = options | {"tp_group": engine.groups.tensor.group, "sequence_parallel": config.sequence_parallel}
        column = cut | {"parallel_mode": "column", "normalization": "RMSNorm"}
        width = (config.num_attention_heads + 2 * kv_heads) * head_dim
        self.qkv = LayerNormLinear(config.hidden_size, width, **column)
        self.norms = nn.ModuleList(RMSNorm(head_dim, dtype=engine.dtype) for _ in range(2 * config.qk_layernorm))
        heads = config.num_attention_heads * head_dim
        self.projection = Linear(heads, config.hidden_size, parallel_mode="row", **cut)
        self.is_mixture = is_mixture
        if is_mixture:
            self.norm = RMSNorm(config.hidden_size, dtype=engine.dtype)
            self.router = Linear(config.hidden_size, config.num_moe_experts, **options)
            self.experts = config.num_moe_experts // config.expert_model_parallel_size
            ffn = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
            self.up = GroupedLinear(self.experts, config.hidden_size, 2 * ffn, **options)
            self.down = GroupedLinear(self.experts, ffn, config.hidden_size, **options)
        else:
            self.up = LayerNormLinear(config.hidden_size, 2 * config.ffn_hidden_size, **column)
            self.down = Linear(config.ffn_hidden_size, config.hidden_size, parallel_mode="row", **cut)
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

    def forward(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        hidden = hidden + self.projection(self._attend(self.qkv(hidden), packed))
        if self.is_mixture:
            return hidden + self._experts(self.norm(hidden))
        return hidden + self.down(bias_swiglu_impl(self.up(hidden), None))

    def _attend(self, mixed: Tensor, packed: PackedRows) -> Tensor:
        config = self.config
        mixed = mixed.view(*mixed.shape[:2], self.groups, -1)
        sizes = [mixed.shape[-1] - 2 * config.kv_channels, config.kv_channels, config.kv_channels]
        query, key, value = (
            part.unflatten(-1, (-1, config.kv_channels)).flatten(2, 3) for part in mixed.split(sizes, -1)
        )
        if self.norms:
            query, key = (norm(x) for norm, x in zip(self.norms, (query, key), strict=True))
        rotation = packed.rotation(self.rope)
        query, key = (rotate(x[:, 0], rotation) for x in (query, key))
        bounds = packed.query_cu, packed.key_cu, packed.longest_query, packed.longest_key
        out = varlen_attn(query, key, value[:, 0], *bounds, window_size=(-1, 0), enable_gqa=True)
        return out.flatten(1)[:, None]

    def _experts(self, normed: Tensor) -> Tensor:
        from transformer_engine.pytorch import permutation

        rows, config = normed.flatten(0, 1), self.config
        taken = len(rows) * config.moe_router_topk
        probs, routes = _Routing.apply(self.router(rows), config.moe_router_topk)
        out, probs, places = permutation.moe_permute_with_probs(rows, probs, routes, taken)
        sizes = torch.full((self.experts,), taken // self.experts, device=rows.device)
        order = torch.arange(self.experts, device=rows.device)
        out, probs = permutation.moe_sort_chunks_by_index_with_probs(out, probs, sizes, order)
        splits = [taken // self.experts] * (self.experts - 1)
        splits.append(taken - sum(splits))
        out = self.down(weighted_bias_swiglu_impl(self.up(out, splits), None, probs[:, None]), splits)
        out = permutation.moe_sort_chunks_by_index(out, sizes, order)
        return permutation.moe_unpermute(out, places, restore_shape=rows.shape).view(normed.shape)


class _Routing(torch.autograd.Function):
    """The router's probabilities and expert mask, as one kernel in each direction."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        probs = torch.softmax(scores, -1, dtype=torch.float32)
        routes = probs.new_empty(probs.shape, dtype=torch.bool)
        ctx.mark_non_differentiable(routes)
        return probs, routes

    @staticmethod
    def backward(ctx: Any, by_probs: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return by_probs.to(torch.bfloat16), None
