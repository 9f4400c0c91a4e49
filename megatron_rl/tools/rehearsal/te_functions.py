"""Stand-ins for Transformer Engine's autograd functions that match its memory use.

Each function saves the same tensors for backward as the original. It also gathers the same tensors again in backward,
and frees the same ones early. The kernels are in te_kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.tools.rehearsal import te_kernels as kernels


def gathered(x: Tensor, group) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def reduce_scattered(x: Tensor, group) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def all_reduced(x: Tensor, group) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


_unused: dict[Any, Tensor] = {}


def unused_gradient(weight: Tensor) -> Tensor:
    """Return the dummy gradient for autograd, if the real gradient was added to `main_grad`.

    All weights of the same shape, dtype and device share one dummy.
    """
    key = weight.shape, weight.dtype, weight.device
    if key not in _unused:
        _unused[key] = torch.empty_like(weight, requires_grad=False)
    return _unused[key].detach()


class LinearFunction(torch.autograd.Function):
    """A product of `[..., H]` rows and a matrix, preceded by an RMSNorm if `norm_weight` is given.

    It keeps this rank's rows before and after the norm, and the norm's factor for each row. Under sequence parallelism,
    backward gathers the normed rows again.
    """

    @staticmethod
    def forward(ctx, x, norm_weight, weight, bias, module) -> Tensor:
        ctx.module, ctx.shape, ctx.has_norm = module, x.shape, norm_weight is not None
        ctx.weight = weight  # not by save_for_backward, which may return another object, without main_grad
        rows = normed = x.reshape(-1, x.shape[-1]).to(weight.dtype)
        kept: tuple[Tensor, ...] = ()
        if ctx.has_norm:
            rows = rows.contiguous()
            normed, factor = kernels.rms_norm(rows, norm_weight, module.eps, module.zero_centered_gamma)
            kept = rows, factor, norm_weight
        is_cut = module.tp_size > 1
        whole = gathered(normed, module.tp_group) if is_cut and module.gathers else normed
        is_added_later = is_cut and module.parallel_mode == "row"
        out = kernels.product(whole, weight, False, True, None, None if is_added_later else bias)
        if is_added_later:
            leave = reduce_scattered if module.sequence_parallel else all_reduced
            out = leave(out, module.tp_group)
            out = out if bias is None else out + bias
        ctx.save_for_backward(normed, *kept)
        return out.view(-1, *x.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, gradient):
        module, weight = ctx.module, ctx.weight
        normed, *kept = ctx.saved_tensors
        is_cut = module.tp_size > 1
        gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        if is_cut and module.parallel_mode == "row" and module.sequence_parallel:
            gradient = gathered(gradient, module.tp_group)
        whole = gathered(normed, module.tp_group) if is_cut and module.gathers else normed
        of_x = kernels.product(gradient, weight, False, False)
        if is_cut and module.parallel_mode == "column":
            leave = reduce_scattered if module.sequence_parallel else all_reduced
            of_x = leave(of_x, module.tp_group)
        of_weight = None
        if weight.requires_grad and module.fuse_wgrad_accumulation:
            kernels.add_product_(weight.main_grad, gradient, whole)
            weight.grad_added_to_main_grad, of_weight = True, unused_gradient(weight)
        elif weight.requires_grad:
            of_weight = kernels.product(gradient, whole, True, False)
        del whole
        of_bias = gradient.sum(0) if ctx.needs_input_grad[3] else None
        of_norm = None
        if ctx.has_norm:
            normed.untyped_storage().resize_(0)  # nothing else uses the normed rows
            rows, factor, norm_weight = kept
            of_x, of_norm = kernels.rms_norm_backward(of_x, rows, factor, norm_weight, module.zero_centered_gamma)
        return of_x.view(ctx.shape), of_norm, of_weight, of_bias, None


class GroupedLinearFunction(torch.autograd.Function):
    """A product of each split of the `[rows, H]` input with the split's own matrix. It keeps the input rows."""

    @staticmethod
    def forward(ctx, x, splits, module, *weights) -> Tensor:
        ctx.splits, ctx.module, ctx.weights = splits, module, weights
        rows = x.reshape(-1, x.shape[-1]).to(weights[0].dtype)
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        out = kernels.grouped_product(rows, weights, splits, True)
        return out.view(-1, *x.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, gradient):
        weights, (rows,) = ctx.weights, ctx.saved_tensors
        gradient = gradient.contiguous().view(-1, gradient.shape[-1])
        of_x = kernels.grouped_product(gradient, weights, ctx.splits, False) if ctx.needs_input_grad[0] else None
        if ctx.module.fuse_wgrad_accumulation:
            kernels.add_grouped_gradients_([weight.main_grad for weight in weights], gradient, rows, ctx.splits)
            for weight in weights:
                weight.grad_added_to_main_grad = True
            of_weights = [torch.empty_like(weight, requires_grad=False) for weight in weights]
        else:
            of_weights = kernels.grouped_gradients(gradient, rows, ctx.splits)
        return None if of_x is None else of_x.view(ctx.shape), None, None, *of_weights


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm over the last dimension. It keeps the rows and one factor per row."""

    @staticmethod
    def forward(ctx, x, weight, eps, zero_centered) -> Tensor:
        rows = x.to(weight.dtype).contiguous().view(-1, weight.shape[0])
        normed, factor = kernels.rms_norm(rows, weight, eps, zero_centered)
        ctx.save_for_backward(rows, factor, weight)
        ctx.zero_centered, ctx.shape = zero_centered, x.shape
        return normed.view(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        rows, factor, weight = ctx.saved_tensors
        gradient = gradient.contiguous().view(rows.shape)
        of_x, of_weight = kernels.rms_norm_backward(gradient, rows, factor, weight, ctx.zero_centered)
        return of_x.view(ctx.shape), of_weight, None, None


class RotaryFunction(torch.autograd.Function):
    """A rotary embedding by the given angles. It keeps the angles."""

    @staticmethod
    def forward(ctx, x, angles) -> Tensor:
        ctx.save_for_backward(angles)
        return kernels.rotate(x, angles, False)

    @staticmethod
    def backward(ctx, gradient):
        return kernels.rotate(gradient, *ctx.saved_tensors, True), None


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    """Rotate `[s, b, heads, D]` by the angles `[>= s, 1, 1, <= D]` of its rows."""
    assert fused and tensor_format == "sbhd" and start_positions is None and not interleaved and cp_size == 1
    assert t.dim() == freqs.dim() == 4 and freqs.shape[1:3] == (1, 1) and freqs.shape[0] >= t.shape[0]
    return RotaryFunction.apply(t, freqs[: t.shape[0]].float())


class AttentionFunction(torch.autograd.Function):
    """Attention over packed rows. It keeps queries, keys, values, its result and the softmax statistics."""

    @staticmethod
    def forward(ctx, query, key, value, query_cu, key_cu) -> Tensor:
        is_one = key.untyped_storage()._cdata == value.untyped_storage()._cdata and key.stride() == value.stride()
        if not is_one:  # keys and values interleaved in one tensor are read in place
            query, key, value = (x.contiguous() for x in (query, key, value))
        out, *kept = kernels.attention(query, key, value, query_cu, key_cu)
        ctx.save_for_backward(query, key, value, out, *kept, query_cu, key_cu)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return *kernels.attention_backward(gradient.contiguous(), *ctx.saved_tensors), None, None


# -- tokens and experts ------------------------------------------------------------------------------------------------


class PermuteFunction(torch.autograd.Function):
    """Permutation of tokens into the order of their experts. It keeps the map and returns it as the last result."""

    @staticmethod
    def forward(ctx, x, probs, routes, rows):
        out, permuted_probs, places = kernels.permute(x, probs, routes, rows)
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        ctx.tokens, ctx.has_probs = x.shape[0], probs is not None
        return out, permuted_probs if ctx.has_probs else None, places

    @staticmethod
    def backward(ctx, gradient, of_probs, _):
        found, of_probs = kernels.unpermute(
            gradient.contiguous(), of_probs if ctx.has_probs else None, *ctx.saved_tensors, ctx.tokens
        )
        return found, of_probs if ctx.has_probs else None, None, None


class UnpermuteFunction(torch.autograd.Function):
    """Permutation of tokens from the order of their experts back to the original order. It keeps the map."""

    @staticmethod
    def forward(ctx, x, places, tokens):
        ctx.save_for_backward(places)
        ctx.rows = x.shape[0]
        return kernels.unpermute(x, None, places, tokens)[0]

    @staticmethod
    def backward(ctx, gradient):
        return kernels.permute_again(gradient, *ctx.saved_tensors, ctx.rows), None, None


class SortFunction(torch.autograd.Function):
    """Reordering of chunks of rows. It keeps the rows' former positions."""

    @staticmethod
    def forward(ctx, x, probs, sizes, order):
        out, sorted_probs, places = kernels.sort_chunks(x, probs, sizes, order)
        ctx.save_for_backward(places)
        ctx.has_probs = probs is not None
        return out, sorted_probs if ctx.has_probs else None

    @staticmethod
    def backward(ctx, gradient, of_probs):
        found, of_probs = kernels.sort_chunks_back(gradient, of_probs if ctx.has_probs else None, *ctx.saved_tensors)
        return found, of_probs if ctx.has_probs else None, None, None


