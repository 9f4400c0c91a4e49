"""Differentiable collectives over the context axis."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.parallel import Axis


class Gathering:
    """All-gather of rows `[R, ...]` over the context axis. The work between its start and `rows()` overlaps with it.

    The same holds in the backward pass.

        gathering = Gathering(keys, context)
        queries = project(hidden)
        keys = gathering.rows()  # [size * R, ...] in rank order
    """

    def __init__(self, own: Tensor, axis: Axis) -> None:
        self.axis = axis
        self.under_way: dist.Work | None = None
        self.gradient: Tensor | None = None
        self._gathered: Tensor | None = own if axis.size == 1 else _Start.apply(own, self)

    def rows(self) -> Tensor:
        """Wait for the gathered rows and return them. May be called only once."""
        gathered, self._gathered = self._gathered, None  # its graph refers to this object; avoids a reference cycle
        return gathered if self.axis.size == 1 else _Arrive.apply(gathered, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: Tensor, gathering: Gathering) -> Tensor:
        ctx.gathering, axis = gathering, gathering.axis
        gathered = own.new_empty((axis.size * own.shape[0], *own.shape[1:]))
        gathering.under_way = dist.all_gather_into_tensor(gathered, own.contiguous(), group=axis.group, async_op=True)
        return gathered

    @staticmethod
    def backward(ctx, _: Tensor):
        ctx.gathering.under_way.wait()
        return ctx.gathering.gradient, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gathered: Tensor, gathering: Gathering) -> Tensor:
        ctx.gathering = gathering
        gathering.under_way.wait()
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # Every rank's queries attend to these rows, and each rank has its own part of their gradient.
        axis, grad = ctx.gathering.axis, grad.contiguous()
        own = ctx.gathering.gradient = grad.new_empty((grad.shape[0] // axis.size, *grad.shape[1:]))
        ctx.gathering.under_way = dist.reduce_scatter_tensor(own, grad, group=axis.group, async_op=True)
        return grad, None  # keeps `grad` alive until the reduction is done


class _SumForAll(torch.autograd.Function):
    """Sum over ranks, in place of Megatron's function.

    Autograd takes the output of Megatron's function for a view. This function's output is none, because a user's loss
    may change it in place.
    """

    @staticmethod
    def forward(ctx, part: Tensor, axis: Axis) -> Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=axis.group)
        return whole

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None  # not summed: every rank has the whole gradient


def sum_for_all(part: Tensor, axis: Axis) -> Tensor:
    """Sum `part` over the ranks. The sum is for a computation that is the same on all ranks, and so is its gradient."""
    return part if axis.size == 1 else _SumForAll.apply(part, axis)
