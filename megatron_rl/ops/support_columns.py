"""Logits of rows' supports: the few columns from which a server sampled (megatron_rl/support.py).

Shapes: c rows, W places of a support, V_local this rank's columns. The columns of a support are gathered into a
`[c, W]` matrix, on which the operators of whole rows work. Their gradient is scattered back. So an operator on supports
reads and writes c x W logits instead of c x V_local, and there is no other kernel than those of whole rows.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.ops.library import ops
from megatron_rl.ops.logprobs import VocabShard

INFINITY = float("inf")


class SupportColumns:
    """The columns of some rows' supports.

    logits: `[c, W]`, -inf for padding and for tokens of other ranks' columns.
    labels: `[c]` int64: 0, the sampled token's place; W if another rank has that token; -100 for rows over the whole
      vocabulary.
    """

    def __init__(self, logits: Tensor, support: Tensor, shard: VocabShard, columns: int) -> None:
        """logits: `[c, V_local]`. support: `[c, W]` int32. columns: number of this rank's columns without padding."""
        local = support.long() - shard.start
        is_elsewhere = (support < 0) | (local < 0) | (local >= columns)
        self.places = local.masked_fill(is_elsewhere, 0)
        self.logits = logits.gather(1, self.places).masked_fill_(is_elsewhere, -INFINITY)
        sampled = is_elsewhere[:, 0].long() * support.shape[1]
        self.labels = sampled.masked_fill(support[:, 0] < 0, -100)

    def partials(self, temperature: float, with_entropy: bool) -> Tensor:
        """Return what `logprob_partials` and `logprob_fold` make of the columns: `[1, c, 4]`."""
        given = self.labels, temperature, None
        found = ops.logprob_partials(self.logits, *given, 0, self.logits.shape[1], with_entropy)
        return ops.logprob_fold(found, *given)

    def add_gradient(
        self, out: Tensor, peak: Tensor, log_sum: Tensor, entropy: Tensor, by_logprob: Tensor | None,
        by_entropy: Tensor | None, temperature: float,
    ) -> None:  # fmt: skip
        """Add the gradient to `out` `[c, V_local]`. The other arguments are those of `logprob_grad`."""
        statistics = self.labels, peak, log_sum, entropy, by_logprob, by_entropy
        found = ops.logprob_grad(self.logits, *statistics, temperature, None, 0, self.logits.shape[1])
        # A row's ids differ. Only padding shares a place, and adds 0: the order of the additions does not matter.
        out.scatter_add_(1, self.places, found.to(out.dtype))


def labels_outside(labels: Tensor, support: Tensor | None) -> Tensor:
    """Return the labels of rows over the whole vocabulary, and -100 for rows with a support."""
    return labels if support is None else labels.masked_fill(support[:, 0] >= 0, -100)