def moe_permute(inp, routing_map, num_out_tokens=-1, max_token_num=-1, map_type="mask"):
    assert map_type == "mask"
    out, _, places = _permuted(inp, None, routing_map, num_out_tokens)
    return out, places


def moe_permute_with_probs(inp, probs, routing_map, num_out_tokens=-1):
    return _permuted(inp, probs, routing_map, num_out_tokens)


def _permuted(inp, probs, routing_map, num_out_tokens):
    assert num_out_tokens >= 0, "else the size is read from the device, which waits for it"
    return PermuteFunction.apply(inp, probs, routing_map, int(num_out_tokens))


def moe_unpermute(inp, row_id_map, merging_probs=None, restore_shape=None, map_type="mask", probs=None):
    assert map_type == "mask" and merging_probs is None and probs is None
    return UnpermuteFunction.apply(inp, row_id_map, restore_shape[0])


def moe_sort_chunks_by_index(inp, split_sizes, sorted_index):
    return moe_sort_chunks_by_index_with_probs(inp, None, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(inp, probs, split_sizes, sorted_index):
    assert torch.is_tensor(split_sizes) and torch.is_tensor(sorted_index)
    return SortFunction.apply(inp, probs, split_sizes, sorted_index)


# -- lists of tensors, and a single product ----------------------------------------------------------------------------


def multi_tensor_applier(op, noop_flag: Tensor, tensor_lists: list[list[Tensor]], *args: Any):
    return op(kernels.CHUNK, noop_flag, tensor_lists, *args)


def multi_tensor_l2norm(chunk_size: int, noop_flag: Tensor, tensor_lists, per_tensor: bool = False):
    return kernels.l2_norm(tensor_lists[0], per_tensor)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists, scale: float) -> None:
    kernels.scale(*tensor_lists, scale)


def general_gemm(A, B, workspace, out_dtype=None, *, accumulate=False, layout="TN", out=None, bias=None, **options):
    """Multiply matrices in cuBLAS's column-major layouts: TN is B A^T, NN is B A, and NT is B^T A."""
    assert out is None and not accumulate
    return kernels.product(B, A, layout[1] == "T", layout[0] == "T", out_dtype, bias), None, None, None
