"""Stand-ins for Transformer Engine's kernels as torch operators, `torch.ops.te_stand_in`.

On the host they compute with plain torch. On the rehearsal's simulated device, whose tensors have no data, each call
only allocates the kernel's results. It counts as one launch, or as many as LAUNCHES says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "te_stand_in"
LAUNCHES: dict[Any, Callable[..., int]] = {}
"""{operator whose call is not a single launch: function of its arguments that returns the number of launches}."""
CHUNK, BLOCKS, TENSORS = 2048 * 32, 320, (110, 64, 48, 36, 30)
"""Limits of one launch over lists of tensors. CHUNK: elements per block. BLOCKS: number of blocks. TENSORS: number of
tensors per list, for 1 to 5 lists."""

_ROWS = torch.contiguous_format
_library = torch.library.Library(NAMESPACE, "DEF")


def _kernel(schema: str, *, without_memory: Callable, launches: Callable | None = None, flops: Callable | None = None):
    """Register the decorated host implementation as a torch operator.

    without_memory: replaces it for FakeTensors; returns empty tensors that have the results' shapes and dtypes.
    launches: returns the number of launches. flops: returns the FLOPs, given shapes instead of tensors.
    """

    def define(compute: Callable | None) -> Any:
        name = schema.partition("(")[0]
        _library.define(schema)
        if compute is not None:
            _library.impl(name, compute, "CPU")
        _library.impl(name, without_memory, "Meta")
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        if launches is not None:
            LAUNCHES[packet.default] = launches
        if flops is not None:
            register_flop_formula(packet)(flops)
        return packet.default

    return define


def _nothing(*_: Any) -> None: ...


# -- products ----------------------------------------------------------------------------------------------------------


def _product_flops(a, b, turns_a, turns_b, *_, **__) -> int:
    return 2 * a[0] * a[1] * b[0 if turns_b else 1]


@_kernel(
    "product(Tensor a, Tensor b, bool turns_a, bool turns_b, ScalarType? dtype=None, Tensor? bias=None) -> Tensor",
    without_memory=lambda a, b, turns_a, turns_b, dtype=None, bias=None: a.new_empty(
        a.shape[1 if turns_a else 0], b.shape[0 if turns_b else 1], dtype=dtype
    ),
    flops=_product_flops,
)
def product(a, b, turns_a, turns_b, dtype=None, bias=None):
    a, b = (x.to(dtype or x.dtype) for x in (a, b))
    out = (a.t() if turns_a else a) @ (b.t() if turns_b else b)
    return out if bias is None else out + bias.to(out.dtype)


@_kernel(
    "add_product_(Tensor(a!) target, Tensor gradient, Tensor x) -> ()",
    without_memory=_nothing,
    flops=lambda target, gradient, x, **_: 2 * gradient[0] * gradient[1] * x[1],
)
def add_product_(target, gradient, x):
    """Accumulate a matrix's gradient into `target`."""
    target.add_((gradient.t() @ x).to(target.dtype))


def _grouped_flops(x, matrices, *_, **__) -> int:
    return 2 * x[0] * matrices[0][0] * matrices[0][1]


def _filled(x, matrices, splits, *_) -> int:
    return sum(rows > 0 for rows in splits)


@_kernel(
    "grouped_product(Tensor x, Tensor[] matrices, int[] splits, bool turns) -> Tensor",
    without_memory=lambda x, matrices, splits, turns: x.new_empty(x.shape[0], matrices[0].shape[0 if turns else 1]),
    launches=_filled,  # one cuBLAS call per matrix, on several streams
    flops=_grouped_flops,
)
def grouped_product(x, matrices, splits, turns):
    """Multiply each split of the rows by its matrix."""
    parts = zip(x.split(splits), matrices, strict=True)
    return torch.cat([rows @ (matrix.t() if turns else matrix) for rows, matrix in parts])


def _gradients(gradient: Tensor, x: Tensor, splits: list[int]) -> list[Tensor]:
    return [part.t() @ rows for part, rows in zip(gradient.split(splits), x.split(splits), strict=True)]


@_kernel(
    "grouped_gradients(Tensor gradient, Tensor x, int[] splits) -> Tensor[]",
    without_memory=lambda gradient, x, splits: [x.new_empty(gradient.shape[1], x.shape[1]) for _ in splits],
    launches=lambda gradient, x, splits: len(splits),  # an expert without rows gets zeros
    flops=lambda gradient, x, splits, **_: 2 * x[0] * x[1] * gradient[1],
)
def grouped_gradients(gradient, x, splits):
    """Return the gradient of each matrix of a grouped product."""
    return _gradients(gradient, x, splits)


@_kernel(
    "add_grouped_gradients_(Tensor(a!)[] targets, Tensor gradient, Tensor x, int[] splits) -> ()",
    without_memory=_nothing,
    launches=lambda targets, gradient, x, splits: _filled(x, targets, splits),
    flops=lambda targets, gradient, x, splits, **_: 2 * x[0] * x[1] * gradient[1],
)
def add_grouped_gradients_(targets, gradient, x, splits):
    """Accumulate the gradient of each matrix of a grouped product into `targets`."""
    for target, found in zip(targets, _gradients(gradient, x, splits), strict=True):
        target.add_(found.to(target.dtype))


