"""Construction of this rank's part of a Megatron-Core decoder. weights/reshard.py loads the weights afterwards.

The last stage returns hidden states, not logits, because the engine's head decides which rows need logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import is_te_min_version
from torch import Tensor, nn

from megatron_rl import platform
from megatron_rl.config import PIPELINE_CUTS, EngineConfig
from megatron_rl.engine import optimizer
from megatron_rl.engine.attention import PackedAttention
from megatron_rl.engine.delta_net import GatedDeltaNet
from megatron_rl.engine.layers import ValueHead, block_spec, family_options, place_attention, scale_embedding
from megatron_rl.engine.megatron_overrides import check_flex_dispatcher, check_passed_through
from megatron_rl.ops import VocabShard, fixed_order
from megatron_rl.parallel import ParallelGroups
from megatron_rl.weights.adapter_rules import check_adapters
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.draft_files import check_draft
from megatron_rl.weights.layout import check_layout
from megatron_rl.weights.reshard import rules_of
from megatron_rl.weights.route_form import route_form

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns hidden states instead of logits.

    Each tensor rank gets all rows, as a vocab-parallel head needs.
    """

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        # Both return all rows to each tensor rank. The backward pass sums the gradients of the vocabulary shards.
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(hidden_states, group=group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=group)

    def output_weight(self) -> Tensor:
        """Return the `[V_local, H]` weight of the output layer, padded columns included."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ValueModel(PolicyModel):
    """PolicyModel with a value head.

    The tensor ranks compute the head with the same states, loss and gradient. The gradient is therefore not summed over
    them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.post_process:
            self.output_layer = ValueHead(self.config.hidden_size, self.config.params_dtype)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (self.post_process and self.config.sequence_parallel):
            return hidden_states
        return tensor_parallel.gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )


def padded_vocab(arch: Architecture, groups: ParallelGroups) -> int:
    """Return the vocabulary size, rounded up to a multiple of the tensor axis."""
    return -(-arch.vocab // groups.tensor.size) * groups.tensor.size


def vocab_shard(arch: Architecture, groups: ParallelGroups) -> VocabShard:
    """Return this tensor rank's columns of the vocabulary. Padding is not included: it must get no probability."""
    rows = padded_vocab(arch, groups) // groups.tensor.size
    start = groups.tensor.rank * rows
    return VocabShard(start, min(start + rows, arch.vocab), arch.vocab, groups.tensor.group)


def compiles_activation(arch: Architecture, dtype: torch.dtype) -> bool:
    """Return True if the model's local layers use a compiled SwiGLU.

    It runs as one kernel per pass, and keeps only its input for the backward pass.
    """
    return platform.has_cuda() and dtype is torch.bfloat16 and arch.activation == "silu"


def transformer_config(
    arch: Architecture, config: EngineConfig, passed_through: dict[str, Any], *, is_elsewhere: bool = False
) -> TransformerConfig:
    """Translate the architecture and the layout into Megatron's config. Needs no process group.

    Raises ValueError if the settings contradict each other.
    passed_through: the `megatron:` section.
    is_elsewhere: True if other machines will train, which have all packages that the settings need. The result then
      describes local layers.
    """
    dtype, parallel, chunks = DTYPES[config.model.dtype], config.parallel, config.parallel.virtual_pipeline
    check_layout(arch, parallel, passed_through)
    if config.lora.rank > 0:
        check_adapters(arch, config.lora, config.model)
    if config.draft.kind != "none":
        check_draft(arch, config.draft.kind)
    if config.model.flash_attention == "TE" and arch.has_sinks:
        raise ValueError(
            f"model.flash_attention = 'TE': {arch.family} has attention sinks, for which the sum of each softmax is "
            f"read, and Transformer Engine's attention does not return it; set model.flash_attention=torch."
        )
    if parallel.pipeline == 1:  # for example a critic; the fields split the policy's pipeline
        passed_through = {key: value for key, value in passed_through.items() if key not in PIPELINE_CUTS}
    optimizer.check_passed_through(config, is_elsewhere=is_elsewhere)
    if config.model.transformer_impl == "transformer_engine" and not arch.fits_transformer_engine:
        raise ValueError(
            f"model.transformer_impl = 'transformer_engine': {arch.family} has {arch.beyond_transformer_engine} that "
            f"Transformer Engine's layers lack; set it to auto or local."
        )
    # Transformer Engine's layers fuse norms and experts into their matrices, which leaves no place for an adapter.
    transformer_impl = "local" if config.lora.rank > 0 or is_elsewhere else config.model.transformer_impl
    uses_transformer_engine = arch.fits_transformer_engine and platform.uses_transformer_engine(transformer_impl)
    if config.exact:
        check_exact(arch, config, uses_transformer_engine=uses_transformer_engine)
    options: dict[str, Any] = dict(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.ffn,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        layernorm_epsilon=arch.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=arch.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        gated_linear_unit=True,
        activation_func=fixed_order.silu if config.exact else F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=False,  # otherwise Transformer Engine builds whole float32 matrices on the host
        perform_initialization=False,  # weights are loaded right after building
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.context,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        # Two chunks on two stages send twice between the same ranks. If batched, Megatron silently mixes them up.
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        batch_p2p_sync=False,  # would wait for the device after each send, against a bug that torch 1.13 fixed
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=True,  # microbatches differ in their number of rows
        moe_token_dispatcher_type="alltoall",  # Megatron does not support allgather with variable_seq_lengths
        # One kernel for all of a rank's experts, and one that sorts tokens by expert.
        moe_grouped_gemm=uses_transformer_engine and arch.mixture is not None,
        moe_permute_fusion=uses_transformer_engine and arch.mixture is not None and is_te_min_version("2.1.0"),
        calculate_per_token_loss=True,  # the one division, by the global weight: finalize_model_grads
        bias_activation_fusion=uses_transformer_engine or compiles_activation(arch, dtype),
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        transformer_impl="transformer_engine" if uses_transformer_engine else "local",
        gradient_accumulation_fusion=platform.has_gradient_accumulation_kernel(),
    )
    options |= family_options(arch, parallel)
    cls = TransformerConfig if arch.latent is None else MLATransformerConfig
    check_passed_through(passed_through, options, cls)
    if route_form(arch, config.routing_replay) and passed_through.get("moe_router_fusion"):
        raise ValueError(
            f"megatron.moe_router_fusion = True: its kernel chooses experts itself, and algo.routing_replay = "
            f"{config.routing_replay!r} replays the servers'; leave one of them out."
        )
    if passed_through.get("moe_token_dispatcher_type") == "flex":
        check_flex_dispatcher(passed_through, parallel, is_elsewhere=is_elsewhere)
    is_grouped_there = is_elsewhere and arch.fits_transformer_engine and config.lora.rank == 0
    if passed_through.get("moe_grouped_gemm") and not (uses_transformer_engine or is_grouped_there):
        raise ValueError(
            "megatron.moe_grouped_gemm = True: needs model.transformer_impl=transformer_engine; leave it out."
        )
    try:
        return cls(**options | passed_through)
    except (AssertionError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"megatron = {passed_through}: megatron.core refuses these fields with this model and layout ({reason}); "
            f"correct them, or leave them out."
        ) from error


def build_chunks(
    arch: Architecture, tf_config: TransformerConfig, groups: ParallelGroups, config: EngineConfig
) -> list[PolicyModel]:
    """Return this rank's model chunks with uninitialized weights. There are several in an interleaved pipeline."""
    count = tf_config.virtual_pipeline_model_parallel_size or 1
    stages = range(count) if count > 1 else [None]  # Megatron uses None for a plain pipeline
    chunks = [_build(arch, tf_config, groups, stage, is_last=stage in (None, count - 1)) for stage in stages]
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, PackedAttention):
                module.uses_transformer_engine = config.model.flash_attention == "TE"
            if isinstance(module, GatedDeltaNet):
                module.uses_kernels = config.model.delta_kernel == "fla"
        if config.exact:
            compute_in_fixed_order(chunk)
    return chunks


