"""The kernels of Transformer Engine's compiled extension that a trainer uses, as operators `torch.ops.te_kernels`.

On the rehearsal's simulated device, whose tensors have no data, a call only allocates the kernel's results. It counts
as one launch, or as many as LAUNCHES says. On the host the operators compute with plain torch, so that tests run
Transformer Engine's modules on a CPU. The module te_extension calls them under the extension's names.

Not counted: cuBLAS's and cuDNN's workspaces, and the temporary sums of norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "te_kernels"
LAUNCHES: dict[Any, Callable[..., int]] = {}
"""{operator whose call is not exactly one launch: function of its arguments that returns the number of launches}."""
CHUNK, BLOCKS, TENSORS = 2048 * 32, 320, (110, 64, 48, 36, 30)
"""Limits of one launch over lists of tensors. CHUNK: elements per block. BLOCKS: number of blocks. TENSORS: number of
tensors per list, for 1 to 5 lists."""

_library = torch.library.Library(NAMESPACE, "DEF")


def _kernel(schema: str, *, without_memory: Callable, launches: Callable | None = None, flops: Callable | None = None):
    """Register the decorated host implementation as a torch operator.

    schema: the operator's schema. The other arguments are functions. without_memory: replaces the implementation for
    FakeTensors, and returns empty tensors that have the results' shapes and dtypes. launches: returns the number of
    launches of a call. flops: returns a call's FLOPs, given shapes instead of tensors.
    """

    def define(compute: Callable) -> Any:
        name = schema.partition("(")[0]
        _library.define(schema)
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


# Products


def _multiplied(a: Tensor, b: Tensor, turns_a: bool, turns_b: bool) -> Tensor:
    return (a.t() if turns_a else a) @ (b.t() if turns_b else b)


@_kernel(
    "product(Tensor a, Tensor b, bool turns_a, bool turns_b, ScalarType? dtype=None, Tensor? bias=None) -> Tensor",
    without_memory=lambda a, b, turns_a, turns_b, dtype=None, bias=None: a.new_empty(
        a.shape[1 if turns_a else 0], b.shape[0 if turns_b else 1], dtype=dtype
    ),
    flops=lambda a, b, turns_a, turns_b, *_, **__: 2 * a[0] * a[1] * b[0 if turns_b else 1],
)
def product(a, b, turns_a, turns_b, dtype=None, bias=None):
    """Multiply `[M, K]` by `[K, N]`. turns_a, turns_b: True if the matrix is stored transposed."""
    out = _multiplied(*(x.to(dtype or x.dtype) for x in (a, b)), turns_a, turns_b)
    return out if bias is None else out + bias.to(out.dtype)


@_kernel(
    "product_into_(Tensor(a!) out, Tensor a, Tensor b, bool turns_a, bool turns_b, bool adds) -> ()",
    without_memory=_nothing,
    flops=lambda out, a, b, turns_a, turns_b, *_, **__: 2 * a[0] * a[1] * b[0 if turns_b else 1],
)
def product_into_(out, a, b, turns_a, turns_b, adds):
    """Write a product into `out`, or add it to `out` if `adds` is True."""
    _write(out, _multiplied(a, b, turns_a, turns_b), adds)


def _write(out: Tensor, value: Tensor, adds: bool) -> None:
    if adds:
        out.add_(value.to(out.dtype))
    else:
        out.copy_(value)


@_kernel(
    "column_sums(Tensor x) -> Tensor",
    without_memory=lambda x: x.new_empty(x.shape[1]),
    launches=lambda x: 0,  # the product that reads x computes them, too
)
def column_sums(x):
    """Return the column sums of `x`, which are the gradient of a bias."""
    return x.sum(0)


def _grouped_flops(outs, a, b, turns_a, turns_b, adds, **_) -> int:
    return sum(2 * x[0] * x[1] * y[0 if turns_b else 1] for x, y in zip(a, b, strict=True))


def _grouped_launches(outs, a, b, turns_a, turns_b, adds) -> int:
    # One cuBLAS call for each pair that has rows, on several streams. Without rows, the result is set to zeros.
    filled = [x.numel() > 0 and y.numel() > 0 for x, y in zip(a, b, strict=True)]
    zeroed = [out.numel() > 0 and not adds for out, has_rows in zip(outs, filled, strict=True) if not has_rows]
    return sum(filled) + sum(zeroed)


@_kernel(
    "grouped_product_into_(Tensor(a!)[] outs, Tensor[] a, Tensor[] b, bool turns_a, bool turns_b, bool adds) -> ()",
    without_memory=_nothing,
    launches=_grouped_launches,
    flops=_grouped_flops,
)
def grouped_product_into_(outs, a, b, turns_a, turns_b, adds):
    """Write the product of each pair of matrices into its tensor in `outs`, or add it there if `adds` is True."""
    for out, x, y in zip(outs, a, b, strict=True):
        _write(out, _multiplied(x, y, turns_a, turns_b), adds)


# Norm and rotation


@_kernel(
    "rms_norm(Tensor x, Tensor weight, float eps, bool zero_centered) -> (Tensor, Tensor)",
    without_memory=lambda x, weight, *_: (x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)),
)
def rms_norm(x, weight, eps, zero_centered):
    """Return the normed rows, computed in float32 and rounded once, and the float32 factor of each row."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float() + zero_centered, eps)
    return normed.to(x.dtype), (x.float().square().mean(-1) + eps).rsqrt()


