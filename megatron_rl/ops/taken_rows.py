"""Gathers rows of a tensor, possibly repeatedly, and sums their gradients in a fixed order.

The gradient of torch's `index_select` is summed in the tensor's dtype and, on CUDA, in arbitrary thread order. For
bfloat16 keys that sixteen replies share, the gradient's lowest bits would differ from run to run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TakenRows(NamedTuple):
    """Which rows to gather, and the inverse map, which the gradient needs.

    rows: `[K]` int64, the index of each row to gather.
    back: for each number m such that some row is taken m times: the indices `[P]` of the P rows taken m times, and
      their positions in `rows`, `[P * m]`. Each of the P rows has m consecutive, ascending entries there.
    """

    rows: Tensor
    back: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, rows: Tensor) -> TakenRows:
        times = torch.bincount(rows)
        order, starts = rows.argsort(stable=True), times.cumsum(0) - times
        back = []
        for m in times.unique().tolist():
            chosen = (times == m).nonzero()[:, 0]
            back.append((chosen, order[(starts[chosen, None] + torch.arange(m)).flatten()]))
        return cls(rows, [part for part in back if len(part[1])])

    def of_values(self, values: Tensor) -> Tensor:
        """Gather rows: `[N, ...]` -> `[K, ...]`. The gradients are summed in at least float32."""
        return _Take.apply(values, self)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, taken: TakenRows) -> Tensor:
        ctx.taken, ctx.count = taken, len(values)
        return values.index_select(0, taken.rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        total = grad.new_zeros((ctx.count, *grad.shape[1:]))
        dtype = torch.promote_types(grad.dtype, torch.float32)
        for rows, places in ctx.taken.back:
            part = grad.index_select(0, places)
            if len(places) > len(rows):
                part = part.unflatten(0, (len(rows), -1)).sum(1, dtype=dtype).to(grad.dtype)
            total.index_copy_(0, rows, part)  # rows are unique, so order has no effect
        return total, None
