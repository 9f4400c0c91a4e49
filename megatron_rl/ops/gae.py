"""Generalized advantage estimation over packed sequences. Entry t of every `[N]` tensor belongs to token t."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.ops.library import ops


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    discount: float,
    trace_decay: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute A_t = delta_t + discount * trace_decay * A_t', delta_t = r_t + discount * V_t' - V_t (arXiv 1506.02438).

    t' is the next trained token of the same sequence. Untrained tokens, such as a tool's answer between two turns,
    are skipped: they do not count in the discount, and their rewards and values are ignored.

    rewards, values, mask: `[N]`; `values[t]` is the value of the state in which token t was chosen.
    bootstrap: `[B]` values after the last trained tokens, for cut-off sequences; 0 by default.
    cu_seqlens: `[B + 1]`, ascending from 0 to N; checked on the CPU only.

    Returns (advantages, returns), both `[N]` in the values' dtype (float32, on the CPU also float64) and 0 for
    untrained tokens; returns = advantages + values. Sums are float64. Not differentiable.
    """
    for name, tensor in (("rewards", rewards), ("mask", mask)):
        if tensor.shape != values.shape or values.ndim != 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, values {tuple(values.shape)}: both must be [N].")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}: it must be [B + 1], from 0 to N.")
    if bootstrap is not None and bootstrap.shape != (len(cu_seqlens) - 1,):
        raise ValueError(f"bootstrap has shape {tuple(bootstrap.shape)}: {len(cu_seqlens) - 1} sequences need as many.")
    dtype = values.dtype
    after = None if bootstrap is None else bootstrap.detach().to(dtype).contiguous()
    return ops.packed_gae(
        rewards.detach().to(dtype).contiguous(),
        values.detach().contiguous(),
        mask.to(torch.bool).contiguous(),
        cu_seqlens.to(torch.int64).contiguous(),
        after,
        discount,
        trace_decay,
    )


def packed_discounted_returns(
    rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, *, discount: float, bootstrap: Tensor | None = None
) -> Tensor:
    """Compute R_t = r_t + discount * R_t' over trained tokens, `[N]` in the rewards' dtype. See `packed_gae`."""
    zeros = torch.zeros_like(rewards)  # with V = 0 and trace_decay = 1 the advantage is the discounted return
    return packed_gae(rewards, zeros, mask, cu_seqlens, discount=discount, trace_decay=1.0, bootstrap=bootstrap)[1]
