"""Reverse KL divergence, KL(policy || teacher), over the vocabulary, and its gradient, in chunks of rows.

The vocabulary may be split over the tensor-parallel ranks. Shapes: T rows of a microbatch, c rows of a chunk, n tokens
that a teacher scored, K top tokens of the teacher, hidden size H. `columns` is the number of this rank's columns of the
vocabulary, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.ops.head import head_logits
from megatron_rl.ops.library import accumulator
from megatron_rl.ops.logprobs import VocabShard, gather_partials

if TYPE_CHECKING:  # slow to import (a second), and not needed by an embedded server
    from tensordict import TensorDict

PLACE = "teacher_place"
"""Batch column, int32 `[N]`: the row that each token has in the teachers' concatenated results; -1 if no teacher scored
the token."""


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's distribution over the whole vocabulary.

    It is given by the last hidden states `[n, H]` and the output layer `[V_local, H]`.
    """

    hidden: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.hidden)

    def take(self, rows: Tensor, device: torch.device) -> TeacherStates:
        return TeacherStates(self.hidden[rows].to(device), self.weight)

    def log_ratios(self, logprobs: Tensor, rows: Tensor, shard: VocabShard, temperature: float) -> Tensor:
        """Return log p - log q for c rows, `[c, columns]`.

        logprobs: the policy's log p, `[c, columns]`. rows: `[c]`, the teacher's row for each; log q comes from it.
        """
        own = head_logits(self.hidden.index_select(0, rows).to(self.weight.dtype), self.weight)
        own = own[:, : logprobs.shape[1]].to(logprobs.dtype)
        return normalised_(own, temperature, shard).neg_().add_(logprobs)


@dataclass(frozen=True)
class TopTokens:
    """A teacher's K most likely tokens, `[n, K]` int64, and their log-probabilities.

    logprobs: `[n, K + 1]`. The last entry is the log-probability of all other tokens together.
    """

    tokens: Tensor
    logprobs: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Tensor, device: torch.device) -> TopTokens:
        return TopTokens(self.tokens[rows].to(device), self.logprobs[rows].to(device))

    def log_ratios(self, logprobs: Tensor, rows: Tensor, shard: VocabShard, temperature: float) -> Tensor:
        """Return log p - log q for c rows, `[c, columns]`, from the policy's `logprobs` and the teacher's `rows` `[c]`.

        The tokens outside the top K count as one token: each of them gets the log ratio of their summed probabilities.
        """
        columns, top = logprobs.shape[1], self.tokens.shape[1]
        theirs = self.logprobs.index_select(0, rows).to(logprobs.dtype)
        places = _columns_here(self.tokens.index_select(0, rows), columns, shard)
        # An extra column receives the tokens that belong to other ranks.
        wide = torch.cat([logprobs, logprobs.new_zeros(len(logprobs), 1)], 1)
        ratios = wide.gather(1, places) - theirs[:, :top]
        wide.scatter_(1, places, -torch.inf)[:, columns] = -torch.inf
        wide[:] = (log_sums(wide, shard) - theirs[:, top])[:, None]
        return wide.scatter_(1, places, ratios)[:, :columns]


Teacher = TeacherStates | TopTokens


@dataclass(frozen=True)
class TeacherTargets:
    """The distributions of all teachers for a batch's tokens.

    The batch column `teacher_place` has the row of each token in the teachers' concatenated results.
    """

    teachers: Sequence[Teacher]
    shard: VocabShard
    temperature: float
    """Number by which the logits of policy and teachers are divided."""
    coefficient: float = 1.0

    def of(self, rows: TensorDict, device: torch.device) -> ReverseKL:
        """Build the KL term for a microbatch, whose rows are on the host."""
        place = rows[PLACE].long().masked_fill(rows["labels"] < 0, -1)  # [T]
        first, parts = 0, []
        for teacher in self.teachers:
            is_own = (place >= first) & (place < first + len(teacher))
            if is_own.any():
                index = torch.where(is_own, is_own.cumsum(0) - 1, -1)
                parts.append((teacher.take(place[is_own] - first, device), index.to(device)))
            first += len(teacher)
        weights = rows["row_weights"].to(device) if "row_weights" in rows.keys() else None  # noqa: SIM118
        return ReverseKL(parts, self.shard, self.temperature, self.coefficient, weights)