def _build(
    arch: Architecture, tf_config: TransformerConfig, groups: ParallelGroups, vp_stage: int | None, *, is_last: bool
) -> PolicyModel:
    model = (ValueModel if arch.head == "value" else PolicyModel)(
        config=tf_config,
        transformer_layer_spec=block_spec(arch, tf_config, vp_stage=vp_stage),
        vocab_size=padded_vocab(arch, groups),
        max_sequence_length=arch.max_positions,
        # Chunks are assigned to the stages in turn: the first stage's first one has the embedding.
        pre_process=groups.is_first_stage and vp_stage in (None, 0),
        post_process=groups.is_last_stage and is_last,
        vp_stage=vp_stage,
        position_embedding_type="none",  # PackedAttention rotates
        share_embeddings_and_output_weights=arch.tied,
    )
    place_attention(model.decoder, arch)
    if model.pre_process:
        scale_embedding(model.embedding, arch)
    for parameter, rule in rules_of(model, arch):
        # Megatron marks split parameters only when it initializes them. In the gradient norm, it takes unmarked ones
        # for replicas, and counts only tensor rank 0's.
        if not hasattr(parameter, "tensor_model_parallel"):
            dim = rule.layout.split_dim
            tensor_parallel.set_tensor_model_parallel_attributes(
                parameter, dim is not None, -1 if dim is None else dim, 1
            )
        if rule.expert is not None:
            # Megatron does this only under expert parallelism. But an expert's replicas, over which its gradient is
            # summed, also differ from those of the rest of the layer if the expert-tensor axis is not the tensor axis.
            parameter.allreduce = False
            if rule.layout.split_dim is None:
                # A bias: Megatron would sum its gradient over the tensor axis again, and count only rank 0's experts.
                parameter.tensor_model_parallel, parameter.sequence_parallel = True, False
    return model


def check_exact(arch: Architecture, config: EngineConfig, *, uses_transformer_engine: bool) -> None:
    """Raise ValueError for a model or layout whose values could not equal those of the servers to the bit."""
    parallel, lora = config.parallel, config.lora.rank
    is_plain = arch.mixture is arch.latent is arch.delta_net is None and not any(arch.windows) and not arch.has_sinks
    faults = {
        f"model.dtype = {config.model.dtype!r}; set it to float32": config.model.dtype != "float32",
        f"parallel.tensor = {parallel.tensor}, which adds up parts of sums; set it to 1": parallel.tensor > 1,
        f"parallel.context = {parallel.context}; set it to 1": parallel.context > 1,
        f"lora.rank = {lora}; set it to 0": lora > 0,
        f"{arch.family}, whose layers the embedded server lacks; choose another model": not is_plain,
        "Transformer Engine's layers; set model.transformer_impl=local": uses_transformer_engine,
    }
    if fault := next((text for text, holds in faults.items() if holds), ""):
        raise ValueError(f"rollout.exact = true: does not work with {fault}, or leave rollout.exact out.")


def compute_in_fixed_order(model: nn.Module) -> None:
    """Make a model's layers compute each row in an order that does not depend on other rows (rollout.exact).

    The values are those of ops/fixed_order.py, which the embedded server with --exact also computes. The gradients are
    Megatron's.
    """
    for module in model.modules():
        if isinstance(module, tensor_parallel.ColumnParallelLinear | tensor_parallel.RowParallelLinear):
            module.register_forward_hook(_fixed_order_product, prepend=True)
        elif isinstance(module, PackedAttention):
            module.in_fixed_order = True
            if module.rope is not None:
                module.rope.in_fixed_order = True


def _fixed_order_product(
    layer: nn.Module, inputs: tuple[Tensor, ...], result: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    bias = None if layer.skip_bias_add else layer.bias
    return fixed_order.with_value(result[0], fixed_order.linear(inputs[0], layer.weight, bias)), result[1]
