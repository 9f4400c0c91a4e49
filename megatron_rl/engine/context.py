"""Collectives over the context axis that autograd knows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.parallel import Axis


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        gathered = rows.new_empty((axis.size * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=axis.group)
        return gathered

    @staticmethod
    def backward(ctx, grad: Tensor):
        # Every rank's queries have seen these rows, and each knows its own part of their gradient.
        own = grad.new_empty((grad.shape[0] // ctx.axis.size, *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.axis.group)
        return own, None


def gather_rows(rows: Tensor, axis: Axis) -> Tensor:
    """`[R, ...]` of every rank -> `[size * R, ...]` in rank order, for a computation that differs between the ranks.

    The backward adds up what all ranks have computed from this rank's rows.
    """
    return _GatherRows.apply(rows, axis)


class _SumForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor, axis: Axis) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=axis.group)
        return whole

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None  # all ranks go on alike: a sum over them would count one gradient `size` times


def sum_for_all(part: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks, for a computation that is the same on each: its gradient is each part's own already."""
    return part if axis.size == 1 else _SumForAll.apply(part, axis)
