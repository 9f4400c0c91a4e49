"""Generalised advantage estimation over packed sequences. Entry t of every `[N]` tensor belongs to token t."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.types import TrajectoryBatch


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
    """A_t = delta_t + discount * trace_decay * A_t', delta_t = r_t + discount * V_t' - V_t (arXiv 1506.02438).

    rewards, values, mask: `[N]`; `values[t]` is the value of the state in which token t was chosen. t' is the next
    trained token of the same sequence: a tool's answer between two turns costs no discount, and its rewards and values
    do not count. bootstrap: `[B]` values after the last trained tokens, for sequences that were cut off; else 0.

    Returns (advantages, returns), `[N]` in the values' dtype, 0 where the mask is; returns are advantages + values. The
    recurrence is solved by doubling, in float64: log2(longest) passes over the trained tokens, no loop over them.
    """
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    trained = mask.nonzero()[:, 0]
    if len(trained) == 0:
        return advantages, returns
    sequence = torch.bucketize(trained, cu_seqlens[1:], right=True)
    counts = torch.bincount(sequence, minlength=len(cu_seqlens) - 1)
    following = counts.cumsum(0)[sequence] - 1 - torch.arange(len(trained), device=trained.device)  # in the sequence
    value = values[trained].double()
    after = torch.zeros(len(counts), device=value.device) if bootstrap is None else bootstrap
    next_value = torch.where(following > 0, torch.cat([value[1:], value[:1]]), after.double()[sequence])
    sums = rewards[trained].double() + discount * next_value - value
    step, decay = 1, discount * trace_decay
    while step < int(counts.max()):  # sums[i] holds the decayed deltas of i and the `step` - 1 tokens after it
        later = torch.cat([sums[step:], sums[:step]]).masked_fill(following < step, 0.0)
        sums = sums + decay * later
        step, decay = 2 * step, decay * decay
    advantages[trained] = sums.to(values.dtype)
    returns[trained] = (sums + value).to(values.dtype)
    return advantages, returns


def rewards_at_the_end(batch: TrajectoryBatch) -> Tensor:
    """Return `[N]` float32: each trajectory's reward on its last trained token. One without any gets none."""
    trained = batch["loss_mask"].nonzero()[:, 0]
    sequence = batch.sequence_ids[trained]
    is_last = torch.ones(len(trained), dtype=torch.bool)
    is_last[:-1] = sequence[1:] != sequence[:-1]
    rewards = torch.zeros(len(batch["loss_mask"]))
    rewards[trained[is_last]] = batch["rewards"][sequence[is_last]].float()
    return rewards


def whiten(advantages: Tensor, mask: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(A - mean) / (std + eps) over the trained tokens of the whole batch, 0 elsewhere; std is the population's."""
    trained = advantages[mask].double()
    result = torch.zeros_like(advantages)
    if len(trained) > 0:
        result[mask] = ((trained - trained.mean()) / (trained.std(correction=0) + eps)).to(advantages.dtype)
    return result
