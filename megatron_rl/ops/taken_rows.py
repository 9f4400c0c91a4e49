"""Takes rows of a tensor, some of them several times, and adds up their gradients in a fixed order.

torch's own gradient of `index_select` adds in the tensor's dtype and, on CUDA, in whatever order threads come: of
bfloat16 keys that sixteen replies share, other digits in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TakenRows(NamedTuple):
    """Which rows are taken, and the way back.

    rows: `[K]` int64. back: for each number m of times that a row is taken, these rows `[P]` and where they are in
    `rows`, `[P * m]`, the m places of a row in rising order.
    """

    rows: Tensor
    back: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, rows: Tensor) -> TakenRows:
        """Find the way back, on the host."""
        times = torch.bincount(rows)
        order, starts = rows.argsort(stable=True), times.cumsum(0) - times
        back = []
        for m in times.unique().tolist():
            chosen = (times == m).nonzero()[:, 0]
            back.append((chosen, order[(starts[chosen, None] + torch.arange(m)).flatten()]))
        return cls(rows, [part for part in back if len(part[1])])

    def of_values(self, values: Tensor) -> Tensor:
        """`[N, ...]` -> `[K, ...]`. The gradient is summed in float32, or in float64 where it is."""
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
            total.index_copy_(0, rows, part)  # no row twice: the order does not show
        return total, None
