"""The head, which computes logits, log-probs, a loss or values from the last stage's hidden states.

Each context rank computes the head on its own R rows. It gets the results of all T rows, which the loss reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl import ops, support
from megatron_rl.api import LogprobLoss
from megatron_rl.engine.context import sum_for_all
from megatron_rl.engine.packed_rows import PackedRows
from megatron_rl.ops import Cut, KeptTokens, TopTokens, VocabParallelLogits, VocabShard
from megatron_rl.ops.head import CHUNKS_OF_TERM, LogitsTerm, Product, head_logits, pick, rows_of_chunk
from megatron_rl.ops.library import accumulator
from megatron_rl.parallel import Axis


class Head:
    """The output head of the last stage.

    `weight()` returns the current weight: the rows of the vocabulary that `shard` names, then padding.
    """

    def __init__(
        self, stage: Any, weight: Callable[[], Tensor], shard: VocabShard, context: Axis, product: Product = head_logits
    ) -> None:
        self.stage, self.weight, self.shard, self.context, self.product = stage, weight, shard, context, product

    def logits(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """Return `[T, V_local]` float32 logits without padded columns, for losses that need whole logits."""
        weight = self.weight()[: self.shard.stop - self.shard.start]
        logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight).float()
        return VocabParallelLogits.wrap(self._for_loss(logits, packed), self.shard)

    def logprobs(
        self, hidden: Tensor, rows: Mapping[str, Tensor], packed: PackedRows, temperature: float,
        with_entropy: bool = True,
    ) -> Tensor:  # fmt: skip
        """Return log p(label) and, if `with_entropy`, the entropy: `[1 or 2, T]` float32.

        rows: a microbatch's columns. They must include `labels`, and also `support` and `adjustment` if servers sample
        from a part of the vocabulary or change logits.
        """
        options = self._weight() | self._rows(packed, temperature) | {"with_entropy": with_entropy}
        parts = ops.lm_head_logprobs(hidden, labels=rows["labels"], **_support(rows), **options)
        # Each row is computed on one context rank and is 0 on the others.
        return sum_for_all(torch.stack(parts[: 1 + with_entropy]), self.context)

    def logprob_loss(
        self, loss: LogprobLoss, hidden: Tensor, rows: TensorDict, packed: PackedRows, term: LogitsTerm | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the loss sum, its statistics and the `[T]` log-probs from which it was computed.

        term: an additional loss term on whole logits, made by `loss.beside` for these rows.
        """
        if loss.by_row and torch.is_grad_enabled():
            return self._loss_of_rows(loss, hidden, rows, packed, term)
        logprobs, entropy = self.logprobs(hidden, rows, packed, loss.temperature)
        loss_sum, sums = loss.fn(logprobs, entropy, rows)
        if term is not None:  # the term recomputes the logits
            alone = LogprobLoss(lambda logprobs, *_: (0.0 * logprobs.sum(), {}), loss.temperature)
            more, of_term, _ = self._loss_of_rows(alone, hidden, rows, packed, term)
            loss_sum, sums = loss_sum + more, sums | of_term
        return loss_sum, sums, logprobs.detach().float()

    def _loss_of_rows(
        self, loss: LogprobLoss, hidden: Tensor, rows: TensorDict, packed: PackedRows, term: LogitsTerm | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Do what `logprob_loss` does, for a loss that is a sum over rows. The same pass computes the gradient."""
        labels = rows["labels"]
        found = torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
        # A column per sequence may have as many entries, but a loss by row reads none.
        columns = {name: column for name, column in rows.items() if column.shape == labels.shape}

        def of_some(logprobs: Tensor, entropy: Tensor, places: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            found.index_copy_(0, places, logprobs.detach().float())
            chosen = TensorDict({name: column.index_select(0, places) for name, column in columns.items()})
            return loss.fn(logprobs, entropy, chosen)

        options = self._weight() | self._rows(packed, loss.temperature) | _support(rows)
        loss_sum, sums = ops.lm_head_loss(hidden, labels=labels, loss=of_some, term=term, **options)
        if self.context.size == 1:
            return loss_sum, sums, found
        parts = sum_for_all(torch.stack([loss_sum.double(), *sums.values()]), self.context)
        whole = dict(zip(sums, parts[1:].unbind(), strict=True))
        return parts[0].to(loss_sum.dtype), whole, sum_for_all(found, self.context)

    def values(self, hidden: Tensor, labels: Tensor, packed: PackedRows) -> Tensor:
        """Return `[T]` float32 values, 0 in untrained rows."""
        return self._for_loss(self.stage.output_layer(hidden), packed).masked_fill(labels < 0, 0.0)

    def states(self, hidden: Tensor, packed: PackedRows, trained: Tensor) -> Tensor:
        """Return the hidden states `[n, H]` from which the trained rows are predicted, on every context rank.

        trained: `[n]`, the indices of these rows.
        """
        return self._for_loss(hidden, packed).index_select(0, trained)

    def top(self, states: Tensor, count: int, temperature: float) -> TopTokens:
        """Return the `count` most likely tokens after each state. It works in chunks, because logits are large."""
        weight, size = self._whole_rows()
        parts = [
            ops.top_tokens(head_logits(some, weight).float(), count, self.shard, temperature)
            for some in states.to(weight.dtype).split(size)
        ]
        return TopTokens(torch.cat([part.tokens for part in parts]), torch.cat([part.logprobs for part in parts]))

    def kept(self, hidden: Tensor, labels: Tensor, packed: PackedRows, cut: Cut, temperature: float) -> KeptTokens:
        """Return the tokens that the sampling options `cut` keep in each of the T rows, on every context rank.

        Rows without a label have no tokens.
        """
        weight, size = self._whole_rows()
        picked = pick(hidden, packed.predicting, packed.trained, weight.dtype)
        # Other context ranks have the other rows, so that ids are counted from 1 and added up.
        ids = torch.zeros(len(labels), cut.width, dtype=torch.int32, device=hidden.device)
        log_mass = torch.zeros(len(labels), dtype=accumulator(weight.dtype), device=hidden.device)
        is_outside = torch.zeros(len(labels), dtype=torch.int32, device=hidden.device)
        for some, places in zip(picked.split(size), packed.trained.split(size), strict=True):
            logits = self.product(some, weight, None).to(accumulator(weight.dtype))
            found = ops.kept_tokens(logits, labels.index_select(0, places), cut, self.shard, temperature)
            ids.index_copy_(0, places, found.ids + 1)
            log_mass.index_copy_(0, places, found.log_mass)
            is_outside.index_copy_(0, places, found.is_outside.int())
        ids, log_mass, is_outside = (sum_for_all(part, self.context) for part in (ids, log_mass, is_outside))
        return KeptTokens(ids - 1, log_mass, is_outside.bool())

    def _whole_rows(self) -> tuple[Tensor, int]:
        """Return the weight without its padding, and the number of rows whose whole logits are computed at a time."""
        weight = self.weight()
        # Padding counts: tensor ranks have different amounts of it, and communicate in each chunk.
        return weight[: self.shard.stop - self.shard.start], rows_of_chunk(CHUNKS_OF_TERM * len(weight))

    def _weight(self) -> dict[str, Tensor]:
        """Return the weight and, during training, the buffer of megatron.core to which the weight's gradient is added.

        The keys are the names of arguments of `lm_head_loss`.
        """
        weight = self.weight()
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return {"weight": weight}
        if self.stage.pre_process and self.stage.share_embeddings_and_output_weights:
            # Tied to the embedding: Megatron's hook must still add autograd's gradient, which is the embedding's alone.
            return {"weight": weight.detach(), "main_grad": weight.main_grad}
        weight.grad_added_to_main_grad = True  # Megatron's hook then ignores autograd's gradient until the next step
        return {"weight": weight, "main_grad": weight.main_grad}

    def _rows(self, packed: PackedRows, temperature: float) -> dict[str, Any]:
        columns = {"shard": self.shard, "temperature": temperature, "product": self.product}
        return {"rows": packed.predicting, "kept": packed.trained} | columns

    def _for_loss(self, values: Tensor, packed: PackedRows) -> Tensor:
        """Combine the rows `[R, ...]` of all context ranks into the rows `[T, ...]` that the loss reads.

        Every context rank gets the result.
        """
        if packed.in_order:
            return values[: len(packed.reads)]  # a view without the padding, not a copy
        missing = (packed.reads < 0).view(-1, *[1] * (values.ndim - 1))
        own = values.index_select(0, packed.reads.clamp_min(0)).masked_fill(missing, 0.0)
        return sum_for_all(own, self.context)


def _support(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    known = rows.keys()  # a TensorDict has no `in`
    return {name: rows[name] for name in (support.COLUMN, support.ADJUSTMENT) if name in known}
