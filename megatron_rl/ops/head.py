"""The output layer and what follows it, a chunk of rows at a time, so that `[T, V]` logits are never held.

Shapes: T labels, R rows of hidden, V_local this rank's columns, which may be padded behind the vocabulary's, H hidden
size.
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

CHUNK_BYTES = 1 << 30
"""Of a chunk's logits in float32."""
MOST_ROWS = 4096
PARTS = 4
"""Of a chunk whose gradient has 16 bits: only one part at a time has logits in float32. The fewer chunks there are, the
less often the weight's gradient is read and written."""
TILE_ROWS = 256
"""A GPU computes products in tiles of so many rows, or of a divisor: a part of one takes as long as the whole."""


def rows_of_chunk(columns: int) -> int:
    """Return the rows of which `[rows, V_local]` float32 logits are held at a time; columns: V_local, padding too.

    Whole tiles, where there is room for one.
    """
    rows = min(MOST_ROWS, max(1, CHUNK_BYTES // (4 * columns)))
    return rows - rows % TILE_ROWS if rows > TILE_ROWS else rows


def rows_of_gradient(columns: int) -> int:
    """Return the rows of which a 16-bit gradient is held at a time, beside the logits of one of their PARTS.

    Both together take no more than the float32 logits of `rows_of_chunk` and their gradient would.
    """
    return min(MOST_ROWS, 2 * rows_of_chunk(columns))


def head_logits(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """`hidden @ weight.T`; on CUDA float32 also for 16-bit operands, whose products are summed in float32 anyway.

    out: a chunk's logits that nobody needs any more, of at least as many rows.
    """
    out = None if out is None else out[: len(hidden)]
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32, out=out)
    return torch.mm(hidden, weight.T, out=out)


class WeightGradient:
    """The sum over chunks of `grad_logits.T @ hidden`, in the accumulating dtype: sums in bfloat16 would drift.

    main_grad: takes the sum in place of autograd, as layers of Megatron add their gradients to it.
    """

    def __init__(self, weight: Tensor, main_grad: Tensor | None) -> None:
        self.main_grad = main_grad
        is_exact = main_grad is not None and main_grad.dtype == accumulator(weight.dtype)
        self.sum = main_grad if is_exact else None

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add a chunk's part, of rows in the weight's dtype."""
        if grad_logits.is_cuda and grad_logits.dtype != torch.float32:
            if self.sum is None:
                self.sum = torch.mm(grad_logits.T, hidden, out_dtype=torch.float32)
            else:  # added inside the product: a sum of its own would move the weight's size three times
                torch.addmm(self.sum, grad_logits.T, hidden, out_dtype=torch.float32, out=self.sum)
        elif self.sum is not None and self.sum.dtype == grad_logits.dtype:
            self.sum.addmm_(grad_logits.T, hidden)
        else:
            product = torch.mm(grad_logits.T, hidden).to(accumulator(hidden.dtype))
            self.sum = product if self.sum is None else self.sum.add_(product)

    def for_autograd(self) -> Tensor | None:
        """Return the sum, or None where it has gone to main_grad."""
        if self.main_grad is None:
            return self.sum
        if self.sum is not self.main_grad:
            self.main_grad.add_(self.sum)
        return None


def placeholder(weight: Tensor) -> Tensor:
    """Return a gradient for autograd where the real one is in main_grad: Megatron's hooks wait for one, unread."""
    return torch.empty_like(weight)


def scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product, in the gradient's own memory where it has the dtype: no tensor of its size is made twice."""
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, by.to(gradient.dtype), out=out)


def columns_of(weight: Tensor, shard: VocabShard, temperature: float) -> tuple[float, None, int, int]:
    """Return the last arguments of the log-prob operators: temperature, none for each row, first column, columns."""
    return temperature, None, shard.start, max(0, min(len(weight), shard.stop - shard.start))


def logits_results(
    logits: Tensor, labels: Tensor, shard: VocabShard, rest: tuple, with_entropy: bool = True
) -> tuple[Tensor, ...]:
    """(log-probs, entropy, peak, log-sum) of logits that need no gradient; entropy that is not wanted is NaN."""
    partials = ops.logprob_partials(logits, labels, *rest, with_entropy)
    if shard.is_split:
        assert shard.group is not None
        partials = gather_partials(ops.logprob_fold(partials, labels, *rest[:2]), shard.group)
    return ops.logprob_finish(logits, partials, labels, *rest, shard.size, False)


Form = Callable[[slice, Tensor], tuple]
"""(rows, their logits) -> the other arguments of the gradient's operators."""
Beside = Callable[[slice, Tensor], Tensor]
"""(rows, their logits) -> the gradient `[c, columns]`, of this rank's columns, that a further term adds."""
LogitsTerm = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor], Tensor]]
"""(logits `[c, V_local]`, places `[c]`) -> the loss's part, its statistics, and its gradient `[c, columns]`."""
CHUNKS_OF_TERM = 4
"""Tensors as large as a chunk's logits that a term of whole logits makes beside them."""


