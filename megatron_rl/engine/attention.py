"""Causal attention over packed rows for Megatron's core-attention slot, without Transformer Engine.

CUDA uses torch's variable-length attention kernel. Elsewhere pieces of one shape are attended together with SDPA, so
that a batch costs as many calls as it has different shapes. No padding, and nothing crosses a segment.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_rl.engine.context import gather_rows
from megatron_rl.engine.packed_rows import Alike, PackedRows, has_varlen_kernel
from megatron_rl.engine.rope import Rope, rotate


class PackedAttention(nn.Module):
    """Grouped-query causal attention. query `[R, heads, D]`, key and value `[R, kv_heads, D]` -> `[R, heads * D]`.

    It applies the rotary embedding itself, because rows need not stand in the order of their positions: `rope` is set
    after building, None where the model has applied one. Under context parallelism keys and values are gathered.
    """

    rope: Rope | None = None
    window: int | None = None
    """Most keys that a query sees, itself included; None is all."""

    def __init__(self, config, layer_number, attn_mask_type=None, attention_type=None, softmax_scale=None, **_) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *, packed_seq_params: PackedRows, **_
    ) -> Tensor:
        packed = packed_seq_params
        if self.rope is not None:
            rotation = packed.rotation(self.rope)
            query, key = rotate(query, rotation), rotate(key, rotation)
        if packed.keys is not None:
            both = torch.cat([key, value], dim=-1)  # one gather and one copy, not two of each
            if packed.context.size > 1:
                both = gather_rows(both, packed.context)
            key, value = packed.keys.of_values(both).split([key.shape[-1], value.shape[-1]], dim=-1)
        if has_varlen_kernel(query.device, query.dtype):
            out = self._varlen_kernel(query, key, value, packed)
        else:
            parts = [self._attend(query, key, value, alike) for alike in packed.alike]
            out = parts[0] if packed.unsorted is None else torch.cat(parts).index_select(0, packed.unsorted)
        return out.flatten(1)

    def _varlen_kernel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        repeats, options = query.shape[1] // key.shape[1], {}
        if repeats > 1 and takes_grouped_queries(varlen_attn):
            options["enable_gqa"] = True
        elif repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        width = value.shape[-1]  # narrower than the queries in latent attention; the kernel wants one width
        value = F.pad(value, (0, query.shape[-1] - width))
        out = varlen_attn(
            query,
            key,
            value,
            packed.query_cu,
            packed.key_cu,
            packed.longest_query,
            packed.longest_key,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            scale=self.scale,
            **options,
        )
        return out[..., :width]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, alike: Alike) -> Tensor:
        if alike.queries is not None:
            query = query.index_select(0, alike.queries)
            key, value = key.index_select(0, alike.keys), value.index_select(0, alike.keys)
        q = query.unflatten(0, (-1, alike.n)).transpose(1, 2)  # [pieces * n, heads, D] -> [pieces, heads, n, D]
        k, v = (t.unflatten(0, (-1, alike.m)).transpose(1, 2) for t in (key, value))
        is_windowed = self.window is not None and self.window < alike.m
        is_square = alike.n == alike.m and not is_windowed
        mask = None  # one query sees all of its keys
        if not is_square and (alike.n > 1 or is_windowed):
            # The queries are the last n of the m keys: query i is key m - n + i. (SDPA's is_causal aligns the first.)
            mask = torch.ones(alike.n, alike.m, dtype=torch.bool, device=query.device).tril(alike.m - alike.n)
            if is_windowed:
                mask = mask.triu(alike.m - alike.n - self.window + 1)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_square, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)


@functools.cache
def takes_grouped_queries(attend: Callable) -> bool:
    """Return True if `attend` takes fewer key heads than query heads, which torch's did not before 2.12."""
    return "enable_gqa" in inspect.signature(attend).parameters
