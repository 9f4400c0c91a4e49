"""Layers of each model family: Megatron's layer specs with this package's norms and attention inserted."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import transformer_block
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from megatron_rl.config import ParallelConfig
from megatron_rl.engine.attention import PackedAttention, SinkAttention
from megatron_rl.engine.context import Gathering
from megatron_rl.engine.delta_net import GatedDeltaNet
from megatron_rl.engine.packed_rows import PackedRows
from megatron_rl.engine.rope import Rope, rotate
from megatron_rl.engine.routing import ReplayRouter
from megatron_rl.engine.sharded_module import ShardedModule
from megatron_rl.weights.decoder import Architecture

LATENT_NORM_EPS = 1e-6
"""Epsilon of HF's norms inside latent attention. The model's other norms may use another epsilon."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, as in HF. With sequence parallelism, tensor ranks sum its weight's gradient."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # each rank has the gradient of its rows, which Megatron sums
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


class OffsetNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.weight.shape, eps=self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


class WideNorm(ShardedModule):
    """RMSNorm over all heads of a row together. The heads are split over the ranks of `group`.

    Input: `[R, 1, own heads, D]`.
    """

    cut = ("weight",)

    def __init__(
        self, config: TransformerConfig, heads: int, head_dim: int, group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        self.eps, self.width, self.tp_group = config.layernorm_epsilon, heads * head_dim, group
        self.weight = nn.Parameter(torch.ones(self.width // group.size(), dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        squares = values.square().sum((-2, -1), keepdim=True)  # [R, 1, 1, 1]
        # sums over ranks in the forward pass, and the partial gradients in the backward pass
        if self.tp_group.size() > 1:
            squares = tensor_parallel.reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            squares = tensor_parallel.copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        normed = (values * (squares / self.width + self.eps).rsqrt()).to(x.dtype)
        return normed * self.weight.view(x.shape[-2:])


class NormedRowParallelLinear(tensor_parallel.RowParallelLinear):
    """The last matrix of an attention or feed-forward block, and a norm after it as in Gemma and OLMo."""

    norm_class: type[RMSNorm] = RMSNorm

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.norm = self.norm_class(config, output_size, eps=config.layernorm_epsilon)
        # a hook, so that an adapter's hook can run before it
        self.register_forward_hook(lambda linear, inputs, result: (linear.norm(result[0]), result[1]))


class OffsetNormedRowParallelLinear(NormedRowParallelLinear):
    norm_class = OffsetNorm


class BiasedRowParallelLinear(tensor_parallel.RowParallelLinear):
    """The last matrix of an expert, with a bias that Megatron adds in place."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x)
        # Without expert parallelism, this is the input of Megatron's custom function, which autograd must not change.
        return output if self.explicit_expert_comm else output.clone(), bias


class WholeLinear(nn.Module):
    """A replicated `[outputs, inputs]` matrix, which every tensor rank applies to its own rows."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class ValueHead(nn.Module):
    """The head of a critic or reward model: a linear map without bias to one number per token, in float32.

    weight: `[1, H]`, the same on every tensor rank, initially zero. It is `score.weight` of HF's sequence
    classification models.
    """

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states `[T, H]` to values `[T]` float32."""
        # bfloat16 has three decimal digits: too few, because advantages are differences of values.
        return F.linear(hidden.float(), self.weight.float())[:, 0]


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention (MLA) that rotates rows by their own positions.

    The down projections are replicated, which needs sequence parallelism. All heads share the rotated key, and in
    Megatron's local layers, a rank has only its own heads' part of this key's gradient. The norms are not in the spec,
    because megatron.core 0.19 would then always require one for queries.
    """

    rope: Rope  # rotary embedding, set after building

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        norm, hidden = TENorm if is_fused(config) else RMSNorm, config.hidden_size
        self.linear_kv_down_proj = WholeLinear(config, hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = norm(config, config.kv_lora_rank, eps=LATENT_NORM_EPS)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, hidden, config.q_lora_rank)
            self.q_layernorm = norm(config, config.q_lora_rank, eps=LATENT_NORM_EPS)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states=None,
        position_ids=None,
        packed_seq_params: PackedRows | None = None,
        **_,
    ) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        """Project hidden states `[R / tensor ranks, 1, H]` to queries and compressed keys.

        Returns five tensors: the queries `[R, heads, ...]`; the compressed keys, which `expand` takes; None in place of
        values; and the inputs of the two up projections. Context ranks gather the compressed keys, which are much
        smaller than the keys of all heads.
        """
        config, packed = self.config, packed_seq_params
        rotation = packed.rotation(self.rope)
        down = self.linear_kv_down_proj(hidden_states)
        kv_source, rotated_key = down.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        kv_source = self.kv_layernorm(kv_source)
        first = self.pg_collection.tp.rank() * len(down) if config.sequence_parallel else 0
        own = slice(first, first + len(down))
        own_rotation = rotation[own] if isinstance(rotation, Tensor) else (rotation[0][own], rotation[1][own])
        rotated_key = rotate(_halves(rotated_key), own_rotation)
        gathering = Gathering(torch.cat([kv_source, rotated_key], dim=-1), packed.context)

        if config.q_lora_rank is None:
            query_source = hidden_states
            query, _ = self.linear_q_proj(query_source)
        else:
            query_source = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query, _ = self.linear_q_up_proj(query_source)
        query = query.squeeze(1).unflatten(-1, (self.num_attention_heads_per_partition, -1))  # [R, heads, ...]
        plain_query, rotated_query = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        query = torch.cat([plain_query, rotate(_halves(rotated_query), rotation)], dim=-1)
        return query, gathering.rows(), None, query_source, kv_source  # the value is None, which Megatron does not pad

    def expand(self, latent: Tensor, packed: PackedRows) -> tuple[Tensor, Tensor]:
        """Form the keys and values, `[K, heads, ...]`, from the compressed keys. The core attention calls it."""
        config, heads = self.config, self.num_attention_heads_per_partition
        kv_source, rotated_key = latent.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        key_value, _ = self.linear_kv_up_proj(kv_source.contiguous())
        # linear_kv_up_proj gathers its input itself, but the rotated key does not pass through it
        if config.sequence_parallel:
            rotated_key = tensor_parallel.gather_from_sequence_parallel_region(rotated_key, group=self.pg_collection.tp)
        key_value = key_value.squeeze(1).unflatten(-1, (heads, -1))
        if packed.keys is not None:
            key_value, rotated_key = (packed.keys.of_values(rows) for rows in (key_value, rotated_key))
        plain_key, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        return torch.cat([plain_key, rotated_key.expand(-1, heads, -1)], dim=-1), value


def _halves(rotated: Tensor) -> Tensor:
    """Reorder rotated features from HF's adjacent pairs to the half-split pairs of `rotate`.

    Queries and keys must be reordered alike.
    """
    return torch.cat([rotated[..., 0::2], rotated[..., 1::2]], dim=-1)


def is_fused(config: TransformerConfig) -> bool:
    """Return True if the layers are Transformer Engine's, not Megatron's local ones."""
    return config.transformer_impl == "transformer_engine"


def family_options(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the TransformerConfig fields that only families other than a dense Llama-like decoder need."""
    options = _mixture_options(arch, parallel) | _latent_options(arch)
    if arch.activation == "gelu_tanh":
        options["activation_func"] = functools.partial(F.gelu, approximate="tanh")
    if arch.activation == "clamped_swiglu":
        options |= dict(activation_func=quick_gelu, glu_linear_offset=1.0, activation_func_clamp_value=7.0)
    if arch.has_biases:
        options["add_bias_linear"] = True
    if arch.delta_net is not None:
        # The delta nets are not Megatron's, but this makes its checkpoints name the two kinds of layers differently.
        options["linear_attention_freq"] = [int(has_delta_net) for has_delta_net in arch.delta_net.layers]
    if arch.gated_attention:
        options["attention_output_gate"] = True
    if arch.softmax_scale is not None:
        options["softmax_scale"] = arch.softmax_scale
    return options


def _mixture_options(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    mixture = arch.mixture
    if mixture is None:
        return {}
    return dict(
        num_moe_experts=mixture.experts,
        moe_ffn_hidden_size=mixture.ffn,
        moe_shared_expert_intermediate_size=mixture.shared_ffn,
        moe_shared_expert_gate=mixture.shared_gate,
        moe_layer_freq=[int(is_mixture) for is_mixture in mixture.layers],
        moe_router_topk=mixture.per_token,
        moe_router_score_function="sigmoid" if mixture.is_biased else "softmax",
        # A softmax over only the chosen experts equals the renormalized softmax over all experts.
        moe_router_pre_softmax=not mixture.renormalised,
        moe_router_num_groups=mixture.groups,
        moe_router_group_topk=mixture.groups_per_token,
        moe_router_topk_scaling_factor=mixture.scale,
        moe_router_enable_expert_bias=mixture.is_biased,
        moe_router_bias_update_rate=0.0,  # keeps the model's bias fixed
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",  # its auxiliary loss would be added to loss_fn's, undivided
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
    )


def _latent_options(arch: Architecture) -> dict[str, Any]:
    latent, scaling = arch.latent, arch.rope_scaling or {}
    if latent is None:
        return {}
    return dict(
        multi_latent_attention=True,
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.kv_rank,
        qk_head_dim=latent.plain_dim,
        qk_pos_emb_head_dim=arch.head_dim,
        v_head_dim=latent.value_dim,
        # Megatron uses these only for the softmax scale; this package rotates.
        rope_type="rope",
        rotary_scaling_factor=scaling.get("factor", 1.0),
        mscale_all_dim=scaling.get("mscale_all_dim", 0.0),
    )


def layer_spec(
    arch: Architecture, tf_config: TransformerConfig, *, has_delta_net: bool, is_mixture: bool
) -> ModuleSpec:
    """Return the spec of one kind of layer, made of Megatron's local modules or Transformer Engine's."""
    options: dict[str, Any] = dict(
        num_experts=tf_config.num_moe_experts if is_mixture else None,
        moe_grouped_gemm=tf_config.moe_grouped_gemm,
        qk_layernorm=tf_config.qk_layernorm,
        multi_latent_attention=arch.latent is not None,
    )
    if is_fused(tf_config):
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**options)
        # Name the norms in checkpoints as local layers do, whichever kind of layer wrote them.
        local = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=options["multi_latent_attention"])
        # Megatron's names for mixtures differ between the two kinds
        names = local.submodules.sharded_state_dict_keys_map
        spec.submodules.sharded_state_dict_keys_map = names or {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(**options, normalization="RMSNorm")
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    if arch.latent is not None:
        spec.submodules.self_attention.module = LatentAttention
    # Only these support shared prompts and the rows of a context rank.
    attention.core_attention = SinkAttention if arch.has_sinks else PackedAttention
    if is_mixture:
        submodules_of(layer.mlp).router = ReplayRouter
    if is_fused(tf_config):
        return spec
    layer.input_layernorm = layer.pre_mlp_layernorm = norm_class(arch) if arch.has_norms_before else IdentityOp
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm_class(arch)
    if arch.has_norms_behind:
        attention.linear_proj = submodules_of(layer.mlp).linear_fc2 = (
            OffsetNormedRowParallelLinear if arch.norm_offset else NormedRowParallelLinear
        )
    if is_mixture and arch.has_biases:
        submodules_of(submodules_of(layer.mlp).experts).linear_fc2 = BiasedRowParallelLinear
    if has_delta_net:
        layer.self_attention = ModuleSpec(module=GatedDeltaNet, params={"sizes": arch.delta_net})
    return spec


def submodules_of(spec: Any) -> Any:
    """Return the submodules in a feed-forward's spec, which is a functools.partial from megatron.core 0.19 on."""
    return spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]


def norm_class(arch: Architecture) -> type[RMSNorm]:
    return OffsetNorm if arch.norm_offset else RMSNorm


def block_spec(
    arch: Architecture, tf_config: TransformerConfig, *, vp_stage: int | None = None
) -> transformer_block.TransformerBlockSubmodules:
    kinds = {arch.kind(number) for number in range(arch.layers)}
    specs = {kind: layer_spec(arch, tf_config, has_delta_net=kind[0], is_mixture=kind[1]) for kind in kinds}
    first = get_transformer_layer_offset(tf_config, vp_stage=vp_stage)  # in the whole model
    count = transformer_block.get_num_layers_to_build(tf_config, vp_stage=vp_stage)
    return transformer_block.TransformerBlockSubmodules(
        layer_specs=[specs[arch.kind(number)] for number in range(first, first + count)],
        layer_norm=TENorm if is_fused(tf_config) else norm_class(arch),
    )


def place_attention(decoder: transformer_block.TransformerBlock, arch: Architecture) -> None:
    """Give the attention in each layer of a finished decoder its rotary embedding and its window."""
    rope = windowed_rope = Rope.of(arch)
    if arch.window_rope_theta is not None:
        windowed_rope = Rope.of(dataclasses.replace(arch, rope_theta=arch.window_rope_theta, rope_scaling=None))
    rope.is_fused = windowed_rope.is_fused = is_fused(decoder.config)
    for layer in decoder.layers:
        if arch.has_delta_net(layer.layer_number - 1):  # a delta net's state already encodes the order of rows
            continue
        attention, window = layer.self_attention, arch.windows[layer.layer_number - 1]  # Megatron numbers layers from 1
        attention.core_attention.window = window
        if arch.wide_qk_norm:  # not in the spec: Megatron would treat their gradients as parts of a sum over ranks
            attention.q_layernorm, attention.k_layernorm = (
                WideNorm(attention.config, heads, arch.head_dim, attention.pg_collection.tp)
                for heads in (arch.heads, arch.kv_heads)
            )
        rotating = attention.core_attention
        if arch.latent is not None:
            # latent attention rotates before the core attention
            rotating.expand, rotating = attention.expand, attention
        rotating.rope = rope if window is None else windowed_rope


def add_gradients_in_products(model: nn.Module) -> None:
    """Make Transformer Engine's matrix products add weight gradients directly to DDP's buffer.

    This is set for each layer, because Megatron's global flag also covers the output layer, which then needs apex.
    """
    for module in model.modules():
        if "fuse_wgrad_accumulation" in vars(module):
            module.fuse_wgrad_accumulation = True


def scale_embedding(embedding: nn.Module, arch: Architecture) -> None:
    """Multiply the embedding's output by the family's factor, if it has one.

    The factor is rounded to the model's dtype, as in HF.
    """
    if arch.embedding_scale is not None:
        scale = torch.tensor(arch.embedding_scale)
        embedding.register_forward_hook(lambda module, inputs, rows: rows * scale.to(rows.dtype).item())