# -- norm and rotation -------------------------------------------------------------------------------------------------


@_kernel(
    "rms_norm(Tensor x, Tensor weight, float eps, bool zero_centered) -> (Tensor, Tensor)",
    without_memory=lambda x, weight, *_: (torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)),
)
def rms_norm(x, weight, eps, zero_centered):
    """Return the normed rows, computed in float32 and rounded once, and the float32 factor of each row."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float() + zero_centered, eps)
    return normed.to(x.dtype), (x.float().square().mean(-1) + eps).rsqrt()


@_kernel(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor factor, Tensor weight, bool zero_centered)"
    " -> (Tensor, Tensor)",
    without_memory=lambda gradient, x, factor, weight, _: (torch.empty_like(x), torch.empty_like(weight)),
    launches=lambda *_: 2,  # a second kernel sums the weight's gradient
)
def rms_norm_backward(gradient, x, factor, weight, zero_centered):
    """Return the gradients of the rows and of the weight."""
    normed, gradient = x.float() * factor[:, None], gradient.float()
    scaled = gradient * (weight.float() + zero_centered)
    of_rows = factor[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return of_rows.to(x.dtype), (gradient * normed).sum(0).to(weight.dtype)


@_kernel(
    "rotate(Tensor x, Tensor angles, bool back) -> Tensor",
    without_memory=lambda x, angles, back: x.new_empty(x.shape),
)
def rotate(x, angles, back):
    """Rotate `[s, b, heads, D]` in float32 by the angles `[s, 1, 1, <= D]` of its rows. back: rotate backwards."""
    rotated, rest = x[..., : angles.shape[-1]].float(), x[..., angles.shape[-1] :]
    low, high = rotated.chunk(2, dim=-1)
    sines = -angles.sin() if back else angles.sin()
    rotated = rotated * angles.cos() + torch.cat([-high, low], dim=-1) * sines
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


# -- attention by cuDNN; on the host DotProductAttention does not call these -------------------------------------------


def _rows_of_statistics(tokens: int) -> int:
    """Return the number of rows of softmax statistics that cuDNN's execution plan has for `tokens` rows.

    It is the next power of 2, at least 1,024. Above 32,768 it is the next multiple of 32,768.
    """
    return max(1024, 1 << (tokens - 1).bit_length()) if tokens <= 1 << 15 else -(-tokens >> 15) << 15


# Launches: zeros, because rows may be padding; then lengths and offsets of the segments; in forward a random state.
attention = _kernel(
    "attention(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k) -> (Tensor, Tensor, Tensor)",
    without_memory=lambda query, key, value, *_: (
        query.new_empty(*query.shape[:2], value.shape[2]),
        query.new_empty(_rows_of_statistics(query.shape[0]), query.shape[1], 1, dtype=torch.float32),
        query.new_empty(2, dtype=torch.int64),
    ),
    launches=lambda *_: 1 + 2 + 1 + 1,
)(None)
attention_backward = _kernel(
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor statistics, Tensor "
    "random, Tensor cu_seq_q, Tensor cu_seq_k) -> (Tensor, Tensor, Tensor)",
    without_memory=lambda gradient, *qkv: tuple(torch.empty_like(x, memory_format=_ROWS) for x in qkv[:3]),
    launches=lambda *_: 3 + 2 + 2,
)(None)


# -- tokens and experts ------------------------------------------------------------------------------------------------


@_kernel(
    "permute(Tensor x, Tensor? probs, Tensor routes, int rows) -> (Tensor, Tensor, Tensor)",
    without_memory=lambda x, probs, routes, rows: (
        x.new_empty(rows, x.shape[1]),
        (x if probs is None else probs).new_empty(0 if probs is None else rows),
        x.new_empty(routes.shape[0], 2 * routes.shape[1] + 1, dtype=torch.int32),
    ),
    launches=lambda *_: 4,  # three of them make the map
)
def permute(x, probs, routes, rows):
    """Group tokens by expert.

    Returns the tokens, their probabilities, and the map that the other kernels use. The map has one row per token. On
    the host, a row contains for each expert the token's position in the result, or -1.
    """
    chosen = routes.bool().t()  # [experts, tokens]
    places = chosen.nonzero()[:, 1]
    assert len(places) == rows
    places_of = torch.full((routes.shape[0], 2 * routes.shape[1] + 1), -1, dtype=torch.int32)
    places_of[:, : routes.shape[1]].t()[chosen] = torch.arange(rows, dtype=torch.int32)
    return x.index_select(0, places), x.new_empty(0) if probs is None else probs.t()[chosen], places_of


@_kernel(
    "unpermute(Tensor x, Tensor? probs, Tensor places, int tokens) -> (Tensor, Tensor)",
    without_memory=lambda x, probs, places, tokens: (
        x.new_empty(tokens, x.shape[1]),
        x.new_empty(0) if probs is None else probs.new_empty(tokens, places.shape[1] // 2),
    ),
)
def unpermute(x, probs, places, tokens):
    """Sum the rows of each token, and return the probabilities to their original order."""
    places = places[:, : places.shape[1] // 2]
    token, expert = (places >= 0).nonzero().unbind(1)
    rows = places[token, expert]
    out = torch.zeros(tokens, x.shape[1]).index_add(0, token, x.index_select(0, rows).float()).to(x.dtype)
    if probs is None:
        return out, x.new_empty(0)
    return out, probs.new_zeros(places.shape).index_put((token, expert), probs.index_select(0, rows))


@_kernel(
    "permute_again(Tensor x, Tensor places, int rows) -> Tensor",
    without_memory=lambda x, places, rows: x.new_empty(rows, x.shape[1]),
)
def permute_again(x, places, rows):
    """Put tokens into the order of `permute`. This is the backward of `unpermute`."""
    places = places[:, : places.shape[1] // 2]
    token, expert = (places >= 0).nonzero().unbind(1)
    return x.new_zeros(rows, x.shape[1]).index_copy(0, places[token, expert].long(), x.index_select(0, token))


@_kernel(
    "sort_chunks(Tensor x, Tensor? probs, Tensor sizes, Tensor order) -> (Tensor, Tensor, Tensor)",
    without_memory=lambda x, probs, sizes, order: (
        x.new_empty(x.shape),
        x.new_empty(0) if probs is None else probs.new_empty(probs.shape),
        x.new_empty(x.shape[0], dtype=torch.int32),
    ),
    launches=lambda *_: 2,  # one of them makes the map
)
def sort_chunks(x, probs, sizes, order):
    """Reorder chunks of the rows; also return the rows' former positions."""
    chunks = torch.arange(x.shape[0], dtype=torch.int32).split(sizes.tolist())
    places = torch.cat([chunks[number] for number in order.tolist()])
    return x.index_select(0, places), x.new_empty(0) if probs is None else probs.index_select(0, places), places


