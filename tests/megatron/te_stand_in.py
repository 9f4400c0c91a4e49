"""A stand-in for Transformer Engine 2.x that computes with plain torch, for machines without CUDA.

It has what megatron.core imports and builds: arguments, parameters (names, shapes, dtypes, order), marks on them and
extra states are those of Transformer Engine 2.9, compared with its own classes where its compiled parts are stubs.
Nothing quantises, no kernel runs, and what it lacks raises ImportError or NotImplementedError. `BUILT` and `CALLED`
record what was made and which kernels would have run, with which options.

Call `install()` before anything imports megatron.core, in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from fused_adam import FusedAdam
from torch import Tensor, nn

VERSION = "2.9.0"
BUILT: list[tuple[str, dict[str, Any]]] = []
"""Class and arguments of each module made."""
CALLED: list[tuple[str, dict[str, Any]]] = []
"""Name and options of each function called that Transformer Engine has a kernel for."""


def _mark_split(parameter: Tensor, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


class TransformerEngineBaseModule(nn.Module):
    """Parameters with an initialisation of their own, and the state of a recipe: empty, as nothing is quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        self.tp_group, self.tp_size = None, 1
        self._initialisers: dict[str, Callable[[Tensor], Any]] = {}

    def _add(self, name: str, shape: tuple[int, ...], options: dict[str, Any], initialise) -> None:
        device = options["device"]
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=options["params_dtype"])))
        self._initialisers[name] = initialise or (lambda weight: nn.init.normal_(weight, std=0.023))

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill the parameters; those on the meta device wait for a call of this one, and have no marks until then."""
        if defer_init:
            return
        for name, parameter in list(self.named_parameters(recurse=False)):
            if parameter.is_meta:
                parameter = torch.empty_like(parameter, device=torch.cuda.current_device())
            with torch.no_grad():
                self._initialisers[name](parameter)
            setattr(self, name, nn.Parameter(parameter.detach()))  # a new one, without attributes of the old
        self._mark()

    def _mark(self) -> None: ...

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0, "the state of a recipe, of which there is none here"

    def set_tensor_parallel_group(self, group) -> None:
        self.tp_group = group


class _AddToMainGrad(torch.autograd.Function):
    """A linear map that adds the weight's gradient to `main_grad` in backward and returns none for it to keep."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # itself: a saved one may come back as another object, without main_grad
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        weight.main_grad.add_((rows.t() @ inputs).to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.zeros_like(weight)


def _product(x: Tensor, weight: Tensor, is_fused: bool) -> Tensor:
    x = x.to(weight.dtype)
    return _AddToMainGrad.apply(x, weight) if is_fused and torch.is_grad_enabled() else F.linear(x, weight)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """In float32, rounded once."""
    scale = weight.float() + zero_centered
    return F.rms_norm(x.float(), weight.shape, scale, eps).to(weight.dtype)


class Linear(TransformerEngineBaseModule):
    """y = x A^T + b, cut over the tensor axis along the outputs (column), the inputs (row), or not."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker=None,
        rng_tracker_name: str | None = None,
        init_method=None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        options = dict(locals())
        super().__init__()
        _record(self, options)
        self.save_original_input = save_original_input
        self._shape(options)
        self._add("weight", (self.out_features, self.in_features), options, init_method)
        self._add_bias(options)
        self.reset_parameters(defer_init=device == "meta")

    def _shape(self, options: dict[str, Any]) -> None:
        assert options["parallel_mode"] in (None, "column", "row") and not options.get("parameters_split")
        options["params_dtype"] = options["params_dtype"] or torch.get_default_dtype()
        self.in_features, self.out_features = options["in_features"], options["out_features"]
        self.fuse_wgrad_accumulation, self.use_bias = options["fuse_wgrad_accumulation"], options["bias"]
        self.return_bias, self.parallel_mode = options["return_bias"], options["parallel_mode"]
        self.apply_bias = self.use_bias and not self.return_bias
        self.tp_group = options["tp_group"]
        self.tp_size = options["tp_size"] if self.tp_group is None else self.tp_group.size()
        if self.parallel_mode == "column":
            self.out_features = _divided(self.out_features, self.tp_size)
        elif self.parallel_mode == "row":
            self.in_features = _divided(self.in_features, self.tp_size)
        self.sequence_parallel = self.tp_size > 1 and options["sequence_parallel"]

    def _add_bias(self, options: dict[str, Any]) -> None:
        if self.use_bias:
            self._add("bias", (self.out_features,), options, nn.init.zeros_)
        else:  # an attribute, and no parameter
            self.bias = torch.empty(0, dtype=options["params_dtype"], device=options["device"])

    def _mark(self) -> None:
        _mark_split(self.weight, 1 if self.parallel_mode == "row" else 0)  # also where nothing is cut
        if self.use_bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif self.use_bias and self.parallel_mode == "column":
            _mark_split(self.bias, 0)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, fp8_output=False, fp8_grad=False):
        return self._linear(x)

    def _linear(self, x: Tensor):
        from megatron.core import tensor_parallel as axis  # its collectives are differentiable

        is_cut = self.tp_size > 1 and self.parallel_mode is not None
        if is_cut and self.parallel_mode == "column":
            enter = (
                axis.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else axis.copy_to_tensor_model_parallel_region
            )
            x = enter(x, group=self.tp_group)
        out = _product(x, self.weight, self.fuse_wgrad_accumulation)
        if is_cut and self.parallel_mode == "row":
            leave = (
                axis.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else axis.reduce_from_tensor_model_parallel_region
            )
            out = leave(out, group=self.tp_group)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """A Linear with the norm before it: `layer_norm_weight`, and `layer_norm_bias` of a LayerNorm."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker=None,
        init_method=None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split=None,
        zero_centered_gamma: bool = False,
        device="cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        options = dict(locals())
        TransformerEngineBaseModule.__init__(self)
        _record(self, options)
        assert normalization == "RMSNorm", "LayerNorm is not stood in for"
        assert not return_layernorm_output
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self._shape(options)
        self._add("layer_norm_weight", (self.in_features,), options, self._initialise_norm)
        self.layer_norm_bias = None
        self._add("weight", (self.out_features, self.in_features), options, init_method)
        self._add_bias(options)
        self.reset_parameters(defer_init=device == "meta")

    def _mark(self) -> None:
        super()._mark()
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def _initialise_norm(self, weight: Tensor) -> None:
        nn.init.constant_(weight, float(not self.zero_centered_gamma))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, fp8_output=False, fp8_grad=False):
        # This rank's rows, as they come: the product gathers them behind the norm.
        return self._linear(_rms_norm(x, self.layer_norm_weight, self.eps, self.zero_centered_gamma))