def add_gradients(
    hidden: Tensor, weight: Tensor, rows_per_chunk: int | None, form: Form, grad_hidden: Tensor | None,
    total: WeightGradient | None, logits: Tensor | None = None, beside: Beside | None = None,
) -> None:  # fmt: skip
    """Form the gradient of the logits of all rows, a chunk at a time, and of it that of hidden and of the weight.

    It takes the memory of the logits, or where they are wider than the weight, memory of the weight's dtype, so that
    products run on 16-bit operands. logits: of all rows, which are one chunk then. beside: of a further term.
    """
    narrow, count, known = None, len(hidden), logits is not None
    if hidden.is_cuda and weight.dtype != torch.float32:
        chunk = count if known else rows_per_chunk or rows_of_gradient(len(weight))
        part = count if known else -(-chunk // PARTS)
        narrow = torch.empty(min(chunk, count), len(weight), dtype=weight.dtype, device=hidden.device)
    else:
        chunk = part = count if known else rows_per_chunk or rows_of_chunk(len(weight))
    for start in range(0, max(count, 1), max(chunk, 1)):  # without rows too a loss says which statistics it has
        rows = slice(start, min(start + chunk, count))
        for begin in range(start, max(rows.stop, 1), max(part, 1)):
            some = slice(begin, min(begin + part, rows.stop))
            logits = logits if known else head_logits(hidden[some], weight, logits)
            assert logits is not None
            own = logits[: some.stop - begin]  # nobody uses them again
            more = None if beside is None else beside(some, own)  # reads what is overwritten below
            into = own if narrow is None else narrow[begin - start : some.stop - start]
            if narrow is None:
                overwrite_with_gradient(own, *form(some, own))
            else:
                ops.logprob_grad_into(into, own, *form(some, own))
            if more is not None:
                into[:, : more.shape[1]] += more
                del more  # before the next part makes its own
        grad = (logits if narrow is None else narrow)[: rows.stop - start]
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[rows])
        if total is not None:
            total.add(grad, hidden[rows])


