"""Causal attention over packed sequences without Transformer Engine, for Megatron's core-attention slot.

CUDA uses torch's variable-length attention kernel. Elsewhere sequences of one length are attended together with SDPA,
so that a batch costs as many calls as it has different lengths. Nothing crosses `cu_seqlens`, and nothing is padded.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PackedAttention(nn.Module):
    """Grouped-query causal attention. query `[T, heads, D]`, key and value `[T, kv_heads, D]` -> `[T, heads * D]`."""

    def __init__(self, config, layer_number, attn_mask_type=None, attention_type=None, softmax_scale=None, **_) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *, packed_seq_params, **_
    ) -> Tensor:
        cu_seqlens = packed_seq_params.cu_seqlens_q
        if query.is_cuda:
            out = self._varlen_kernel(query, key, value, cu_seqlens, packed_seq_params.max_seqlen_q)
        else:
            out = self._by_length(query, key, value, cu_seqlens)
        return out.reshape(out.shape[0], -1)

    def _varlen_kernel(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:  # torch 2.11's kernel call has no grouped-query option
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        if query.dtype == torch.float32:  # the kernel takes half precision; float32 serves checks against a reference
            return self._by_length(query, key, value, cu_seqlens)
        return varlen_attn(
            query, key, value, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), scale=self.scale
        )

    def _by_length(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
        starts, lengths = cu_seqlens[:-1].tolist(), (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        same_length: dict[int, list[int]] = {}
        for start, length in zip(starts, lengths, strict=True):
            same_length.setdefault(length, []).append(start)
        if len(same_length) == 1:
            return self._attend(query, key, value, next(iter(same_length)))
        rows, parts = [], []
        for length, firsts in same_length.items():
            picked = (torch.tensor(firsts)[:, None] + torch.arange(length)).flatten().to(query.device)
            rows.append(picked)
            parts.append(self._attend(query[picked], key[picked], value[picked], length))
        return torch.cat(parts)[torch.cat(rows).argsort()]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
        q, k, v = (t.reshape(-1, length, t.shape[1], t.shape[2]).transpose(1, 2) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).reshape(query.shape)