@_kernel(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor factor, Tensor weight, bool zero_centered)"
    " -> (Tensor, Tensor)",
    without_memory=lambda gradient, x, factor, weight, _: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
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
    """Rotate `[s, b, heads, D]` in float32 by its rows' angles `[>= s, 1, 1, <= D]`. back: True to rotate backwards."""
    angles = angles[: x.shape[0]]
    rotated, rest = x[..., : angles.shape[-1]].float(), x[..., angles.shape[-1] :]
    low, high = rotated.chunk(2, dim=-1)
    sines = -angles.sin() if back else angles.sin()
    rotated = rotated * angles.cos() + torch.cat([-high, low], dim=-1) * sines
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


# Attention by cuDNN over packed rows


def _rows_of_statistics(tokens: int) -> int:
    """Return the number of rows of softmax statistics that cuDNN's execution plan has for `tokens` rows.

    It is the next power of 2, at least 1,024. Above 32,768 it is the next multiple of 32,768.
    """
    return max(1024, 1 << (tokens - 1).bit_length()) if tokens <= 1 << 15 else -(-tokens >> 15) << 15


def _statistics(query: Tensor) -> tuple[Tensor, Tensor]:
    shape = _rows_of_statistics(query.shape[0]), query.shape[1], 1
    return query.new_empty(shape, dtype=torch.float32), query.new_empty(2, dtype=torch.int64)


def _segments(query: Tensor, key: Tensor, value: Tensor, query_cu: Tensor, key_cu: Tensor) -> Iterator[tuple]:
    parts = [x.split(cu.diff().tolist()) for x, cu in ((query, query_cu), (key, key_cu), (value, key_cu))]
    return zip(*parts, strict=True)


def _attended(query, key, value, query_cu, key_cu, scale: float, before: int) -> Tensor:
    """Compute causal attention segment by segment. A segment's queries are at the positions of its last keys."""
    found = []
    for q, k, v in _segments(query, key, value, query_cu, key_cu):
        n, m, each = len(q), len(k), q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
        behind = torch.arange(m - n, m)[:, None] - torch.arange(m)  # distance from the key to the query's own position
        is_seen = (behind >= 0) & ((behind <= before) | (before < 0))
        found.append(torch.einsum("hnm,mhd->nhd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), v))
    return torch.cat(found)


@_kernel(
    "attention(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k, float scale, int before)"
    " -> (Tensor, Tensor, Tensor)",
    without_memory=lambda query, key, value, *_: (
        query.new_empty(*query.shape[:2], value.shape[2]),
        *_statistics(query),
    ),
    # Zeros, because rows may be padding; lengths and offsets of the segments; the kernel; a random state.
    launches=lambda *_: 1 + 2 + 1 + 1,
)
def attention(query, key, value, cu_seq_q, cu_seq_k, scale, before):
    """Return attention's result, the softmax statistics and a random state.

    before: number of keys before a query's own position that the query attends to; -1 for all.
    """
    return _attended(query, key, value, cu_seq_q, cu_seq_k, scale, before), *_statistics(query)


@_kernel(
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k,"
    " float scale, int before) -> (Tensor, Tensor, Tensor)",
    without_memory=lambda gradient, *qkv: tuple(x.new_empty(x.shape) for x in qkv[:3]),
    launches=lambda *_: 3 + 2 + 2,
)
def attention_backward(gradient, query, key, value, cu_seq_q, cu_seq_k, scale, before):
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        out = _attended(*inputs, cu_seq_q, cu_seq_k, scale, before)
        return torch.autograd.grad(out, inputs, gradient)


# Lists of tensors


def launches_over(lists: int, tensors: list[Tensor]) -> int:
    """Return the number of launches of a multi-tensor kernel over `lists` lists of tensors, each with these sizes.

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
    """Update parameters by AdamW. If there are main weights, update those and copy them to the parameters.

    Moments in bfloat16 are updated in float32 and rounded.
    """
    updated = mains or parameters
    moments = [[x.float() if x.dtype is torch.bfloat16 else x for x in kind] for kind in (averages, squares)]
    adamw(
        updated,
        [gradient.to(weight.dtype) for gradient, weight in zip(gradients, updated, strict=True)],
        *moments,
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
    for targets, values in zip((parameters, averages, squares), (updated, *moments), strict=True):
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
