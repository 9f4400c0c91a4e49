"""The output layer and its losses, computed in chunks of rows so that `[T, V]` logits are never held in memory.

Shapes: T labels, R rows of hidden states, hidden size H, V_local columns of the vocabulary on this rank. V_local may
include padding after the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.ops.library import accumulator, dense, ops, overwrite_with_gradient
from megatron_rl.ops.logprobs import VocabShard, check_temperature, gather_partials
from megatron_rl.ops.support_columns import ChangedColumns, SupportColumns, Supports, changed_columns, labels_outside
from megatron_rl.ops.taken_rows import TakenRows

CHUNK_BYTES = 1 << 30
"""Maximum size of a chunk's float32 logits."""
MOST_ROWS = 4096
PARTS = 4
"""A chunk whose gradient is 16-bit is divided into this many parts. Only one of them has float32 logits at a time."""
TILE_ROWS = 256
"""Rows per tile of a GPU matrix product. A partial tile takes as long as a whole one."""


def rows_of_chunk(columns: int) -> int:
    """Return how many rows a chunk of float32 logits `[rows, columns]` has. The rows fill whole tiles if possible."""
    rows = min(MOST_ROWS, max(1, CHUNK_BYTES // (4 * columns)))
    return rows - rows % TILE_ROWS if rows > TILE_ROWS else rows


def rows_of_gradient(columns: int) -> int:
    """Return how many rows a chunk has if the gradient of its logits is 16-bit.

    The chunk's gradient and the float32 logits of one of its parts together take no more memory than float32 logits for
    `rows_of_chunk` rows.
    """
    return min(MOST_ROWS, 2 * rows_of_chunk(columns))


def head_logits(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute `hidden @ weight.T`, on CUDA in float32. out: a buffer for the result, with at least as many rows."""
    out = None if out is None else out[: len(hidden)]
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32, out=out)
    return torch.mm(hidden, weight.T, out=out)


class WeightGradient:
    """Sum over chunks of `grad_logits.T @ hidden`, in the accumulator dtype, because sums in bfloat16 would drift.

    main_grad: the tensor to which the sum is added, as in Megatron's layers. If it is None, the sum goes to autograd.
    """

    def __init__(self, weight: Tensor, main_grad: Tensor | None) -> None:
        self.main_grad = main_grad
        is_exact = main_grad is not None and main_grad.dtype == accumulator(weight.dtype)
        self.sum = main_grad if is_exact else None

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add one chunk's contribution. Both tensors have the weight's dtype."""
        if grad_logits.is_cuda and grad_logits.dtype != torch.float32:
            if self.sum is None:
                self.sum = torch.mm(grad_logits.T, hidden, out_dtype=torch.float32)
            else:  # accumulates inside the product: a separate sum would cost three passes
                torch.addmm(self.sum, grad_logits.T, hidden, out_dtype=torch.float32, out=self.sum)
        elif self.sum is not None and self.sum.dtype == grad_logits.dtype:
            self.sum.addmm_(grad_logits.T, hidden)
        else:
            product = torch.mm(grad_logits.T, hidden).to(accumulator(hidden.dtype))
            self.sum = product if self.sum is None else self.sum.add_(product)

    def for_autograd(self) -> Tensor | None:
        """Return the sum, or None if it was added to main_grad."""
        if self.main_grad is None:
            return self.sum
        if self.sum is not self.main_grad:
            self.main_grad.add_(self.sum)
        return None


def scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `gradient * by`, in place if it already has this dtype, to avoid a second large tensor."""
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, by.to(gradient.dtype), out=out)


def logits_results(
    logits: Tensor, labels: Tensor, shard: VocabShard, rest: tuple, with_entropy: bool = True,
    support: Supports | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (log-probs, entropy, peak, log-sum) without autograd. The entropy is NaN unless `with_entropy`.

    rest: the operators' last arguments: the temperature, the temperatures of rows (None here), the first column, and
    the number of columns. support: the supports of rows. The results of a row that has a support are those of a softmax
    over the support's tokens alone.
    """
    outside = labels_outside(labels, support)
    partials = ops.logprob_partials(logits, outside, *rest, with_entropy)
    if shard.is_split or support is not None:
        partials = ops.logprob_fold(partials, outside, *rest[:2])
    if support is not None:
        columns = SupportColumns(logits, support, shard, rest[-1]).partials(rest[0], with_entropy)
        partials = torch.where(support.is_whole[:, None], partials, columns)
    if shard.is_split:
        assert shard.group is not None
        partials = gather_partials(partials, shard.group)
    return ops.logprob_finish(logits, partials, labels, *rest, shard.size, False)


Form = Callable[[slice, Tensor], tuple[tuple, Tensor | None]]
"""Function of (rows, the logits of these rows). Returns the remaining arguments of the gradient operators, and a
gradient `[c, columns]` to add to theirs, or None."""
Slopes = Callable[[slice, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
"""Function of (rows, logits, log-probs, entropy) that evaluates a loss. Returns `[K]` float64 sums, of which the first
is the loss, and three gradients of the loss: with respect to the log-probs, to the entropy, and directly to the logits.
"""
LogitsTerm = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor], Tensor]]
"""Function that computes an additional loss term: (logits `[c, V_local]`, places `[c]`) -> (the term's loss, its
statistics, its gradient `[c, columns]`)."""
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function like `head_logits`: (hidden, weight, buffer) -> `hidden @ weight.T`."""
CHUNKS_OF_TERM = 4
"""Number of temporary tensors that a `LogitsTerm` allocates. Each is as large as a chunk's logits."""


def add_gradients(
    hidden: Tensor, weight: Tensor, rows_per_chunk: int | None, form: Form, grad_hidden: Tensor | None,
    total: WeightGradient | None, logits: Tensor | None = None, support: tuple[Supports, VocabShard] | None = None,
    product: Product = head_logits, changed: ChangedColumns | None = None,
) -> None:  # fmt: skip
    """Compute the gradients of hidden and weight from the gradient of the logits, chunk by chunk.

    The gradient of the logits overwrites the logits. If the logits have a wider dtype than the weight, the gradient
    goes into a buffer of the weight's dtype instead, so that the products have 16-bit operands.
    logits: the logits of all rows, if they are known. They are then one chunk.
    changed: the changes that penalties and biases have made to these known logits.
    """
    narrow, count, known = None, len(hidden), logits is not None
    shard = None if support is None else support[1]
    columns = len(weight) if shard is None else shard.without_padding(len(weight))
    changes = support is not None and support[0].adjustment is not None
    if (hidden.is_cuda or changes) and weight.dtype != accumulator(weight.dtype):
        chunk = count if known else rows_per_chunk or rows_of_gradient(len(weight))
        part = count if known else -(-chunk // PARTS)
        narrow = torch.empty(min(chunk, count), len(weight), dtype=weight.dtype, device=hidden.device)
    else:
        chunk = part = count if known else rows_per_chunk or rows_of_chunk(len(weight))
    for start in range(0, max(count, 1), max(chunk, 1)):  # run once without rows too, so a loss reports its statistics
        rows = slice(start, min(start + chunk, count))
        for begin in range(start, max(rows.stop, 1), max(part, 1)):
            some = slice(begin, min(begin + part, rows.stop))
            logits = logits if known else product(hidden[some], weight, logits)
            assert logits is not None
            own = logits[: some.stop - begin]  # no longer needed, so overwritten below
            chosen = None if support is None else support[0][some]
            if chosen is not None and not known:
                own, changed = changed_columns(own, chosen, shard, columns)
            into = own if narrow is None else narrow[begin - start : some.stop - start]
            (labels, *given), more = form(some, own)
            cut = None if chosen is None else SupportColumns(own, chosen, shard, columns)
            outside = labels_outside(labels, chosen)
            if narrow is None:
                overwrite_with_gradient(own, outside, *given)
            else:
                ops.logprob_grad_into(into, own, outside, *given)
            if changed is not None:
                changed.scale_gradient(into)
            if cut is not None:
                cut.add_gradient(into, *given[:6])
            if more is not None:
                into[:, : more.shape[1]] += more
                del more  # free it before the next part allocates its own
        grad = (logits if narrow is None else narrow)[: rows.stop - start]
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[rows])
        if total is not None:
            total.add(grad, hidden[rows])


class HeadLogprobs(torch.autograd.Function):
    """Autograd function: log-probability and entropy of the rows of `hidden @ weight.T`. Every row must have a label.

    If there is only one chunk, backward uses its logits. Otherwise it recomputes them.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, main_grad: Tensor | None, shard: VocabShard,
        temperature: float, rows_per_chunk: int | None, with_entropy: bool, support: Supports | None,
        product: Product,
    ):  # fmt: skip
        rest, parts = (temperature, None, shard.start, shard.without_padding(len(weight))), []
        chunk = rows_per_chunk or rows_of_chunk(len(weight))
        logits = None
        for start in range(0, max(len(hidden), 1), max(chunk, 1)):  # one empty chunk if there are no rows
            some = slice(start, start + chunk)
            logits = product(hidden[some], weight, logits)  # [c, V_local]
            cut = None if support is None else support[some]
            own, ctx.changed = changed_columns(logits, cut, shard, rest[-1])
            parts.append(logits_results(own, labels[some], shard, rest, with_entropy, cut))
        logprobs, entropy, peak, log_sum = (torch.cat(column) for column in zip(*parts, strict=True))
        kept = (own,) if len(parts) == 1 else ()  # no extra memory: this one chunk was needed anyway
        ctx.save_for_backward(hidden, weight, labels, peak, log_sum, entropy, *kept)
        ctx.support = support  # no tensor of it needs a gradient
        ctx.rest, ctx.rows_per_chunk, ctx.main_grad, ctx.shard = rest, rows_per_chunk, main_grad, shard
        ctx.product = product
        ctx.set_materialize_grads(False)  # an entropy that no loss uses then costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, labels, *saved = ctx.saved_tensors
        columns, logits = [labels, *saved[:3]], saved[3] if len(saved) > 3 else None
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        total = WeightGradient(weight, ctx.main_grad) if needs_weight or ctx.main_grad is not None else None

        def form(rows: slice, _: Tensor) -> tuple:
            slopes = (None if g is None else g[rows].contiguous() for g in (grad_logprobs, grad_entropy))
            return (*(column[rows] for column in columns), *slopes, *ctx.rest), None

        cut = None if ctx.support is None else (ctx.support, ctx.shard)
        more = {"support": cut, "product": ctx.product, "changed": None if logits is None else ctx.changed}
        add_gradients(hidden, weight, ctx.rows_per_chunk, form, grad_hidden, total, logits, **more)
        by_weight = None
        if total is not None and (found := total.for_autograd()) is not None:
            by_weight = found.to(weight.dtype)
        elif needs_weight:
            by_weight = torch.empty_like(weight)  # for Megatron's hooks: the gradient is in main_grad
        return grad_hidden, by_weight, *(None,) * 8


class HeadLoss(torch.autograd.Function):
    """Autograd function: a loss on rows of `hidden @ weight.T`. Every row must have a label.

    The forward pass also computes the gradient.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, main_grad: Tensor | None, slopes: Slopes,
        shard: VocabShard, temperature: float, rows_per_chunk: int | None, support: Supports | None, product: Product,
    ):  # fmt: skip
        rest, totals = (temperature, None, shard.start, shard.without_padding(len(weight))), []
        grad_hidden, ctx.is_frozen = torch.empty_like(hidden), main_grad is None and not ctx.needs_input_grad[1]
        total = None if ctx.is_frozen else WeightGradient(weight, main_grad)

        def form(rows: slice, logits: Tensor) -> tuple:
            cut = None if support is None else support[rows]
            logprobs, entropy, peak, log_sum = logits_results(logits, labels[rows], shard, rest, support=cut)
            sums, by_logprob, by_entropy, by_logits = slopes(rows, logits, logprobs, entropy)
            totals.append(sums)
            return (labels[rows], peak, log_sum, entropy, by_logprob, by_entropy, *rest), by_logits

        # Done in the forward pass, because a chunk's logits are gone afterwards. Backward only scales the gradient.
        cut = None if support is None else (support, shard)
        add_gradients(hidden, weight, rows_per_chunk, form, grad_hidden, total, support=cut, product=product)
        sums = torch.stack(totals).sum(0)  # [K] float64
        ctx.save_for_backward(grad_hidden, weight, None if total is None else total.for_autograd())
        ctx.mark_non_differentiable(sums)
        return sums[0].to(accumulator(hidden.dtype)), sums

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _: Tensor):
        grad_hidden, weight, grad_weight = ctx.saved_tensors
        if ctx.is_frozen:
            by_weight = None
        elif grad_weight is not None:
            by_weight = scaled(grad_weight, grad_loss, weight.dtype)
        else:  # it was added to main_grad before it could be scaled
            torch._assert_async(grad_loss == 1, "main_grad: has the gradient of a head's loss that was then scaled.")
            by_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # as in HeadLogprobs
        return scaled(grad_hidden, grad_loss, grad_hidden.dtype), by_weight, *(None,) * 8


