"""Replaces `transformer_engine_torch`, Transformer Engine's compiled extension, by fake kernels.

Transformer Engine's Python code calls the extension as `tex`. This file has the functions that bfloat16 training
without quantisation needs, with the extension's arguments and results. They call the operators of te_kernels. Any other
function raises NotImplementedError when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.tools.rehearsal import te_kernels as kernels

NAME = "transformer_engine_torch"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "get_cublasLt_version": lambda: 130100,
    "get_cudnn_version": lambda: 92400,
    "get_num_cublas_streams": lambda: 4,
}


def _function(function: Callable) -> Callable:
    FUNCTIONS[function.__name__] = function
    return function


class _Enum(type):
    """Metaclass of enums whose members are created on first access. Members are integers, as in pybind11."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = cls(len(cls.__members__))  # type: ignore[attr-defined, call-arg]
        cls.__members__[name] = member  # type: ignore[attr-defined]
        setattr(cls, name, member)
        return member


class Extension(ModuleType):
    """A module with the given functions. Any other name is an enum if capitalised, else a function that raises."""

    def __init__(self, name: str, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(name)
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Enum(name, (int,), {"__members__": {}}) if name[0].isupper() else _missing(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


def _missing(name: str) -> Callable[..., Any]:
    def raise_(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} has no fake kernel; a rehearsal cannot use what needs it")

    return raise_


# Products


@_function
def generic_gemm(
    A: Tensor,
    transA: bool,
    B: Tensor,
    transB: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **options: Any,
) -> list[Tensor | None]:
    """Multiply matrices in cuBLAS's column-major order: TN is B A^T, NN is B A, and NT is B^T A.

    grad: return the bias's gradient, the column sums of B, instead of adding the bias.
    """
    assert quantizer is None and not gelu and not any(options.get(name) for name in ("comm_overlap", "extra_output"))
    a, b = (x.flatten(0, -2) for x in (A, B))
    if D is None:
        added = None if bias is None or grad or bias.numel() == 0 else bias
        D = kernels.product(b, a, transB, transA, _dtype(output_dtype), added)
        D = D if transB else D.view(*B.shape[:-1], D.shape[-1])
    else:
        assert bias is None or grad
        kernels.product_into_(D, b, a, transB, transA, accumulate)
    return [D, kernels.column_sums(b) if grad and bias is not None else None, None, None]


def _dtype(number: Any) -> torch.dtype | None:
    if number is None:
        return None
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    return TE_DType_To_Torch[number]


@_function
def te_general_grouped_gemm(
    A: list[Tensor],
    transa: bool,
    B: list[Tensor],
    transb: bool,
    D: list[Tensor],
    D_type: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    """Multiply pairs of matrices. single_output: the results are consecutive rows of the only tensor in D."""
    assert all(x.numel() == 0 for x in (*bias, *pre_gelu_out)), "biases of experts have no fake kernel"
    outs = list(D[0].split([x.shape[0] for x in B])) if single_output else D
    kernels.grouped_product_into_(outs, B, A, transb, transa, accumulate)
    return bias


# Norm and rotation


@_function
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor | None]:
    """Return [normed rows, None in place of means, factor of each row]."""
    assert ln_out is None and quantizer is None
    out, factor = kernels.rms_norm(input, weight, eps, zero_centered_gamma)
    return [out, None, factor]


@_function
def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    return list(kernels.rms_norm_backward(dz, x, rsigma, gamma, zero_centered_gamma))


def _is_plain(start_positions: Any, qkv_format: Any, interleaved: bool, cu_seqlens: Any, cp_size: int) -> bool:
    from transformer_engine.pytorch.cpp_extensions.fused_attn import QKVFormat

    is_sbhd = qkv_format == QKVFormat["sbhd"]
    return is_sbhd and start_positions is None and cu_seqlens is None and not interleaved and cp_size == 1


@_function
def fused_rope_forward(x, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    assert _is_plain(start_positions, qkv_format, interleaved, cu_seqlens, cp_size), "this rotation has no fake kernel"
    return kernels.rotate(x, freqs, False)


@_function
def fused_rope_backward(gradient, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    assert _is_plain(start_positions, qkv_format, interleaved, cu_seqlens, cp_size)
    return kernels.rotate(gradient, freqs, True)


# Attention


@_function
def get_fused_attn_backend(*params: Any) -> Any:
    """Choose cuDNN's 16-bit attention kernel, as Transformer Engine does on Hopper and later GPUs.

    Transformer Engine 2.20 and later pass one object, and expect (kernel, message).
    """
    chosen = sys.modules[NAME].NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen  # type: ignore[attr-defined]
    return (chosen, "") if len(params) == 1 else chosen


@_function
def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> list[Tensor]:
    """Return the result, the softmax statistics and the random state."""
    assert q.dim() == 3 and window_size[1] in (-1, 0) and p_dropout == 0, "this attention has no fake kernel"
    return list(kernels.attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, attn_scale, window_size[0]))


@_function
def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    *rest: Any,
) -> list[Tensor | None]:
    """Return the gradients of queries, keys and values, and None for the biases and the softmax offsets."""
    of_segments = cu_seqlens_q, cu_seqlens_kv, attn_scale, window_size[0]
    return [*kernels.attention_backward(d_o, q, k, v, *of_segments), None, None]


# Lists of tensors


@_function
def multi_tensor_l2norm(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False):
    return kernels.l2_norm(tensor_lists[0], per_tensor)


@_function
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    kernels.scale(*tensor_lists, scale)


@_function
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update parameters by AdamW. tensor_lists: gradients, parameters, both moments, and main weights if any."""
    assert mode == bias_correction == 1 and type(step) is int
    gradients, parameters, averages, squares, *mains = tensor_lists
    settings = lr, beta1, beta2, epsilon, step, weight_decay
    kernels.adam_(parameters, gradients, averages, squares, mains[0] if mains else [], *settings)