class GroupedLinear(TransformerEngineBaseModule):
    """Matrices `weight0`, `weight1`, ... on rows that lie one matrix's after the other's; no collectives."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker=None,
        rng_tracker_name: str | None = None,
        init_method=None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device="cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        options = dict(locals())
        super().__init__()
        _record(self, options)
        assert not bias, "biases of experts are not stood in for"
        self.num_gemms, self.save_original_input = num_gemms, save_original_input
        Linear._shape(self, options)  # type: ignore[arg-type]
        for number in range(num_gemms):
            self._add(f"weight{number}", (self.out_features, self.in_features), options, init_method)
            setattr(self, f"bias{number}", torch.empty(0, dtype=options["params_dtype"], device=device))
        self.reset_parameters(defer_init=device == "meta")

    def _mark(self) -> None:
        for number in range(self.num_gemms):
            _mark_split(getattr(self, f"weight{number}"), 1 if self.parallel_mode == "row" else 0)

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None):
        assert isinstance(m_splits, list) and all(isinstance(rows, int) for rows in m_splits)
        assert len(m_splits) == self.num_gemms and sum(m_splits) == x.shape[0]
        CALLED.append(("grouped_gemm", {"m_splits": m_splits}))
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        parts = [
            _product(rows, weight, self.fuse_wgrad_accumulation)
            for rows, weight in zip(x.split(m_splits), weights, strict=True)
        ]
        out = torch.cat(parts)
        return (out, []) if self.return_bias else out


class RMSNorm(nn.Module):
    """One of the fusible operations, with Megatron's mark. `hidden_size` and `params_dtype` are the old names."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device=None,
        dtype: torch.dtype | None = None,
        sm_margin: int = 0,
    ) -> None:
        options = dict(locals())
        super().__init__()
        _record(self, options)
        assert (normalized_shape is None) != (hidden_size is None) and None in (dtype, params_dtype)
        self.eps, self.zero_centered_gamma, self.sequence_parallel = eps, zero_centered_gamma, sequence_parallel
        shape, dtype = normalized_shape or hidden_size, dtype or params_dtype or torch.get_default_dtype()
        self.weight = nn.Parameter(torch.empty(shape, device=device or "cuda", dtype=dtype))
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            self.weight = nn.Parameter(torch.empty_like(self.weight, device=torch.cuda.current_device()))
        nn.init.constant_(self.weight, float(not self.zero_centered_gamma))
        if self.sequence_parallel is not None:
            self.weight.sequence_parallel = self.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        CALLED.append(("rmsnorm_fwd", {"shape": tuple(x.shape)}))
        return _rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)

    get_extra_state = TransformerEngineBaseModule.get_extra_state
    set_extra_state = TransformerEngineBaseModule.set_extra_state


