"""The output layer and what follows it, a chunk of rows at a time, so that `[T, V]` logits are never held.

Shapes: T labels, R rows of hidden, V_local this rank's columns, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.ops.library import accumulator, ops, overwrite_with_gradient
from megatron_rl.ops.logprobs import VocabShard, check_temperature, gather_partials


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


class HeadLogprobs(torch.autograd.Function):
    """Log-probability and entropy of `hidden @ weight.T` rows, all of which have a label.

    One chunk keeps its logits for backward; several are formed again there, each overwritten by its gradient.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, temperature: float, chunk: int):
        columns = max(0, min(len(weight), shard.stop - shard.start))
        rest = (temperature, None, shard.start, columns)
        parts, logits = [], hidden.new_empty(0, len(weight))
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            logits = head_logits(h, weight)
            partials = ops.logprob_partials(logits, y, *rest)
            if shard.is_split:
                assert shard.group is not None
                partials = gather_partials(ops.logprob_fold(partials, y, temperature, None), shard.group)
            parts.append(ops.logprob_finish(logits, partials, y, *rest, shard.size, False))
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