@_kernel(
    "sort_chunks_back(Tensor x, Tensor? probs, Tensor places) -> (Tensor, Tensor)",
    without_memory=lambda x, probs, places: (
        x.new_empty(x.shape),
        x.new_empty(0) if probs is None else probs.new_empty(probs.shape),
    ),
)
def sort_chunks_back(x, probs, places):
    """Undo `sort_chunks`."""
    places = places.long()
    back = torch.empty_like(places).index_copy(0, places, torch.arange(len(places)))
    return x.index_select(0, back), x.new_empty(0) if probs is None else probs.index_select(0, back)


# -- lists of tensors --------------------------------------------------------------------------------------------------


def launches_over(lists: int, tensors: list[Tensor]) -> int:
    """Return the number of launches of a multi-tensor kernel over `lists` lists, each with tensors of these sizes.

    A launch takes a limited number of tensors and blocks (see CHUNK, BLOCKS, TENSORS).
    """
    done = blocks = taken = 0
    for tensor in tensors:
        taken += 1
        blocks += -(-tensor.numel() // CHUNK)
        if blocks >= BLOCKS:
            done += blocks // BLOCKS
            blocks %= BLOCKS
            taken = int(blocks > 0)
        elif taken == TENSORS[lists - 1]:
            done, blocks, taken = done + 1, 0, 0
    return done + int(blocks > 0)


@_kernel(
    "l2_norm(Tensor[] tensors, bool each) -> (Tensor, Tensor)",
    without_memory=lambda tensors, each: (
        tensors[0].new_empty(1, dtype=torch.float32),
        tensors[0].new_empty(len(tensors) if each else 0, dtype=torch.float32),
    ),
    launches=lambda tensors, each: launches_over(1, tensors) + 2,  # also zero the sums of blocks, and reduce them
)
def l2_norm(tensors, each):
    """Return the norm of all tensors together and, if `each` is True, the norm of each tensor."""
    norms = torch.stack([tensor.float().norm() for tensor in tensors])
    return norms.norm()[None], norms if each else norms.new_empty(0)


@_kernel(
    "scale(Tensor[] sources, Tensor(a!)[] targets, float factor) -> ()",
    without_memory=_nothing,
    launches=lambda sources, *_: launches_over(2, sources),
)
def scale(sources, targets, factor):
    """Multiply each source by `factor` into its target, which may be the source itself."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source * factor)


@_kernel(
    "adam_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] averages, Tensor(c!)[] squares, Tensor(d!)[] mains"
    ", float lr, float beta1, float beta2, float eps, int step, float weight_decay) -> ()",
    without_memory=_nothing,
    launches=lambda parameters, gradients, averages, squares, mains, *_: launches_over(4 + bool(mains), parameters),
)
def adam_(parameters, gradients, averages, squares, mains, lr, beta1, beta2, eps, step, weight_decay):
    """Update parameters by AdamW. If there are main weights, update those and copy them to the parameters."""
    updated = mains or parameters
    adamw(
        updated,
        [gradient.to(weight.dtype) for gradient, weight in zip(gradients, updated, strict=True)],
        averages,
        squares,
        [],
        [torch.tensor(step - 1.0) for _ in updated],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    for parameter, main in zip(parameters, mains, strict=False):
        parameter.copy_(main)