@dataclass(frozen=True)
class ReverseKL:
    """A loss term on the rows that a teacher scored: coefficient * weight * sum over tokens of p (log p - log q).

    p is the policy's distribution at the row, and q the teacher's.
    """

    parts: list[tuple[Teacher, Tensor]]
    """Each teacher with the row that it has for each row of the microbatch, `[T]`; -1 for rows that it did not score.
    """
    shard: VocabShard
    temperature: float
    coefficient: float
    weights: Tensor | None

    def __call__(self, logits: Tensor, places: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the loss, its statistics, and its gradient `[c, columns]` by the logits, for c rows of the microbatch.

        places: `[c]`, the indices of the rows. logits: their `[c, V_local]` logits, including padding; not modified.
        Collective over the tensor-parallel ranks.
        """
        columns = self.shard.without_padding(logits.shape[1])
        own = logits[:, :columns].to(accumulator(logits.dtype), copy=True)
        own, gradient = normalised_(own, self.temperature, self.shard), None
        loss = count = own.new_zeros((), dtype=torch.float64)
        for teacher, index in self.parts:
            row = index.index_select(0, places)
            weight = (row >= 0).to(own.dtype)
            ratios = teacher.log_ratios(own, row.clamp_min(0), self.shard, self.temperature)
            p = own.exp()
            kl = torch.bmm(p[:, None], ratios[:, :, None])[:, 0, 0]  # [c]: avoids a third large tensor
            if self.shard.is_split:
                dist.all_reduce(kl, group=self.shard.group)
            count = count + (kl * weight).sum(dtype=torch.float64)
            weight = weight * self.coefficient
            if self.weights is not None:
                weight = weight * self.weights.index_select(0, places)
            loss = loss + (kl * weight).sum(dtype=torch.float64)
            # d KL / d logit = p (log p - log q - KL) / temperature
            part = ratios.sub_(kl[:, None]).mul_(p).mul_((weight / self.temperature)[:, None])
            gradient = part if gradient is None else gradient.add_(part)
        return loss, {"teacher_kl": count}, own.zero_() if gradient is None else gradient


def normalised_(logits: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """Convert this rank's logits `[c, columns]` to log-probabilities, in place."""
    return logits.div_(temperature).sub_(log_sums(logits, shard)[:, None])


def log_sums(values: Tensor, shard: VocabShard) -> Tensor:
    """Return each row's log-sum-exp over the columns of all ranks, `[c]`. values: this rank's columns."""
    peak = values.amax(1) if values.shape[1] else values.new_full((len(values),), -torch.inf)
    if shard.is_split:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
    total = (values - peak[:, None]).exp_().sum(1)
    if shard.is_split:
        dist.all_reduce(total, group=shard.group)
    return total.log_().add_(peak)


def top_tokens(logits: Tensor, count: int, shard: VocabShard, temperature: float) -> TopTokens:
    """Return the `count` most likely tokens of each row; `count` is less than the vocabulary size.

    logits: `[c, columns]`, without padding; they are overwritten. Collective over the tensor-parallel ranks.
    """
    logprobs, tokens, own = likeliest(logits, count, shard, temperature)
    columns = own.shape[1]
    others = torch.cat([own, own.new_zeros(len(own), 1)], 1)
    others.scatter_(1, _columns_here(tokens, columns, shard), -torch.inf)[:, columns] = -torch.inf
    return TopTokens(tokens, torch.cat([logprobs, log_sums(others, shard)[:, None]], 1))


def likeliest(logits: Tensor, count: int, shard: VocabShard, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's `count` largest log-probabilities and their tokens, both `[c, count]`, the largest first.

    The third result is the log-probabilities of all tokens in this rank's columns. logits: as in `top_tokens`.
    """
    own = normalised_(logits, temperature, shard)
    logprobs, tokens = own.topk(min(count, own.shape[1]), dim=1)
    tokens = tokens + shard.start
    if shard.is_split:
        assert shard.group is not None
        missing = (0, count - tokens.shape[1])
        logprobs = torch.nn.functional.pad(logprobs, missing, value=-torch.inf)
        logprobs, tokens = (
            gather_partials(part[None], shard.group).transpose(0, 1).flatten(1)  # [c, ranks * count]
            for part in (logprobs, torch.nn.functional.pad(tokens, missing))
        )
        logprobs, chosen = logprobs.topk(count, dim=1)
        tokens = tokens.gather(1, chosen)
    return logprobs, tokens, own


def _columns_here(tokens: Tensor, columns: int, shard: VocabShard) -> Tensor:
    """Return the column of each token on this rank, or `columns` for tokens of other ranks."""
    places = tokens - shard.start
    return places.where((places >= 0) & (places < columns), columns)