def lm_head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]],
    *,
    shard: VocabShard,
    rows: TakenRows | None = None,
    kept: Tensor | None = None,
    temperature: float = 1.0,
    main_grad: Tensor | None = None,
    rows_per_chunk: int | None = None,
    term: LogitsTerm | None = None,
    support: Tensor | None = None,
    adjustment: Tensor | None = None,
    product: Product = head_logits,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a loss that is a sum over rows, and its statistics, holding only one chunk of logits at a time.

    loss(logprobs, entropy, places) -> (loss_sum, sums): is called once per chunk, with the float32 log-probabilities
      and entropies `[c]` of the labels at `places` (`[c]` int64). `loss_sum` and the statistics in `sums` are 0-dim.
      They are added over the chunks, the statistics in float64.
    term: an additional loss term on whole logits. Chunks are then smaller, to make room for its temporary tensors.
    The other arguments are as in `lm_head_logprobs`.

    The gradient is always computed together with the loss. Backward may run only once. The loss may be scaled before
    backward, but not if main_grad is given: the weight's gradient is then already in main_grad, so backward would raise
    RuntimeError.
    """
    check_temperature(temperature, labels)
    kept = places_of(labels) if kept is None else kept
    names: list[str] = []

    def slopes(chunk: slice, logits: Tensor, logprobs: Tensor, entropy: Tensor) -> tuple:
        by_logits = None
        leaves = [logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()]
        with torch.enable_grad():
            total, sums = loss(*leaves, kept[chunk])
            by_logprob, by_entropy = torch.autograd.grad(total, leaves, allow_unused=True)  # of [c] leaves: cheap
        if term is not None:
            part, more, by_logits = term(logits, kept[chunk])
            total, sums = total + part.to(total.dtype), sums | more
        names[:] = sums  # HeadLoss returns only tensors; names are the same in every chunk
        column = torch.stack([total.detach().double(), *(value.detach().double() for value in sums.values())])
        by_logprob = torch.zeros_like(logprobs) if by_logprob is None else by_logprob.contiguous()
        return column, by_logprob, dense(by_entropy), by_logits

    picked, targets = pick(hidden, rows, kept, weight.dtype), labels.index_select(0, kept)
    if term is not None:
        rows_per_chunk = rows_per_chunk or rows_of_chunk(CHUNKS_OF_TERM * len(weight))
    options = (shard, temperature, rows_per_chunk, taken(support, adjustment, kept), product)
    total, sums = HeadLoss.apply(picked, weight, targets, main_grad, slopes, *options)
    return total, dict(zip(names, sums[1:].unbind(), strict=True))


def lm_head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shard: VocabShard,
    rows: TakenRows | None = None,
    kept: Tensor | None = None,
    temperature: float = 1.0,
    main_grad: Tensor | None = None,
    rows_per_chunk: int | None = None,
    with_entropy: bool = True,
    support: Tensor | None = None,
    adjustment: Tensor | None = None,
    product: Product = head_logits,
) -> tuple[Tensor, Tensor]:
    """Return log p(label) and entropy of `hidden @ weight.T`, both `[T]` float32, without ever holding `[T, V]` logits.

    hidden `[R, H]`, weight `[V_local, H]`, labels `[T]` int64.
    rows: the row of hidden that predicts each of the kept labels; several labels may share a row. Default: row t
      predicts label t.
    kept: int64 places of the labels to compute, which must be 0 or more; other places give 0. Default: all labels of 0
      or more, which synchronizes with the device.
    main_grad: tensor to which the weight's gradient is added; autograd then gets a meaningless placeholder.
    with_entropy: False saves the time for the entropy, which is then NaN.
    support: `[T, W]` int32, adjustment: `[T, W, P]` float32, both as in megatron_rl/support.py. A label that has a
      support gets its log-probability over the support's tokens alone. Other logits get no gradient.
    product: function that computes the logits.
    """
    check_temperature(temperature, labels)
    kept = places_of(labels) if kept is None else kept
    picked = pick(hidden, rows, kept, weight.dtype)
    targets = labels.index_select(0, kept)
    cut = taken(support, adjustment, kept)
    options = (main_grad, shard, temperature, rows_per_chunk, with_entropy, cut, product)
    logprobs, entropy = HeadLogprobs.apply(picked, weight, targets, *options)
    zeros = torch.zeros(len(labels), dtype=logprobs.dtype, device=hidden.device)
    return zeros.index_copy(0, kept, logprobs), zeros.index_copy(0, kept, entropy)


def places_of(labels: Tensor) -> Tensor:
    """Return the indices of the labels that are 0 or more. Synchronizes with the device."""
    return (labels >= 0).nonzero()[:, 0]


def taken(support: Tensor | None, adjustment: Tensor | None, kept: Tensor) -> Supports | None:
    if support is None:
        return None
    return Supports(support.index_select(0, kept), None if adjustment is None else adjustment.index_select(0, kept))


def pick(hidden: Tensor, rows: TakenRows | None, kept: Tensor, dtype: torch.dtype) -> Tensor:
    # Only rows with a label go through the output layer; a prompt's rows have none.
    if rows is None:  # each row once
        rows = TakenRows(kept, [(kept, torch.arange(len(kept), device=kept.device))])
    return rows.of_values(hidden).to(dtype)
