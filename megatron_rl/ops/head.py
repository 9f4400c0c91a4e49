"""The output layer and what follows it, a chunk of rows at a time, so that `[T, V]` logits are never held.

Shapes: T labels, R rows of hidden, V_local this rank's columns, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.ops.library import accumulator, ops, overwrite_with_gradient
from megatron_rl.ops.logprobs import VocabShard, check_temperature, gather_partials
from megatron_rl.ops.ppo import PPO_SUMS, PpoOptions, check_ppo


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden @ weight.T`; on CUDA float32 also for 16-bit operands, whose products are summed in float32 anyway."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return torch.mm(hidden, weight.T)


def add_weight_gradient(total: Tensor | None, grad_logits: Tensor, hidden: Tensor) -> Tensor:
    """Total + grad_logits.T @ hidden in the accumulating dtype: sums over chunks would drift in bfloat16."""
    if grad_logits.is_cuda and grad_logits.dtype != torch.float32:
        product = torch.mm(grad_logits.T, hidden, out_dtype=torch.float32)
    elif total is not None and total.dtype == grad_logits.dtype:
        return total.addmm_(grad_logits.T, hidden)
    else:
        product = torch.mm(grad_logits.T, hidden).to(accumulator(hidden.dtype))
    return product if total is None else total.add_(product)


def columns_of(weight: Tensor, shard: VocabShard, temperature: float) -> tuple[float, None, int, int]:
    """Return the last arguments of the log-prob operators: temperature, none for each row, first column, columns."""
    return temperature, None, shard.start, max(0, min(len(weight), shard.stop - shard.start))


def logits_results(logits: Tensor, labels: Tensor, shard: VocabShard, rest: tuple) -> tuple[Tensor, ...]:
    """(log-probs, entropy, peak, log-sum) of logits that need no gradient."""
    partials = ops.logprob_partials(logits, labels, *rest)
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
        rest = columns_of(weight, shard, temperature)
        parts, logits = [], hidden.new_empty(0, len(weight))
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            logits = head_logits(h, weight)
            parts.append(logits_results(logits, y, shard, rest))
        logprobs, entropy, peak, log_sum = (torch.cat(column) for column in zip(*parts, strict=True))
        kept = (logits,) if len(parts) == 1 else ()
        ctx.save_for_backward(hidden, weight, labels, peak, log_sum, entropy, *kept)
        ctx.rest, ctx.chunk = rest, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor):
        hidden, weight, labels, *saved = ctx.saved_tensors
        rows = [hidden, labels, *saved[:3], grad_logprobs.contiguous(), grad_entropy.contiguous()]
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        for i, (h, *row) in enumerate(zip(*(tensor.split(ctx.chunk) for tensor in rows), strict=True)):
            grad = saved[3] if len(saved) > 3 else head_logits(h, weight)
            overwrite_with_gradient(grad, *row, *ctx.rest)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[i * ctx.chunk : i * ctx.chunk + len(h)])
            if needs_weight:
                grad_weight = add_weight_gradient(grad_weight, grad, h)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


class HeadPpoLoss(torch.autograd.Function):
    """ppo_loss of `hidden @ weight.T` rows, all of which have a label; the gradient is formed with the loss.

    Three matrix products a chunk: logits, and after they have become their own gradient those of hidden and weight. A
    loss by sequence needs every log-probability first, and forms the logits twice.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, columns, cu_seqlens, options, scale, shard, temperature, chunk):
        rest, packed = columns_of(weight, shard, temperature), options.packed(scale)
        by_entropy = options.entropy_coefficient != 0
        slices = [slice(i, i + chunk) for i in range(0, len(hidden), chunk)]
        grad_hidden, grad_weight = torch.zeros_like(hidden), None
        totals: list[Tensor] = []

        def loss_of(rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
            proximal, behavior, advantages, ref = (None if column is None else column[rows] for column in columns)
            trained = torch.ones_like(logprobs, dtype=torch.bool)
            loss, sums, by_logprob, by_h = ops.ppo_loss(
                logprobs, proximal, behavior, advantages, trained, ref, entropy, cu_seqlens, packed
            )
            totals.append(sums)
            return by_logprob, by_h if by_entropy else None

        results: list[Tensor] = []
        by_logprob, by_h = hidden.new_empty(0), None
        if options.by_sequence:
            parts = [logits_results(head_logits(hidden[s], weight), labels[s], shard, rest) for s in slices]
            results = [torch.cat(column) for column in zip(*parts, strict=True)] if parts else []
            if parts:
                by_logprob, by_h = loss_of(slice(None), results[0], results[1])
        for s in slices:
            logits, y = head_logits(hidden[s], weight), labels[s]
            if options.by_sequence:
                _, entropy, peak, log_sum = (column[s] for column in results)
                slopes = (by_logprob[s], None if by_h is None else by_h[s])
            else:
                logprobs, entropy, peak, log_sum = logits_results(logits, y, shard, rest)
                slopes = loss_of(s, logprobs, entropy)
            ops.logprob_grad_(logits, y, peak, log_sum, entropy, *slopes, *rest)
            grad = logits.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[s])
            grad_weight = add_weight_gradient(grad_weight, grad, hidden[s])
        sums = torch.stack(totals).sum(0) if totals else hidden.new_zeros(len(PPO_SUMS), dtype=torch.float64)
        ctx.save_for_backward(grad_hidden, torch.zeros_like(weight) if grad_weight is None else grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(sums)
        return sums[0].to(accumulator(hidden.dtype)), sums

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        by_weight = (grad_weight * grad_loss.to(grad_weight.dtype)).to(ctx.weight_dtype)
        return grad_hidden * grad_loss.to(grad_hidden.dtype), by_weight, *(None,) * 8


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
    temperature: float = 1.0,
    ref_logprobs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | None = None,
    rows_per_chunk: int = 2048,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo_loss` of the log-probabilities of `hidden @ weight.T`, without ever holding more than one chunk of logits.

    hidden `[T, H]`, weight `[V_local, H]`, labels `[T]` int64; rows with a negative label are not computed. The rest is
    as in `ppo_loss`, whose mask is `labels >= 0`. The gradient is formed together with the loss, also where none is
    asked for: for a pass without gradient use `lm_head_logprobs`. The weight's is summed in float32.
    """
    check_temperature(temperature, labels)
    check_ppo(options, behavior_logprobs=behavior_logprobs, ref_logprobs=ref_logprobs, cu_seqlens=cu_seqlens)
    trained = labels >= 0
    kept = trained.nonzero()[:, 0]
    dtype = accumulator(hidden.dtype)
    columns = [
        None if column is None else column.detach().index_select(0, kept).to(dtype)
        for column in (proximal_logprobs, behavior_logprobs, advantages, ref_logprobs)
    ]
    bounds = None
    if options.by_sequence:
        assert cu_seqlens is not None
        bounds = torch.nn.functional.pad(trained.cumsum(0), (1, 0))[cu_seqlens]
    loss, sums = HeadPpoLoss.apply(
        hidden.index_select(0, kept).to(weight.dtype),
        weight,
        labels.index_select(0, kept),
        columns,
        bounds,
        options,
        1.0 if normalizer is None else 1.0 / normalizer,
        shard,
        temperature,
        rows_per_chunk,
    )
    return loss, dict(zip(PPO_SUMS, sums.unbind(), strict=True))


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
    through the head in chunks; the backward forms the logits of each again, unless there is one chunk only. The
    weight's gradient is summed over the chunks in float32.
    """
    check_temperature(temperature, labels)
    kept = (labels >= 0).nonzero()[:, 0]
    targets = labels.index_select(0, kept)
    picked = hidden.index_select(0, kept if rows is None else rows.index_select(0, kept)).to(weight.dtype)
    logprobs, entropy = HeadLogprobs.apply(picked, weight, targets, shard, temperature, rows_per_chunk)
    zeros = torch.zeros(len(labels), dtype=logprobs.dtype, device=hidden.device)
    return zeros.index_copy(0, kept, logprobs), zeros.index_copy(0, kept, entropy)
