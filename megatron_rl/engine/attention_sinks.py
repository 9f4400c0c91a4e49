"""Attention with sinks (GPT-OSS): each head has a learned logit in the softmax whose probability mass is discarded.

The softmax divides by the sum of exp(score) over all keys plus exp(sink). The variable-length kernel divides by the sum
without exp(sink). Its result is therefore multiplied by (the sum without exp(sink)) / (the sum with exp(sink)). The
backward kernel gets this scaled result and the sum with exp(sink).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_rl.engine import forks
from megatron_rl.engine.attention import PackedAttention
from megatron_rl.engine.packed_rows import PackedRows
from megatron_rl.engine.sharded_module import ShardedModule


class SinkAttention(ShardedModule, PackedAttention):
    """PackedAttention with one sink per head. Each tensor rank has the sinks of its own heads."""

    cut = ("sinks",)

    def __init__(self, config: Any, layer_number: int, *args: Any, pg_collection: Any, **options: Any) -> None:
        super().__init__(config, layer_number, *args, **options)
        self.tp_group = pg_collection.tp
        heads = config.num_attention_heads // self.tp_group.size()
        self.sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Compute dense attention with one more key of zeros, whose score is the sink, given by the additive mask."""
        pieces, heads, n, _ = query.shape
        m = key.shape[2]
        if is_causal:
            mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril()
        bias = query.new_zeros(n, m)
        if mask is not None:
            bias = bias.masked_fill(~mask, -torch.inf)
        sinks = self.sinks.to(query.dtype)[:, None, None].expand(-1, n, 1)
        bias = torch.cat([bias.expand(heads, -1, -1), sinks], dim=-1)
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
        is_grouped = heads != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, bias[None], scale=self.scale, enable_gqa=is_grouped)

    def _varlen_kernel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        bounds = (packed.query_cu, packed.key_cu, packed.longest_query, packed.longest_key, 0.0, self.window is None)
        left, right = self._bounds
        options = dict(scale=self.scale, window_size_left=left, window_size_right=right)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
            out, lse, *random = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, False, **options)
            return out, lse, (random[0], random[1])

        def backward(grad: Tensor, *tensors: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.aten._flash_attention_backward(grad, *tensors, *bounds, *state, **options)

        return WithSinks.apply(query, key, value, self.sinks, forward, backward)

    def _in_place(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        out, log_sum = forks.attend(query, key, value, self._blocks(packed), self.scale)
        return out * (log_sum - self.sinks.float()).sigmoid()[..., None].to(out.dtype)


class WithSinks(torch.autograd.Function):
    """Attention with sinks, from a kernel without them, which is given as two functions.

    query: `[R, heads, D]`; key, value: `[K, kv_heads, D]`; sinks: `[heads]`.
    forward: (query, key, value) -> result `[R, heads, D]`, log of the softmax's sum `[heads, R]` float32, kernel state.
    backward: (gradient, query, key, value, result, log of the sum, state) -> the gradients of query, key and value.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, forward: Callable, backward: Callable
    ) -> Tensor:
        out, lse, ctx.state = forward(query, key, value)
        total = torch.logaddexp(lse, sinks.float()[:, None])
        out = (out * (lse - total).exp().T[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.backward_kernel = backward
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, total = ctx.saved_tensors
        gradients = ctx.backward_kernel(grad.contiguous(), query, key, value, out, total, state=ctx.state)
        share = (sinks.float()[:, None] - total).exp()  # [heads, R]: the sink's share
        lost = (grad.float() * out.float()).sum(-1)  # [R, heads]
        return *gradients, -(share.T * lost).sum(0).to(sinks.dtype), None, None
