"""Operators on packed sequences: labels and positions, advantages and discounted returns."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.ops.library import ops

# The fakes give torch.compile the shapes and dtypes that it needs to trace without computing.


@torch.library.register_fake("megatron_rl::packed_labels")
def _(input_ids, cu_seqlens, loss_mask):
    return tuple(torch.empty_like(input_ids) for _ in range(3))


@torch.library.register_fake("megatron_rl::packed_gae")
def _(rewards, values, mask, cu_seqlens, bootstrap, discount, trace_decay):
    return torch.empty_like(values), torch.empty_like(values)


def packed_labels(
    input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (labels, positions, sequence_ids), all `[T]` int64, for input_ids `[T]` packed as in cu_seqlens.

    A row's label is the next token of its sequence. It is -100 at the end of a sequence, and where loss_mask (`[T]`
    bool) is False for the next token. cu_seqlens: `[B + 1]`, ascending from 0 to T; checked on the CPU only.
    """
    if input_ids.ndim != 1 or input_ids.dtype != torch.int64:
        raise ValueError(f"input_ids is {input_ids.dtype} {tuple(input_ids.shape)}: it must be [T] int64.")
    if loss_mask is not None and (loss_mask.shape != input_ids.shape or loss_mask.dtype != torch.bool):
        raise ValueError(
            f"loss_mask is {loss_mask.dtype} {tuple(loss_mask.shape)}: it must be bool {tuple(input_ids.shape)}."
        )
    mask = None if loss_mask is None else loss_mask.contiguous()
    return ops.packed_labels(input_ids.contiguous(), cu_seqlens.to(torch.int64).contiguous(), mask)


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
    return ops.packed_gae(
        rewards.detach().to(dtype).contiguous(),
        values.detach().contiguous(),
        mask.to(torch.bool).contiguous(),
        cu_seqlens.to(torch.int64).contiguous(),
        None if bootstrap is None else bootstrap.detach().to(dtype).contiguous(),
        discount,
        trace_decay,
    )


def packed_discounted_returns(
    rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, *, discount: float, bootstrap: Tensor | None = None
) -> Tensor:
    """Compute R_t = r_t + discount * R_t', t' the next trained token: `[N]` in the rewards' dtype.

    The arguments are those of `packed_gae`. Untrained tokens are skipped, and get 0.
    """
    zeros = torch.zeros_like(rewards)  # with V = 0 and trace_decay = 1 the advantage is the discounted return
    return packed_gae(rewards, zeros, mask, cu_seqlens, discount=discount, trace_decay=1.0, bootstrap=bootstrap)[1]
