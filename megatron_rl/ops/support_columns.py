"""The logits of supports: the few columns from which a server sampled (megatron_rl/support.py).

Shapes: c rows, W places of a support, V_local columns on this rank. The columns of a support are gathered into a `[c,
W]` matrix, to which the operators for whole rows are applied. The matrix's gradient is scattered back. Penalties and
biases change the gathered logits. In rows over the whole vocabulary they change some columns of the logits themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.ops.library import accumulator, ops
from megatron_rl.ops.logprobs import VocabShard


@dataclass(frozen=True)
class Supports:
    """The supports of c rows: `ids` `[c, W]` int32, and `adjustment` `[c, W, P]` float32.

    The adjustment is None if no logit is changed.
    """

    ids: Tensor
    adjustment: Tensor | None = None

    def __getitem__(self, rows: slice) -> Supports:
        return Supports(self.ids[rows], None if self.adjustment is None else self.adjustment[rows])

    @property
    def is_whole(self) -> Tensor:
        """`[c]` bool: True for rows whose support is the whole vocabulary."""
        return self.ids[:, 0] < 0


def adjusted(logits: Tensor, adjustment: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the logits changed by `adjustment` `[*shape, P]`, and the derivative of this change; None if it is 1."""
    before, *more = adjustment.to(logits.dtype).unbind(-1)
    found = logits + before
    if not more:
        return found, None
    penalty, after = more
    penalty = penalty.masked_fill(penalty == 0, 1.0)
    is_below = found < 0
    found = torch.where(is_below, found * penalty, found / penalty)
    return found + after, torch.where(is_below, penalty, 1.0 / penalty)


class SupportColumns:
    """The columns of the supports of some rows, with adjusted logits.

    logits: `[c, W]`, -inf for padding and for tokens of other ranks' columns.
    labels: `[c]` int64, the place of each row's sampled token in its support: 0 if this rank has the token's column, W
      (no place) if another rank has it. -100 for rows whose support is the whole vocabulary.
    """

    def __init__(self, logits: Tensor, support: Supports, shard: VocabShard, columns: int) -> None:
        """Gather the columns from the logits `[c, V_local]`. columns: number of this rank's columns without padding."""
        ids = support.ids
        local = ids.long() - shard.start
        is_elsewhere = (ids < 0) | (local < 0) | (local >= columns)
        self.places = local.masked_fill(is_elsewhere, 0)
        self.logits, self.slope = logits.gather(1, self.places), None
        if support.adjustment is not None:  # in float32, as servers adjust logits of 16-bit models
            wide = self.logits.to(accumulator(logits.dtype))
            self.logits, self.slope = adjusted(wide, support.adjustment)
        self.logits.masked_fill_(is_elsewhere, -torch.inf)
        sampled = is_elsewhere[:, 0].long() * ids.shape[1]
        self.labels = sampled.masked_fill(support.is_whole, -100)

    def partials(self, temperature: float, with_entropy: bool) -> Tensor:
        """Return the partial results of the gathered columns, `[1, c, 4]`, for `logprob_finish`."""
        given = self.labels, temperature, None
        found = ops.logprob_partials(self.logits, *given, 0, self.logits.shape[1], with_entropy)
        return ops.logprob_fold(found, *given)

    def add_gradient(
        self, out: Tensor, peak: Tensor, log_sum: Tensor, entropy: Tensor, by_logprob: Tensor | None,
        by_entropy: Tensor | None, temperature: float,
    ) -> None:  # fmt: skip
        statistics = self.labels, peak, log_sum, entropy, by_logprob, by_entropy
        found = ops.logprob_grad(self.logits, *statistics, temperature, None, 0, self.logits.shape[1])
        if self.slope is not None:
            found = found * self.slope
        # A row's ids differ. Only padding shares a place, and adds 0: the order of the additions does not matter.
        out.scatter_add_(1, self.places, found.to(out.dtype))


class ChangedColumns:
    """The columns that penalties and biases change, in rows whose support is the whole vocabulary.

    The constructor changes the logits, which must be at least float32, in place. Other rows stay as they are. Rows with
    fewer changed columns than others repeat their first one, so that writing it again changes nothing.
    """

    def __init__(self, logits: Tensor, support: Supports, shard: VocabShard, columns: int) -> None:
        assert support.adjustment is not None
        local = support.ids.long() - shard.start
        is_here = (support.ids >= 0) & (local >= 0) & (local < columns) & support.is_whole[:, None]
        first = is_here.byte().argmax(1, keepdim=True)
        place = torch.arange(local.shape[1], device=local.device).where(is_here, first)
        self.places = local.masked_fill(~is_here, 0).gather(1, place)
        changes = support.adjustment.masked_fill(~is_here[:, :, None], 0.0)
        changes = changes.gather(1, place[:, :, None].expand_as(changes))
        old = logits.gather(1, self.places)
        new, self.slope = adjusted(old, changes)
        logits.scatter_(1, self.places, new)

    def scale_gradient(self, out: Tensor) -> None:
        """Convert a gradient `[c, V_local]` by the changed logits to one by the original logits, in place."""
        if self.slope is not None:
            scaled = out.gather(1, self.places) * self.slope
            out.scatter_(1, self.places, scaled.to(out.dtype))


def changed_columns(
    logits: Tensor, support: Supports | None, shard: VocabShard | None, columns: int
) -> tuple[Tensor, ChangedColumns | None]:
    """Apply penalties and biases to rows over the whole vocabulary. Returns the logits, and the columns changed.

    The logits are changed in place, except 16-bit ones (on a CPU), which are copied to float32 first. The columns are
    None if no logit is changed.
    """
    if support is None or support.adjustment is None:
        return logits, None
    assert shard is not None
    logits = logits.to(accumulator(logits.dtype))
    return logits, ChangedColumns(logits, support, shard, columns)


def labels_outside(labels: Tensor, support: Supports | None) -> Tensor:
    """Return the labels, with -100 for each row whose support is not the whole vocabulary."""
    return labels if support is None else labels.masked_fill(~support.is_whole, -100)
