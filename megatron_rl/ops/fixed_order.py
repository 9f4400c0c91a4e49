"""Products, attention and SiLU on the CPU whose bits do not depend on the other rows (rollout.exact).

The order in which a library sums a product depends on the number of rows. So a server that decodes one token and a
trainer that reads a microbatch differ by rounding. Here each element is summed in one order, for any number of rows or
threads. All tensors are float32; gradients are those of torch's operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.ops.library import ops


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` without a gradient. x `[..., K]`, weight `[N, K]` -> `[..., N]`."""
    with torch.no_grad():
        out = ops.fixed_order_linear(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))
        return out if bias is None else out.add_(bias)


def logits(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute `hidden @ weight.T` in place of `ops.head.head_logits`. The buffer `out` is not used."""
    return linear(hidden, weight)


def attention(
    query: Tensor, key: Tensor, value: Tensor, query_bounds: Tensor, key_bounds: Tensor, scale: float
) -> Tensor:
    """Return causal attention `[n, heads, E]` over packed sequences, without a gradient.

    query `[n, heads, D]`, key `[m, kv_heads, D]`, value `[m, kv_heads, E]`. query_bounds, key_bounds: the boundaries of
    the sequences, as int64 prefix sums from 0 to n and from 0 to m. A sequence may have more keys than queries. Its
    queries then belong to the last of its keys.
    """
    with torch.no_grad():
        return ops.fixed_order_attention(query, key, value, query_bounds, key_bounds, scale)


def silu(x: Tensor) -> Tensor:
    """Return `x / (1 + exp(-x))`, with the gradient of torch's SiLU."""
    with torch.no_grad():
        out = ops.fixed_order_silu(x.reshape(-1, x.shape[-1])).view(x.shape)
    return with_value(F.silu(x), out) if torch.is_grad_enabled() and x.requires_grad else out


def cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of float32 angles.

    In float32, torch's vectorised loop and its loop for the rest of a tensor round differently.
    """
    return angles.double().cos().float(), angles.double().sin().float()


def with_value(ordinary: Tensor, value: Tensor) -> Tensor:
    """Return a tensor with the values of `value` and the gradient of `ordinary`, which has the same shape."""
    found: Tensor = _WithValue.apply(ordinary, value)
    return found


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ordinary: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
