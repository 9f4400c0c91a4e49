"""The reverse KL divergence between a policy's distribution over the vocabulary and its teachers', and its gradient.

A chunk of rows at a time, as the head's loss has them: `[T, V]` of neither model is ever held. The vocabulary may be
split over the tensor axis. Shapes: T rows of a microbatch, c of a chunk, n tokens that a teacher has read, K of its
most likely tokens, columns this rank's of the vocabulary, H hidden size.
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

if TYPE_CHECKING:  # which takes a second to import, and an embedded server has no use for it
    from tensordict import TensorDict

PLACE = "teacher_place"
"""The column of a batch that says which row of its teachers' a token is: int32 `[N]`, -1 for a token without one."""


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's distribution over the whole vocabulary, by its last states, hidden `[n, H]`, each in front of a
    token, and the rows `[V_local, H]` of its output layer."""

    hidden: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.hidden)

    def take(self, rows: Tensor, device: torch.device) -> TeacherStates:
        """Return these rows, int64 on the host, on the device."""
        return TeacherStates(self.hidden[rows].to(device), self.weight)

    def log_ratios(self, logprobs: Tensor, rows: Tensor, shard: VocabShard, temperature: float) -> Tensor:
        """Return log p - log q, `[c, columns]`, of the policy's log p and the teacher's log q in its rows `[c]`."""
        own = head_logits(self.hidden.index_select(0, rows).to(self.weight.dtype), self.weight)
        own = own[:, : logprobs.shape[1]].to(logprobs.dtype)
        return normalised_(own, temperature, shard).neg_().add_(logprobs)


@dataclass(frozen=True)
class TopTokens:
    """A teacher's K most likely tokens, `[n, K]` int64, and their log-probabilities `[n, K + 1]`, the last that of all
    others together."""

    tokens: Tensor
    logprobs: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Tensor, device: torch.device) -> TopTokens:
        """Return these rows, int64 on the host, on the device."""
        return TopTokens(self.tokens[rows].to(device), self.logprobs[rows].to(device))

    def log_ratios(self, logprobs: Tensor, rows: Tensor, shard: VocabShard, temperature: float) -> Tensor:
        """Return log p - log q, `[c, columns]`: of all tokens but the K that of them together."""
        columns, top = logprobs.shape[1], self.tokens.shape[1]
        theirs = self.logprobs.index_select(0, rows).to(logprobs.dtype)
        places = _columns_here(self.tokens.index_select(0, rows), columns, shard)
        # One column more takes what belongs to other ranks.
        wide = torch.cat([logprobs, logprobs.new_zeros(len(logprobs), 1)], 1)
        ratios = wide.gather(1, places) - theirs[:, :top]
        wide.scatter_(1, places, -torch.inf)[:, columns] = -torch.inf
        wide[:] = (log_sums(wide, shard) - theirs[:, top])[:, None]
        return wide.scatter_(1, places, ratios)[:, :columns]


Teacher = TeacherStates | TopTokens


@dataclass(frozen=True)
class TeacherTargets:
    """The teachers' distributions for the tokens of a batch, whose column `teacher_place` counts the rows of all.

    For example:

        targets = TeacherTargets([TeacherStates(hidden, weight)], VocabShard(0, 32000, 32000), temperature=1.0)
        batch.tokens["teacher_place"] = torch.arange(len(hidden), dtype=torch.int32)
        engine.train_batch(batch, LogprobLoss(policy_loss, by_row=True, beside=targets))
    """

    teachers: Sequence[Teacher]
    shard: VocabShard
    """This rank's columns of the vocabulary."""
    temperature: float
    """Divides the logits of both."""
    coefficient: float = 1.0

    def of(self, rows: TensorDict, device: torch.device) -> ReverseKL:
        """Return the term of a microbatch, whose rows are on the host."""
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
    """coefficient * weight * sum over tokens of p (log p - log q), for each row that a teacher has read."""

    parts: list[tuple[Teacher, Tensor]]
    """Each with its row for each of the microbatch's, `[T]`, or -1."""
    shard: VocabShard
    temperature: float
    coefficient: float
    weights: Tensor | None

    def __call__(self, logits: Tensor, places: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the loss's part, the statistics, and the gradient `[c, columns]`, of rows `places` and their logits.

        logits: `[c, V_local]`, padding included; they stay. All ranks of the tensor axis call it together.
        """
        columns = max(0, min(logits.shape[1], self.shard.stop - self.shard.start))
        own = logits[:, :columns].to(accumulator(logits.dtype), copy=True)
        own, gradient = normalised_(own, self.temperature, self.shard), None
        loss = count = own.new_zeros((), dtype=torch.float64)
        for teacher, index in self.parts:
            row = index.index_select(0, places)
            weight = (row >= 0).to(own.dtype)
            ratios = teacher.log_ratios(own, row.clamp_min(0), self.shard, self.temperature)
            p = own.exp()
            kl = torch.bmm(p[:, None], ratios[:, :, None])[:, 0, 0]  # [c]: a product of rows that makes no third
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
    """Make log-probabilities of this rank's columns of logits, `[c, columns]`, in their place."""
    return logits.div_(temperature).sub_(log_sums(logits, shard)[:, None])


def log_sums(values: Tensor, shard: VocabShard) -> Tensor:
    """Return log of the sum of exp over all ranks' columns, `[c]`."""
    peak = values.amax(1) if values.shape[1] else values.new_full((len(values),), -torch.inf)
    if shard.is_split:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
    total = (values - peak[:, None]).exp_().sum(1)
    if shard.is_split:
        dist.all_reduce(total, group=shard.group)
    return total.log_().add_(peak)


def top_tokens(logits: Tensor, count: int, shard: VocabShard, temperature: float) -> TopTokens:
    """Return the `count` most likely tokens of the vocabulary, which has more, of each row.

    logits: `[c, columns]` of the real vocabulary; they are overwritten. All ranks of the tensor axis call it together.
    """
    own = normalised_(logits, temperature, shard)
    columns = own.shape[1]
    logprobs, tokens = own.topk(min(count, columns), dim=1)
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
    others = torch.cat([own, own.new_zeros(len(own), 1)], 1)
    others.scatter_(1, _columns_here(tokens, columns, shard), -torch.inf)[:, columns] = -torch.inf
    return TopTokens(tokens, torch.cat([logprobs, log_sums(others, shard)[:, None]], 1))


def _columns_here(tokens: Tensor, columns: int, shard: VocabShard) -> Tensor:
    """Return the columns of tokens on this rank, and `columns`, one behind the last, of those that others have."""
    places = tokens - shard.start
    return places.where((places >= 0) & (places < columns), columns)
