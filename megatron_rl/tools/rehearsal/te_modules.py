"""Stand-ins for the modules of Transformer Engine 2.9, with the same parameters, extra states and arguments.

Parameters agree in names, shapes, dtypes, order and attributes. This was checked against Transformer Engine's own
classes, with stubs for its compiled parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl.tools.rehearsal.te_functions import (
    AttentionFunction,
    GroupedLinearFunction,
    LinearFunction,
    RMSNormFunction,
)


def _mark_split(parameter: Tensor, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


class TransformerEngineBaseModule(nn.Module):
    """Base class with an initialiser per parameter. The extra state, which belongs to quantisation, is empty."""

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
        """Initialise the parameters and set their attributes.

        With `defer_init`, do nothing. Parameters on the meta device then wait, without attributes, until this is called
        again.
        """
        if defer_init:
            return
        for name, parameter in list(self.named_parameters(recurse=False)):
            if parameter.is_meta:
                parameter = torch.empty_like(parameter, device=torch.cuda.current_device())
            with torch.no_grad():
                self._initialisers[name](parameter)
            setattr(self, name, nn.Parameter(parameter.detach()))  # a new parameter, without the old one's attributes
        self._mark()

    def _mark(self) -> None: ...

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0, "the state of a recipe, of which there is none here"

    def set_tensor_parallel_group(self, group) -> None:
        self.tp_group = group


class Linear(TransformerEngineBaseModule):
    """y = x A^T + b, sharded over the tensor axis along the outputs (column), the inputs (row), or not at all."""

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
        self.gathers = self.sequence_parallel and self.parallel_mode == "column"

    def _add_bias(self, options: dict[str, Any]) -> None:
        if self.use_bias:
            self._add("bias", (self.out_features,), options, nn.init.zeros_)
        else:  # an attribute, not a parameter
            self.bias = torch.empty(0, dtype=options["params_dtype"], device=options["device"])

    def _mark(self) -> None:
        _mark_split(self.weight, 1 if self.parallel_mode == "row" else 0)  # even if it is not sharded
        if self.use_bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif self.use_bias and self.parallel_mode == "column":
            _mark_split(self.bias, 0)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, fp8_output=False, fp8_grad=False):
        return self._linear(x)

    def _linear(self, x: Tensor, norm_weight: Tensor | None = None):
        out = LinearFunction.apply(x, norm_weight, self.weight, self.bias if self.apply_bias else None, self)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """An RMSNorm followed by a Linear. `layer_norm_weight` is the norm's weight; `layer_norm_bias` is None."""

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
        # x has this rank's rows only. The product gathers them after the norm.
        return self._linear(x, self.layer_norm_weight)


class GroupedLinear(TransformerEngineBaseModule):
    """Matrices `weight0`, `weight1`, ..., each applied to its split of the rows. It uses no collectives."""

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
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        out = GroupedLinearFunction.apply(x, m_splits, self, *weights)
        return (out, []) if self.return_bias else out


class RMSNorm(nn.Module):
    """Transformer Engine's RMSNorm operation, with Megatron's `sequence_parallel` attribute on its weight.

    `hidden_size` and `params_dtype` are the old names of `normalized_shape` and `dtype`.
    """

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
        super().__init__()
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
        return RMSNormFunction.apply(x, self.weight, self.eps, self.zero_centered_gamma)

    get_extra_state = TransformerEngineBaseModule.get_extra_state
    set_extra_state = TransformerEngineBaseModule.set_extra_state


class LayerNorm(nn.Module):
    def __init__(self, **options: Any) -> None:
        raise NotImplementedError("no family has a LayerNorm")


class DotProductAttention(TransformerEngineBaseModule):
    """Attention over packed rows, by cuDNN on a device and segment by segment on the host.

    A segment's queries are at the positions of its last keys.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.widths = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.scale = softmax_scale or self.widths[0] ** -0.5
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal_bottom_right")

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        window_size: tuple[int, int] = (-1, 0),
    ) -> Tensor:
        assert tuple(query_layer.shape[1:]) == (self.heads, self.widths[0])
        assert [tuple(x.shape[1:]) for x in (key_layer, value_layer)] == [(self.groups, n) for n in self.widths]
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32 and window_size[1] == 0
        if query_layer.is_cuda:
            layers = query_layer, key_layer, value_layer
            return AttentionFunction.apply(*layers, cu_seqlens_q, cu_seqlens_kv).flatten(1)
        counts, key_counts = cu_seqlens_q.diff().tolist(), cu_seqlens_kv.diff().tolist()
        assert max(counts) == max_seqlen_q and max(key_counts) == max_seqlen_kv
        segments = zip(
            query_layer.split(counts), key_layer.split(key_counts), value_layer.split(key_counts), strict=True
        )
        return torch.cat([self._segment(*segment, window_size[0]) for segment in segments]).flatten(1)

    def _segment(self, query: Tensor, key: Tensor, value: Tensor, before: int) -> Tensor:
        n, m, each = len(query), len(key), self.heads // self.groups
        key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
        scores = torch.einsum("nhd,mhd->hnm", query, key) * self.scale
        behind = torch.arange(m - n, m)[:, None] - torch.arange(m)  # distance from the key to the query's own position
        is_seen = (behind >= 0) & ((behind <= before) | (before < 0))
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), value)


def _divided(size: int, parts: int) -> int:
    assert size % parts == 0
    return size // parts
