"""Causal attention over packed rows for Megatron's core-attention slot.

On CUDA in 16-bit dtypes, it uses the variable-length kernel of torch or of Transformer Engine. If the shared keys of
forked dialogues are not copied, it uses FlexAttention instead (forks.py). In all other cases, it makes one SDPA call
for each group of equally shaped pieces (packed_rows.py).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from megatron_rl.engine import forks
from megatron_rl.engine.context import Gathering
from megatron_rl.engine.packed_rows import Alike, PackedRows, has_varlen_kernel
from megatron_rl.engine.rope import Rope, rotate
from megatron_rl.engine.sharded_module import ShardedModule
from megatron_rl.ops import fixed_order


class PackedAttention(nn.Module):
    """Grouped-query causal attention. query `[R, heads, D]`, key and value `[R, kv_heads, D]` -> `[R, heads * D]`.

    It applies the rotary embedding itself, because the rows of a sequence need not be in the order of their positions.
    Under context parallelism, it gathers keys and values. The attributes below are set after the model is built.
    """

    rope: Rope | None = None  # None if queries and keys arrive already rotated
    expand: Callable[[Tensor, PackedRows], tuple[Tensor, Tensor]] | None = None
    """Function that forms keys and values from the compressed keys of latent attention; None for other attention."""
    window: int | None = None
    """Maximum number of keys that a query attends to, its own included. None: no limit."""
    in_fixed_order = False  # True to sum in the order of ops/fixed_order.py
    uses_transformer_engine = False

    def __init__(self, config, layer_number, attn_mask_type=None, attention_type=None, softmax_scale=None, **_) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *, packed_seq_params: PackedRows, **_
    ) -> Tensor:
        packed = packed_seq_params
        if self.expand is not None:
            key, value = self.expand(key, packed)
        elif packed.keys is None and packed.context.size == 1:
            query, key = self._rotated(query, packed), self._rotated(key, packed)
        else:
            # One gather and one copy for keys and values together. Queries are rotated during the gather.
            gathering = Gathering(torch.cat([self._rotated(key, packed), value], dim=-1), packed.context)
            query = self._rotated(query, packed)
            rows = gathering.rows()
            taken = rows if packed.keys is None else packed.keys.of_values(rows)
            key, value = taken.split([key.shape[-1], value.shape[-1]], dim=-1)
        if packed.forks is not None:
            out = self._in_place(query, key, value, packed)
        elif has_varlen_kernel(query.device, query.dtype):
            attend = self._transformer_engine if self.uses_transformer_engine else self._varlen_kernel
            out = attend(query, key, value, packed)
        else:
            out = self._by_shape(query, key, value, packed)
        return out.flatten(1)

    def _rotated(self, x: Tensor, packed: PackedRows) -> Tensor:
        return x if self.rope is None else rotate(x, packed.rotation(self.rope))

    @property
    def _bounds(self) -> tuple[int, int]:
        """Return how many keys a query attends to before its own key, and how many after it. -1 means no limit."""
        return -1 if self.window is None else self.window - 1, 0

    def _transformer_engine(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        attend = transformer_engine_attention(query.shape[1], key.shape[1], key.shape[2], value.shape[2], self.scale)
        return attend(
            query,
            key,
            value,
            cu_seqlens_q=packed.query_cu,
            cu_seqlens_kv=packed.key_cu,
            max_seqlen_q=packed.longest_query,
            max_seqlen_kv=packed.longest_key,
            window_size=self._bounds,
        )

    def _varlen_kernel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        repeats, options = query.shape[1] // key.shape[1], {}
        if repeats > 1 and takes_grouped_queries(varlen_attn):
            options["enable_gqa"] = True
        elif repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        width = value.shape[-1]  # narrower than the queries in latent attention, but the kernel requires equal widths
        is_narrow = width < query.shape[-1]
        if is_narrow:  # even an empty pad copies, and so does the gradient of a full slice
            value = F.pad(value, (0, query.shape[-1] - width))
        out = varlen_attn(
            query,
            key,
            value,
            packed.query_cu,
            packed.key_cu,
            packed.longest_query,
            packed.longest_key,
            window_size=self._bounds,
            scale=self.scale,
            **options,
        )
        return out[..., :width] if is_narrow else out

    def _in_place(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        return forks.attend(query, key, value, self._blocks(packed), self.scale)[0]

    def _blocks(self, packed: PackedRows) -> BlockMask:
        return packed.once(("blocks", self.window), lambda: packed.forks.blocks(self.window))

    def _by_shape(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        if packed.queries is not None:
            query = packed.queries.of_values(query)
        queries = query.split([alike.pieces * alike.n for alike in packed.alike])
        keys, values = (t.split([alike.pieces * alike.m for alike in packed.alike]) for t in (key, value))
        parts = list(map(self._attend, queries, keys, values, packed.alike))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if packed.unsorted is None else packed.unsorted.of_values(out)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, alike: Alike) -> Tensor:
        q = query.unflatten(0, (-1, alike.n)).transpose(1, 2)  # [pieces * n, heads, D] -> [pieces, heads, n, D]
        k, v = (t.unflatten(0, (-1, alike.m)).transpose(1, 2) for t in (key, value))
        is_windowed = self.window is not None and self.window < alike.m
        is_square = alike.n == alike.m and not is_windowed
        mask = None  # a single query attends to all of its keys
        if not is_square and (alike.n > 1 or is_windowed):
            # The queries are the last n of the m keys. SDPA's is_causal would align them with the first keys.
            mask = torch.ones(alike.n, alike.m, dtype=torch.bool, device=query.device).tril(alike.m - alike.n)
            if is_windowed:
                mask = mask.triu(alike.m - alike.n - self.window + 1)
        out = self._dense(q, k, v, mask, is_square).transpose(1, 2).flatten(0, 1)
        if not self.in_fixed_order:
            return out
        bounds = (torch.arange(alike.pieces + 1) * rows for rows in (alike.n, alike.m))
        return fixed_order.with_value(out, fixed_order.attention(query, key, value, *bounds, self.scale))

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Compute dense attention of `[pieces, heads, rows, D]` tensors. mask: `[n, m]`, True for visible keys."""
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=self.scale, enable_gqa=is_grouped
        )


