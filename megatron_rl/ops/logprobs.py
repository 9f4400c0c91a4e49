"""Log-probability and entropy of labels under logits whose vocabulary may be split over the tensor axis.

Shapes: T rows, V vocabulary, V_local this rank's columns, H hidden size. All arithmetic is float32. Rows with a
negative label give 0 and no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns `[start, stop)` of a vocabulary of `size`; `group` holds the ranks with the others."""

    start: int
    stop: int
    size: int
    group: dist.ProcessGroup | None = None

    @property
    def is_split(self) -> bool:
        return self.stop - self.start < self.size


NORMALISING = {torch.softmax, torch.log_softmax, torch.logsumexp, F.softmax, F.log_softmax, F.cross_entropy} | {
    getattr(Tensor, name) for name in ("softmax", "log_softmax", "logsumexp")
}
"""Functions over the vocabulary that are wrong on one rank's columns."""


class VocabParallelLogits(Tensor):
    """`[T, V_local]` logits that know their columns, so that a loss calls `gather_logprobs(logits, labels)` in any
    layout.

    Operations that keep the last dimension keep `shard` (a temperature, a cast, a slice of rows). A softmax over split
    columns raises ValueError instead of being silently wrong.
    """

    shard: VocabShard

    @classmethod
    def wrap(cls, logits: Tensor, shard: VocabShard) -> VocabParallelLogits:
        wrapped = logits.as_subclass(cls)
        wrapped.shard = shard
        return wrapped

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        shards = [a.shard for a in args if isinstance(a, cls) and "shard" in a.__dict__]
        if shards and shards[0].is_split and func in NORMALISING:
            raise ValueError(
                f"logits: {func.__name__} sees only columns {shards[0].start} to {shards[0].stop} of "
                f"{shards[0].size} on this "
                f"tensor-parallel rank; use megatron_rl.gather_logprobs or gather_logprobs_entropy, which reduce "
                f"over all."
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls) and shards:
            if result.ndim and result.shape[-1] == shards[0].stop - shards[0].start:
                result.shard = shards[0]
            else:
                result = result.as_subclass(Tensor)
        return result


class _LogprobsEntropy(torch.autograd.Function):
    """log p and entropy from one read of the logits; the backward forms the gradient from the logits again."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, shard: VocabShard, temperature: float):
        kept = labels >= 0
        local = labels - shard.start
        mine = kept & (local >= 0) & (local < logits.shape[1])
        shifted = logits.float() if temperature == 1.0 else logits.float() / temperature
        peak = shifted.amax(-1)
        _all_reduce(peak, shard, dist.ReduceOp.MAX)
        shifted = shifted - peak[:, None]  # everything relative to the peak: large logits must not cancel digits
        weights = shifted.exp()
        chosen = shifted.gather(-1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        sums = torch.stack([weights.sum(-1), weights.mul_(shifted).sum(-1), chosen.masked_fill(~mine, 0.0)])
        _all_reduce(sums, shard, dist.ReduceOp.SUM)
        log_sum = sums[0].log()
        logprobs = (sums[2] - log_sum).masked_fill(~kept, 0.0)
        entropy = (log_sum - sums[1] / sums[0]).masked_fill(~kept, 0.0)
        ctx.save_for_backward(logits, peak, log_sum, entropy, local, mine, kept)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor):
        logits, peak, log_sum, entropy, local, mine, kept = ctx.saved_tensors
        log_p = logits.float().div(ctx.temperature).sub_(peak[:, None]).sub_(log_sum[:, None])
        p = log_p.exp()
        # d log p(y) / dx = 1[y] - p;  dH / dx = -p (log p + H)
        scale = (grad_logprobs.masked_fill(~kept, 0.0))[:, None]
        grad = p.mul(-scale)
        if grad_entropy.any():
            grad -= p.mul_(log_p.add_(entropy[:, None])).mul_(grad_entropy.masked_fill(~kept, 0.0)[:, None])
        rows = mine.nonzero()[:, 0]
        grad[rows, local[rows]] += scale[rows, 0]
        return grad.div_(ctx.temperature).to(logits.dtype), None, None, None


def _all_reduce(tensor: Tensor, shard: VocabShard, op: dist.ReduceOp) -> None:
    if shard.is_split:
        dist.all_reduce(tensor, op=op, group=shard.group)


def gather_logprobs_entropy(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """Return log p(label) and entropy in nats, both `[T]` float32 and differentiable.

    logits: `[T, V_local]`, plain or as the engine hands them to a loss (then they know their columns). labels: `[T]`
    int64 over the whole vocabulary; negative ones are ignored. temperature divides the logits.
    """
    if shard is None:
        shard = (
            logits.shard
            if isinstance(logits, VocabParallelLogits)
            else VocabShard(0, logits.shape[-1], logits.shape[-1])
        )
    plain = logits.as_subclass(Tensor) if isinstance(logits, VocabParallelLogits) else logits
    if plain.ndim != 2 or labels.shape != plain.shape[:1]:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} for logits {tuple(plain.shape)}: packed rows need [T] labels "
            f"for [T, V] "
            f"logits; drop a batch dimension with squeeze(0)."
        )
    return _LogprobsEntropy.apply(plain, labels, shard, temperature)


def gather_logprobs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, *, shard: VocabShard | None = None
) -> Tensor:
    """Return log p(label), `[T]` float32: `gather_logprobs_entropy` without the entropy."""
    return gather_logprobs_entropy(logits, labels, temperature=temperature, shard=shard)[0]


def lm_head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shard: VocabShard,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    rows_per_chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return log p(label) and entropy of `hidden @ weight.T`, both `[T]` float32, without ever holding `[T, V]`.

    hidden `[R, H]`, weight `[V_local, H]`, labels `[T]` int64. Label t is predicted by row `rows[t]` of hidden (int64,
    several labels may share one), by row t where `rows` is absent. Rows with a negative label are not computed. Rows go
    through the head in chunks, and with more than one chunk the backward recomputes each chunk's logits.
    """
    kept = (labels >= 0).nonzero()[:, 0]
    targets = labels.index_select(0, kept)
    picked = hidden.index_select(0, kept if rows is None else rows.index_select(0, kept)).to(weight.dtype)

    def chunk_logprobs(chunk_hidden: Tensor, chunk_labels: Tensor) -> tuple[Tensor, Tensor]:
        return _LogprobsEntropy.apply(F.linear(chunk_hidden, weight), chunk_labels, shard, temperature)

    if len(kept) <= rows_per_chunk:
        logprobs, entropy = chunk_logprobs(picked, targets)
    else:
        parts = [
            checkpoint(chunk_logprobs, h, y, use_reentrant=False)
            for h, y in zip(picked.split(rows_per_chunk), targets.split(rows_per_chunk), strict=True)
        ]
        logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    zeros = torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
    return zeros.index_copy(0, kept, logprobs), zeros.index_copy(0, kept, entropy)
