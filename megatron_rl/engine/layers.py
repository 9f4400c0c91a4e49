"""What a family's layers are made of: upstream's layer specs with our norm and attention in their slots."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn, ones

from megatron_rl.config import ParallelConfig
from megatron_rl.engine.attention import PackedAttention
from megatron_rl.weights.architecture import Architecture


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, as HF computes it; its gradient is summed over the tensor axis under SP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


def family_options(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """The fields of TransformerConfig that dense Llama-like decoders leave alone.

    Raises ValueError where the layout and the model's experts do not fit together.
    """
    mixture = arch.mixture
    if mixture is None:
        for key in ("expert", "expert_tensor"):
            if getattr(parallel, key) > 1:
                raise ValueError(
                    f"parallel.{key} = {getattr(parallel, key)}: {arch.family} has no experts to share; leave it out."
                )
        return {}
    if mixture.experts % parallel.expert:
        raise ValueError(
            f"parallel.expert = {parallel.expert}: does not divide the model's {mixture.experts} experts; lower it."
        )
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        raise ValueError(
            "parallel.sequence = False: a mixture of experts under parallel.tensor > 1 needs sequence parallelism; "
            "leave the key out."
        )
    return dict(
        num_moe_experts=mixture.experts,
        moe_ffn_hidden_size=mixture.ffn,
        moe_layer_freq=[int(is_mixture) for is_mixture in mixture.layers],
        moe_router_topk=mixture.per_token,
        # A softmax over the chosen experts alone is the softmax over all of them, renormalised.
        moe_router_pre_softmax=not mixture.renormalised,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
    )


def layer_spec(
    arch: Architecture, tf_config: TransformerConfig, *, is_mixture: bool = False, use_transformer_engine: bool = False
) -> ModuleSpec:
    """The spec of one layer: with a mixture of experts or a dense feed-forward, of upstream's or of TE's modules."""
    options: dict[str, Any] = dict(
        num_experts=tf_config.num_moe_experts if is_mixture else None,
        moe_grouped_gemm=tf_config.moe_grouped_gemm,
        qk_layernorm=tf_config.qk_layernorm,
    )
    if use_transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(**options)
    spec = get_gpt_layer_local_spec(**options, normalization="RMSNorm")
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(
    arch: Architecture,
    tf_config: TransformerConfig,
    *,
    vp_stage: int | None = None,
    use_transformer_engine: bool = False,
) -> TransformerBlockSubmodules:
    """The layers of this rank's model chunk and the norm after the last."""
    specs = {
        kind: layer_spec(arch, tf_config, is_mixture=kind, use_transformer_engine=use_transformer_engine)
        for kind in {arch.has_mixture(number) for number in range(arch.layers)}
    }
    first = get_transformer_layer_offset(tf_config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(tf_config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(
        layer_specs=[specs[arch.has_mixture(number)] for number in numbers], layer_norm=RMSNorm
    )