class LayerNorm(nn.Module):
    def __init__(self, **options: Any) -> None:
        raise NotImplementedError("no family has a LayerNorm")


class DotProductAttention(TransformerEngineBaseModule):
    """Can be built; the engine attends by itself."""

    def __init__(self, num_attention_heads: int, kv_channels, **options: Any) -> None:
        super().__init__()
        _record(self, {"num_attention_heads": num_attention_heads, "kv_channels": kv_channels} | options)

    def forward(self, *args: Any, **kwargs: Any):
        raise NotImplementedError("DotProductAttention is not stood in for")


# -- optimizers --------------------------------------------------------------------------------------------------------


def multi_tensor_applier(op, noop_flag: Tensor, tensor_lists: list[list[Tensor]], *args: Any):
    return op(2048 * 32, noop_flag, tensor_lists, *args)


def multi_tensor_l2norm(chunk_size: int, noop_flag: Tensor, tensor_lists, per_tensor: bool = False):
    CALLED.append(("multi_tensor_l2norm", {"tensors": len(tensor_lists[0])}))
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm()[None], norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists, scale: float) -> None:
    CALLED.append(("multi_tensor_scale", {"scale": scale}))
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


# -- functions ---------------------------------------------------------------------------------------------------------


def general_gemm(A, B, workspace, out_dtype=None, *, accumulate=False, layout="TN", out=None, bias=None, **options):
    """cuBLAS reads rows as columns: TN is B A^T, NN is B A and NT is B^T A."""
    CALLED.append(("general_gemm", {"layout": layout, "out_dtype": out_dtype}))
    assert out is None and not accumulate
    a, b = (x.to(out_dtype or x.dtype) for x in (A, B))
    product = (b.t() if layout[1] == "T" else b) @ (a.t() if layout[0] == "T" else a)
    return product if bias is None else product + bias.to(product.dtype), None, None, None


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
    """Rotate `[s, b, heads, D]` by the angles `[>= s, 1, 1, <= D]` of its rows, in float32."""
    CALLED.append(("fused_rope_forward", {"tensor_format": tensor_format, "shape": tuple(t.shape), "fused": fused}))
    assert tensor_format == "sbhd" and start_positions is None and not interleaved and cp_size == 1
    assert t.dim() == freqs.dim() == 4 and freqs.shape[1:3] == (1, 1) and freqs.shape[0] >= t.shape[0]
    freqs = freqs[: t.shape[0]].float()
    rotated, rest = t[..., : freqs.shape[-1]].float(), t[..., freqs.shape[-1] :]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * freqs.cos() + torch.cat([-high, low], dim=-1) * freqs.sin()
    return torch.cat([rotated.to(t.dtype), rest], dim=-1)


def moe_permute(inp, routing_map, num_out_tokens=-1, max_token_num=-1, map_type="mask"):
    output, _, places = _permuted(inp, None, routing_map, num_out_tokens, map_type)
    return output, places


def moe_permute_with_probs(inp, probs, routing_map, num_out_tokens=-1):
    return _permuted(inp, probs, routing_map, num_out_tokens, "mask")


def _permuted(inp, probs, routing_map, num_out_tokens, map_type):
    """Put each token beside those of the same expert; the last result, opaque, is what `moe_unpermute` wants."""
    CALLED.append(("permute_with_mask_map", {"num_out_tokens": num_out_tokens, "dtype": routing_map.dtype}))
    assert map_type == "mask" and num_out_tokens >= 0, "else the size is read from the device, which waits for it"
    chosen = routing_map.bool().t()  # [experts, tokens]
    places = chosen.nonzero()[:, 1]
    assert len(places) == int(num_out_tokens)
    return inp.index_select(0, places), None if probs is None else probs.t()[chosen], places


def moe_unpermute(inp, row_id_map, merging_probs=None, restore_shape=None, map_type="mask", probs=None):
    CALLED.append(("unpermute_with_mask_map", {"restore_shape": restore_shape}))
    assert map_type == "mask" and merging_probs is None and probs is None
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