class SinkAttention(ShardedModule, PackedAttention):
    """PackedAttention with sinks (GPT-OSS). A sink is a learned logit per head in the softmax, which stands for no key.

    Kernels divide by the sum of exp(score) without exp(sink). Their results are therefore multiplied by the ratio of
    this sum to the sum with the sink.
    """

    cut = ("sinks",)

    def __init__(self, config: Any, layer_number: int, *args: Any, pg_collection: Any, **options: Any) -> None:
        super().__init__(config, layer_number, *args, **options)
        self.tp_group = pg_collection.tp
        heads = config.num_attention_heads // self.tp_group.size()
        self.sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Compute dense attention with one more key, whose values are zeros and whose score is the sink.

        The additive mask gives the key this score. The arguments are as in `PackedAttention._dense`.
        """
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
    """Attention with sinks, computed with a kernel that has none. The kernel is given as two functions.

    query: `[R, heads, D]`; key, value: `[K, kv_heads, D]`; sinks: `[heads]`.
    forward: (query, key, value) -> (result `[R, heads, D]`, log of the softmax's sum `[heads, R]` float32, kernel
      state).
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


@functools.cache
def transformer_engine_attention(heads: int, kv_heads: int, width: int, value_width: int, scale: float) -> nn.Module:
    """Return Transformer Engine's attention over packed rows. Layers share one module, because it has no parameters."""
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads,
        (width, value_width),  # unequal in latent attention; some of its kernels then need no padding
        num_gqa_groups=kv_heads,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",  # a piece's queries are the last of its keys
        attention_type="cross",
        softmax_scale=scale,
    )


@functools.cache
def takes_grouped_queries(attend: Callable) -> bool:
    """Return True if the function `attend` supports fewer key heads than query heads.

    torch's function does from torch 2.12 on.
    """
    return "enable_gqa" in inspect.signature(attend).parameters
