"""The output layer and what follows it, a chunk of rows at a time, so that `[T, V]` logits are never held.

Shapes: T labels, R rows of hidden, V_local this rank's columns, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.ops.library import accumulator, dense, ops, overwrite_with_gradient
from megatron_rl.ops.logprobs import VocabShard, check_temperature, gather_partials
from megatron_rl.ops.ppo import PPO_SUMS, PpoOptions, check_ppo, ppo_loss
from megatron_rl.ops.taken_rows import TakenRows

Slopes = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""(rows, their log-probs, their entropy) -> (`[K]` float64 sums, the loss first, and its slopes by both)."""


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden @ weight.T`; on CUDA float32 also for 16-bit operands, whose products are summed in float32 anyway."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return torch.mm(hidden, weight.T)


def add_weight_gradient(total: Tensor | None, grad_logits: Tensor, hidden: Tensor) -> Tensor:
    """Total + grad_logits.T @ hidden in the accumulating dtype: sums over chunks would drift in bfloat16."""
    if grad_logits.is_cuda and grad_logits.dtype != torch.float32:
        if total is not None:  # added inside the product: a sum of its own would move the weight's size three times
            return torch.addmm(total, grad_logits.T, hidden, out_dtype=torch.float32, out=total)
        return torch.mm(grad_logits.T, hidden, out_dtype=torch.float32)
    if total is not None and total.dtype == grad_logits.dtype:
        return total.addmm_(grad_logits.T, hidden)
    product = torch.mm(grad_logits.T, hidden).to(accumulator(hidden.dtype))
    return product if total is None else total.add_(product)


def columns_of(weight: Tensor, shard: VocabShard, temperature: float) -> tuple[float, None, int, int]:
    """Return the last arguments of the log-prob operators: temperature, none for each row, first column, columns."""
    return temperature, None, shard.start, max(0, min(len(weight), shard.stop - shard.start))


def logits_results(logits: Tensor, labels: Tensor, shard: VocabShard, rest: tuple) -> tuple[Tensor, ...]:
    """(log-probs, entropy, peak, log-sum) of logits that need no gradient."""
    partials = ops.logprob_partials(logits, labels, *rest)  # [tiles, c, 4]: peak, sum, moment, the label's logit
    if shard.is_split:
        assert shard.group is not None
        partials = gather_partials(ops.logprob_fold(partials, labels, *rest[:2]), shard.group)
    return ops.logprob_finish(logits, partials, labels, *rest, shard.size, False)


class HeadLogprobs(torch.autograd.Function):
    """Log-probability and entropy of `hidden @ weight.T` rows, all of which have a label.

    One chunk keeps its logits for backward; several are formed again there, each overwritten by its gradient.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, temperature: float, chunk: int):
        rest, parts = columns_of(weight, shard, temperature), []
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):  # without rows one empty chunk
            logits = head_logits(h, weight)  # [c, V_local]
            parts.append(logits_results(logits, y, shard, rest))
        logprobs, entropy, peak, log_sum = (torch.cat(column) for column in zip(*parts, strict=True))
        kept = (logits,) if len(parts) == 1 else ()  # no more memory than the chunk that had to be there anyway
        ctx.save_for_backward(hidden, weight, labels, peak, log_sum, entropy, *kept)
        ctx.rest, ctx.chunk = rest, chunk
        ctx.set_materialize_grads(False)  # an entropy that no loss uses costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, labels, *saved = ctx.saved_tensors
        rows = [hidden, labels, *saved[:3]]
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        for i, (h, *row) in enumerate(zip(*(tensor.split(ctx.chunk) for tensor in rows), strict=True)):
            part = slice(i * ctx.chunk, (i + 1) * ctx.chunk)
            slopes = (None if g is None else g[part].contiguous() for g in (grad_logprobs, grad_entropy))
            grad = saved[3] if len(saved) > 3 else head_logits(h, weight)
            overwrite_with_gradient(grad, *row, *slopes, *ctx.rest)
            grad = grad.to(weight.dtype)  # the products run on 16-bit operands where the weight has them
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if needs_weight:
                grad_weight = add_weight_gradient(grad_weight, grad, h)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


class HeadLoss(torch.autograd.Function):
    """A loss of `hidden @ weight.T` rows, all of which have a label; the gradient is formed together with it.

    Three matrix products a chunk: logits, and after they have become their own gradient those of hidden and weight.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, slopes: Slopes, shard: VocabShard, temperature: float,
        chunk: int,
    ):  # fmt: skip
        rest = columns_of(weight, shard, temperature)
        grad_hidden, grad_weight, totals = torch.empty_like(hidden), None, []
        # Here, in the forward, as a chunk's logits are gone afterwards: backward only scales.
        for start in range(0, max(len(hidden), 1), chunk):  # without rows too the loss says which statistics it has
            rows = slice(start, start + chunk)
            logits, y = head_logits(hidden[rows], weight), labels[rows]
            logprobs, entropy, peak, log_sum = logits_results(logits, y, shard, rest)
            sums, by_logprob, by_entropy = slopes(rows, logprobs, entropy)
            totals.append(sums)
            ops.logprob_grad_(logits, y, peak, log_sum, entropy, by_logprob, by_entropy, *rest)
            grad = logits.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            grad_weight = add_weight_gradient(grad_weight, grad, hidden[rows])
        sums = torch.stack(totals).sum(0)  # [K] float64
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(sums)
        return sums[0].to(accumulator(hidden.dtype)), sums

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        by_weight = (grad_weight * grad_loss.to(grad_weight.dtype)).to(ctx.weight_dtype)
        return grad_hidden * grad_loss.to(grad_hidden.dtype), by_weight, *(None,) * 5


def lm_head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]],
    *,
    shard: VocabShard,
    rows: Tensor | TakenRows | None = None,
    kept: Tensor | None = None,
    temperature: float = 1.0,
    rows_per_chunk: int = 2048,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss that is a sum over rows, and its statistics, without holding more than one chunk of logits.

    loss(logprobs, entropy, places) -> (loss_sum, sums): the loss of the labels at `places` (`[c]` int64) from their
    log-probabilities and entropy, `[c]` float32; `sums` are 0-dim, and both are added over the chunks (the statistics
    as float64). The other arguments are `lm_head_logprobs`'. The gradient is formed together with the loss, also where
    none is asked for, and may be used once or scaled by what follows; the weight's is summed in float32.
    """
    check_temperature(temperature, labels)
    kept = places_of(labels) if kept is None else kept
    names: list[str] = []

    def slopes(chunk: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        leaves = [logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()]
        with torch.enable_grad():
            total, sums = loss(*leaves, kept[chunk])
            by_logprob, by_entropy = torch.autograd.grad(total, leaves, allow_unused=True)  # of [c] leaves: cheap
        names[:] = sums  # HeadLoss returns tensors only; every chunk says the same names
        column = torch.stack([total.detach().double(), *(value.detach().double() for value in sums.values())])
        by_logprob = torch.zeros_like(logprobs) if by_logprob is None else by_logprob.contiguous()
        return column, by_logprob, dense(by_entropy)

    picked = pick(hidden, rows, kept, weight.dtype)
    total, sums = HeadLoss.apply(
        picked, weight, labels.index_select(0, kept), slopes, shard, temperature, rows_per_chunk
    )
    return total, dict(zip(names, sums[1:].unbind(), strict=True))


def lm_head_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    proximal_logprobs: Tensor | None,
    behavior_logprobs: Tensor | None,
    advantages: Tensor,
    options: PpoOptions,
    *,
    shard: VocabShard,
    rows: Tensor | TakenRows | None = None,
    kept: Tensor | None = None,
    temperature: float = 1.0,
    ref_logprobs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | None = None,
    rows_per_chunk: int = 2048,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo_loss` of the log-probabilities of `hidden @ weight.T`, without ever holding more than one chunk of logits.

    hidden `[R, H]`, weight `[V_local, H]`, labels `[T]` int64, `rows` and `kept` as in `lm_head_logprobs`. The rest is
    as in `ppo_loss`, whose mask is `labels >= 0`. The gradient is formed together with the loss, also where none is
    asked for: for a pass without gradient use `lm_head_logprobs`. A loss by sequence needs every log-probability
    before the first gradient: two sweeps, the second of which forms the logits again.
    """
    dtype = accumulator(hidden.dtype)
    columns = [
        None if column is None else column.detach().to(dtype)
        for column in (proximal_logprobs, behavior_logprobs, advantages, ref_logprobs)
    ]
    check_ppo(options, behavior_logprobs=behavior_logprobs, ref_logprobs=ref_logprobs, cu_seqlens=cu_seqlens)
    if options.by_sequence:
        more = {"shard": shard, "rows": rows, "kept": kept, "temperature": temperature}
        logprobs, entropy = lm_head_logprobs(hidden, weight, labels, **more, rows_per_chunk=rows_per_chunk)
        *given, ref = columns
        return ppo_loss(
            *(logprobs, *given, labels >= 0, options),
            ref_logprobs=ref,
            entropy=entropy,
            cu_seqlens=cu_seqlens,
            normalizer=normalizer,
        )

    kept = places_of(labels) if kept is None else kept
    check_temperature(temperature, labels)
    chosen = [None if column is None else column.index_select(0, kept) for column in columns]
    packed = options.packed(1.0 if normalizer is None else 1.0 / normalizer)

    def slopes(chunk: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        *given, ref = (None if column is None else column[chunk] for column in chosen)
        trained = torch.ones_like(logprobs, dtype=torch.bool)
        _, sums, by_logprob, by_entropy = ops.ppo_loss(logprobs, *given, trained, ref, entropy, None, None, packed)
        return sums, by_logprob, by_entropy if options.entropy_coefficient != 0 else None

    picked, targets = pick(hidden, rows, kept, weight.dtype), labels.index_select(0, kept)
    loss, sums = HeadLoss.apply(picked, weight, targets, slopes, shard, temperature, rows_per_chunk)
    return loss, dict(zip(PPO_SUMS, sums.unbind(), strict=True))


def lm_head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shard: VocabShard,
    rows: Tensor | TakenRows | None = None,
    kept: Tensor | None = None,
    temperature: float = 1.0,
    rows_per_chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return log p(label) and entropy of `hidden @ weight.T`, both `[T]` float32, without ever holding `[T, V]`.

    hidden `[R, H]`, weight `[V_local, H]`, labels `[T]` int64. Label t is predicted by row `rows[t]` of hidden (int64,
    several labels may share one), by row t where `rows` is absent. kept: the places of the labels to compute, int64,
    all with labels of 0 or more; where absent, those of all such labels, which waits for the device. Other places give
    0. rows as TakenRows are those of the kept labels: then the gradient of a row that several share is the same bits
    every time. Rows go through the head in chunks; the backward forms the logits of each again, unless there is one
    chunk only. The weight's gradient is summed over the chunks in float32.
    """
    check_temperature(temperature, labels)
    kept = places_of(labels) if kept is None else kept
    picked = pick(hidden, rows, kept, weight.dtype)
    targets = labels.index_select(0, kept)
    logprobs, entropy = HeadLogprobs.apply(picked, weight, targets, shard, temperature, rows_per_chunk)
    zeros = torch.zeros(len(labels), dtype=logprobs.dtype, device=hidden.device)
    return zeros.index_copy(0, kept, logprobs), zeros.index_copy(0, kept, entropy)


def places_of(labels: Tensor) -> Tensor:
    """Return the places of the labels that count. On a device its length is waited for."""
    return (labels >= 0).nonzero()[:, 0]


def pick(hidden: Tensor, rows: Tensor | TakenRows | None, kept: Tensor, dtype: torch.dtype) -> Tensor:
    # Only rows with a label go through the output layer: a prompt's have none.
    if isinstance(rows, TakenRows):
        return rows.of_values(hidden).to(dtype)
    return hidden.index_select(0, kept if rows is None else rows.index_select(0, kept)).to(dtype)