def moe_sort_chunks_by_index(inp, split_sizes, sorted_index):
    return moe_sort_chunks_by_index_with_probs(inp, None, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(inp, probs, split_sizes, sorted_index):
    CALLED.append(("sort_chunks_by_map", {"chunks": len(split_sizes)}))
    assert torch.is_tensor(split_sizes) and torch.is_tensor(sorted_index)

    def sort(x: Tensor) -> Tensor:
        chunks = x.split(split_sizes.tolist())
        return torch.cat([chunks[number] for number in sorted_index.tolist()])

    return sort(inp), None if probs is None else sort(probs)


class _SilentState:
    """FP8GlobalStateManager: no quantisation at any time."""

    is_fp8_enabled = staticmethod(lambda: False)


@contextlib.contextmanager
def autocast(enabled: bool = True, **options: Any):
    assert not enabled, "quantisation is not stood in for"
    yield


def get_cpu_offload_context(
    enabled=False, num_layers=1, model_layers=1, offload_activations=True, offload_weights=False, double_buffering=False
):
    assert not enabled, "offloading of activations is not stood in for"
    return contextlib.nullcontext(), lambda x: x


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()


def _not_here(name: str) -> Callable[..., Any]:
    def raise_(*args: Any, **kwargs: Any):
        raise NotImplementedError(f"{name} of Transformer Engine is not stood in for")

    return raise_


# -- the package -------------------------------------------------------------------------------------------------------

_PYTORCH = "transformer_engine.pytorch"
_MODULES: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {
        name: type(name, (), {})
        for name in (
            "Recipe",
            "Format",
            "DelayedScaling",
            "Float8CurrentScaling",
            "Float8BlockScaling",
            "MXFP8BlockScaling",
            "NVFP4BlockScaling",
            "CustomRecipe",
        )
    },
    _PYTORCH: {
        "Linear": Linear,
        "LayerNormLinear": LayerNormLinear,
        "GroupedLinear": GroupedLinear,
        "LayerNorm": LayerNorm,
        "RMSNorm": RMSNorm,
        "DotProductAttention": DotProductAttention,
        "fp8_autocast": autocast,
        "fp8_model_init": _not_here("fp8_model_init"),
        "Fp8Padding": _not_here("Fp8Padding"),
        "Fp8Unpadding": _not_here("Fp8Unpadding"),
    },
    f"{_PYTORCH}.attention": {"DotProductAttention": DotProductAttention},
    f"{_PYTORCH}.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
    f"{_PYTORCH}.cpp_extensions": {"general_gemm": general_gemm},
    f"{_PYTORCH}.cpu_offload": {"get_cpu_offload_context": get_cpu_offload_context},
    f"{_PYTORCH}.cross_entropy": {"parallel_cross_entropy": _not_here("parallel_cross_entropy")},
    f"{_PYTORCH}.distributed": {
        "CudaRNGStatesTracker": CudaRNGStatesTracker,
        "checkpoint": _not_here("checkpoint"),
        "activation_recompute_forward": contextlib.nullcontext,
    },
    f"{_PYTORCH}.float8_tensor": {"Float8Tensor": type("Float8Tensor", (Tensor,), {})},
    f"{_PYTORCH}.fp8": {"FP8GlobalStateManager": _SilentState, "fp8_autocast": autocast},
    f"{_PYTORCH}.module": {},
    f"{_PYTORCH}.module.base": {
        "TransformerEngineBaseModule": TransformerEngineBaseModule,
        "get_workspace": lambda: None,
        "get_dummy_wgrad": lambda shape, dtype, zero=False: torch.zeros(shape, dtype=dtype),
    },
    f"{_PYTORCH}.ops": {
        name: type(name, (nn.Module,), {}) for name in ("FusibleOperation", "Sequential", "BasicLinear", "SwiGLU")
    },
    f"{_PYTORCH}.optimizers": {
        "FusedAdam": FusedAdam,
        "FusedSGD": type("FusedSGD", (torch.optim.SGD,), {}),
        "multi_tensor_applier": multi_tensor_applier,
        "multi_tensor_l2norm": multi_tensor_l2norm,
        "multi_tensor_scale": multi_tensor_scale,
    },
    f"{_PYTORCH}.permutation": {
        "moe_permute": moe_permute,
        "moe_permute_with_probs": moe_permute_with_probs,
        "moe_unpermute": moe_unpermute,
        "moe_sort_chunks_by_index": moe_sort_chunks_by_index,
        "moe_sort_chunks_by_index_with_probs": moe_sort_chunks_by_index_with_probs,
    },
    f"{_PYTORCH}.router": {
        name: _not_here(name)
        for name in ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")
    },
    f"{_PYTORCH}.tensor": {"QuantizedTensor": type("QuantizedTensor", (Tensor,), {})},
}


def install() -> None:
    """Make `import transformer_engine` and its submodules find this one. RuntimeError where megatron.core is loaded."""
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError("megatron.core is imported already, without Transformer Engine; call install() before it.")
    for name, contents in _MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        # Found by importlib.util.find_spec as well; without a loader nothing beside these can be imported.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _record(module: nn.Module, options: dict[str, Any]) -> None:
    base = next(cls for cls in type(module).__mro__ if cls.__module__ == __name__)
    kept = {name: value for name, value in options.items() if name not in ("self", "__class__")}
    BUILT.append((base.__name__, kept))


def _divided(size: int, parts: int) -> int:
    assert size % parts == 0
    return size // parts