class HeadLogprobs(torch.autograd.Function):
    """Log-probability and entropy of `hidden @ weight.T` rows, all of which have a label.

    One chunk keeps its logits for backward; several are formed again there.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, main_grad: Tensor | None, shard: VocabShard,
        temperature: float, rows_per_chunk: int | None, with_entropy: bool,
    ):  # fmt: skip
        rest, parts = columns_of(weight, shard, temperature), []
        chunk = rows_per_chunk or rows_of_chunk(len(weight))
        logits = None
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):  # without rows one empty chunk
            logits = head_logits(h, weight, logits)  # [c, V_local]
            parts.append(logits_results(logits, y, shard, rest, with_entropy))
        logprobs, entropy, peak, log_sum = (torch.cat(column) for column in zip(*parts, strict=True))
        kept = (logits,) if len(parts) == 1 else ()  # no more memory than the chunk that had to be there anyway
        ctx.save_for_backward(hidden, weight, labels, peak, log_sum, entropy, *kept)
        ctx.rest, ctx.rows_per_chunk, ctx.main_grad = rest, rows_per_chunk, main_grad
        ctx.set_materialize_grads(False)  # an entropy that no loss uses costs nothing
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
            return *(column[rows] for column in columns), *slopes, *ctx.rest

        add_gradients(hidden, weight, ctx.rows_per_chunk, form, grad_hidden, total, logits)
        by_weight = None
        if total is not None and (found := total.for_autograd()) is not None:
            by_weight = found.to(weight.dtype)
        elif needs_weight:
            by_weight = placeholder(weight)
        return grad_hidden, by_weight, *(None,) * 6


class HeadLoss(torch.autograd.Function):
    """A loss of `hidden @ weight.T` rows, all of which have a label; the gradient is formed together with it.

    Three matrix products a chunk: logits, and after they have become their own gradient those of hidden and weight. A
    frozen weight has none.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, main_grad: Tensor | None, slopes: Slopes,
        shard: VocabShard, temperature: float, rows_per_chunk: int | None, beside: Beside | None,
    ):  # fmt: skip
        rest, totals = columns_of(weight, shard, temperature), []
        grad_hidden, ctx.is_frozen = torch.empty_like(hidden), main_grad is None and not ctx.needs_input_grad[1]
        total = None if ctx.is_frozen else WeightGradient(weight, main_grad)

        def form(rows: slice, logits: Tensor) -> tuple:
            logprobs, entropy, peak, log_sum = logits_results(logits, labels[rows], shard, rest)
            sums, by_logprob, by_entropy = slopes(rows, logprobs, entropy)
            totals.append(sums)
            return labels[rows], peak, log_sum, entropy, by_logprob, by_entropy, *rest

        # Here, in the forward, as a chunk's logits are gone afterwards: backward only scales.
        add_gradients(hidden, weight, rows_per_chunk, form, grad_hidden, total, beside=beside)
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
        else:  # it was added before anybody could scale it
            torch._assert_async(grad_loss == 1, "main_grad: has the gradient of a head's loss that was then scaled.")
            by_weight = placeholder(weight) if ctx.needs_input_grad[1] else None
        return scaled(grad_hidden, grad_loss, grad_hidden.dtype), by_weight, *(None,) * 7


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
    main_grad: Tensor | None = None,
    rows_per_chunk: int | None = None,
    term: LogitsTerm | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss that is a sum over rows, and its statistics, without holding more than one chunk of logits.

    loss(logprobs, entropy, places) -> (loss_sum, sums): the loss of the labels at `places` (`[c]` int64) from their
    log-probabilities and entropy, `[c]` float32; `sums` are 0-dim, and both are added over the chunks (the statistics
    as float64). The other arguments are `lm_head_logprobs`'. The gradient is formed together with the loss, also where
    none is asked for, and may be used once or scaled by what follows; the weight's is summed in float32. Where it goes
    to main_grad, it is added before this returns, so that nothing may scale the loss: RuntimeError in backward.
    term: a further one, of whole logits; where there is one, chunks are smaller by what it makes beside them.
    """
    check_temperature(temperature, labels)
    kept = places_of(labels) if kept is None else kept
    names: list[str] = []
    of_term: list[tuple[Tensor, dict[str, Tensor]]] = []

    def beside(chunk: slice, logits: Tensor) -> Tensor:
        assert term is not None
        *found, gradient = term(logits, kept[chunk])
        of_term.append((found[0], found[1]))
        return gradient

    def slopes(chunk: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        leaves = [logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()]
        with torch.enable_grad():
            total, sums = loss(*leaves, kept[chunk])
            by_logprob, by_entropy = torch.autograd.grad(total, leaves, allow_unused=True)  # of [c] leaves: cheap
        if term is not None:
            part, more = of_term.pop()
            total, sums = total + part.to(total.dtype), sums | more
        names[:] = sums  # HeadLoss returns tensors only; every chunk says the same names
        column = torch.stack([total.detach().double(), *(value.detach().double() for value in sums.values())])
        by_logprob = torch.zeros_like(logprobs) if by_logprob is None else by_logprob.contiguous()
        return column, by_logprob, dense(by_entropy)

    picked, targets = pick(hidden, rows, kept, weight.dtype), labels.index_select(0, kept)
    if term is not None:
        rows_per_chunk = rows_per_chunk or rows_of_chunk(CHUNKS_OF_TERM * len(weight))
    options = (shard, temperature, rows_per_chunk, None if term is None else beside)
    total, sums = HeadLoss.apply(picked, weight, targets, main_grad, slopes, *options)
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
    rows_per_chunk: int | None = None,
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
    loss, sums = HeadLoss.apply(picked, weight, targets, None, slopes, shard, temperature, rows_per_chunk, None)
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
    main_grad: Tensor | None = None,
    rows_per_chunk: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return log p(label) and entropy of `hidden @ weight.T`, both `[T]` float32, without ever holding `[T, V]`.

    hidden `[R, H]`, weight `[V_local, H]`, labels `[T]` int64. Label t is predicted by row `rows[t]` of hidden (int64,
    several labels may share one), by row t where `rows` is absent. kept: the places of the labels to compute, int64,
    all with labels of 0 or more; where absent, those of all such labels, which waits for the device. Other places give
    0. rows as TakenRows are those of the kept labels: then the gradient of a row that several share is the same bits
    every time. Rows go through the head in chunks; the backward forms the logits of each again, unless there is one
    chunk only. The weight's gradient is summed over the chunks in float32, in main_grad where that is given: a tensor
    like the weight, to which it is added. Autograd then gets a gradient without meaning, if the weight asks for one.
    with_entropy: where False, the time for the entropy is saved and what is returned for it is NaN.
    """
    check_temperature(temperature, labels)
    kept = places_of(labels) if kept is None else kept
    picked = pick(hidden, rows, kept, weight.dtype)
    targets = labels.index_select(0, kept)
    options = (main_grad, shard, temperature, rows_per_chunk, with_entropy)
    logprobs, entropy = HeadLogprobs.apply(picked, weight, targets, *options)
    zeros = torch.zeros(len(labels), dtype=logprobs.dtype, device=hidden.device)
    return zeros.index_copy(0, kept, logprobs), zeros.index_copy(0, kept, entropy)


def places_of(labels: Tensor) -> Tensor:
    """Return the places of the labels that count. On a device its length is waited for."""
    return (labels >= 0).nonzero()[:, 0]


def pick(hidden: Tensor, rows: Tensor | TakenRows | None, kept: Tensor, dtype: torch.dtype) -> Tensor:
    # Only rows with a label go through the output layer: a prompt's have none.
    if rows is None:  # each once
        rows = TakenRows(kept, [(kept, torch.arange(len(kept), device=kept.device))])
    if isinstance(rows, TakenRows):
        return rows.of_values(hidden).to(dtype)
    return hidden.index_select(0, rows.index_select(0, kept)).to(dtype)
