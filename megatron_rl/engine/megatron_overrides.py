"""Rules of the `megatron:` section, which sets TransformerConfig fields that no other option determines.

Some fields would contradict the layout, the model, or this package's attention and head. Megatron would ignore such a
field, or results would silently change. These fields are rejected here, before any process group exists.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import ParallelConfig

OUR_KEYS = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "sequence_parallel": "parallel.sequence",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "transformer_impl": "model.transformer_impl",
}
"""Maps Megatron's fields that one of our options determines to the option's key."""

MAY_BE_SET = {
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "batch_p2p_sync",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_token_dispatcher_type",
}
"""Fields that `transformer_config` sets, and that may be set to other values because they affect only speed and memory.
"""

FIELDS_BY_REASON = {
    "the gradient is divided once, by the global sum of loss_weight_fn": "calculate_per_token_loss",
    "the trainer's log-probabilities would differ from the rollouts' at random": "hidden_dropout attention_dropout",
    "pipeline stages exchange packed rows, of which every microbatch has another number": "variable_seq_lengths",
    "with virtual_pipeline, batched sends between two stages are mixed up silently": "overlap_p2p_comm batch_p2p_comm",
    "it is on where apex's kernel for it is installed and off elsewhere": "gradient_accumulation_fusion",
    "the norm's weight is Hugging Face's, centered at 1": "layernorm_zero_centered_gamma",
    "the engine packs whole rounds of the pipeline's length": "microbatch_group_size_per_vp_stage",
    "pipeline stages would exchange another dtype than they expect": "fp32_residual_connection",
    "algo.routing_replay replays what the servers tell, with each microbatch": "moe_enable_routing_replay",
    "its experts' weights lie in another way; moe_grouped_gemm is Transformer Engine's": "moe_use_legacy_grouped_gemm",
    "it changes routing by a weight that the model's Hugging Face folder lacks": "moe_router_enable_expert_bias",
    "the packed attention does not read it": "window_size window_attn_skip_freq softmax_scale softmax_type qk_clip "
    "apply_query_key_layer_scaling log_max_attention_logit cp_comm_type hierarchical_context_parallel_sizes "
    "hybrid_context_parallel apply_rope_fusion masked_softmax_fusion rotary_interleaved no_rope_freq flash_decode",
    "the engine's own head computes the loss": "cross_entropy_loss_fusion cross_entropy_fusion_impl "
    "defer_embedding_wgrad_compute mtp_num_layers",
    "adds a gradient beside loss_fn's, which is not divided by loss_weight_fn; put such a term into the loss": (
        "moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type"
    ),
    "which tokens an expert drops would depend on the microbatch split": "moe_expert_capacity_factor "
    "moe_pad_expert_input_to_capacity moe_token_dropping",
    "routing would differ from the rollouts' at random": "moe_input_jitter_eps moe_router_force_load_balancing",
    "only float32 and bfloat16 have a loss scale and weights that agree with the rollouts'": "fp8 fp4 fp8_param "
    "fp4_param enable_autocast autocast_dtype",
    "microbatches differ in their number of rows, and a graph replays one": "enable_cuda_graph external_cuda_graph "
    "cuda_graph_impl",
    "the engine sets it": "timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func "
    "param_sync_func",
}
REASONS = {field: reason for reason, fields in FIELDS_BY_REASON.items() for field in fields.split()}
"""Maps a field to the reason why it must not be set. Fields that the model or layout determines need no entry here."""


FLEX_BACKENDS = {
    "deepep": ("HAVE_DEEP_EP", "DeepEP's package deep_ep"),
    "hybridep": ("HAVE_HYBRIDEP", "the package deep_ep of DeepEP's branch hybrid-ep"),
    "ncclep": ("HAVE_TE_EP", "transformer_engine.pytorch.ep"),
}
"""For each value of megatron.moe_flex_dispatcher_backend: Megatron-Core's flag that says whether it could load the
package, and the package's name."""


def missing_for_flex(megatron: dict[str, Any]) -> str:
    """Return the package that the flex dispatcher needs, if Megatron-Core cannot load it, else ''.

    A package with the right name is not enough: SGLang's deep_ep lacks classes that Megatron-Core imports.
    """
    from megatron.core.transformer.moe import fused_a2a  # imports the packages, which may need CUDA

    flag, package = FLEX_BACKENDS.get(megatron.get("moe_flex_dispatcher_backend", "deepep"), ("", ""))
    return "" if not flag or getattr(fused_a2a, flag, False) else package


def check_flex_dispatcher(megatron: dict[str, Any], parallel: ParallelConfig, *, is_elsewhere: bool = False) -> None:
    """Raise ValueError unless `megatron.moe_token_dispatcher_type=flex` can work.

    is_elsewhere: True if other machines will train. This machine's packages and devices then do not matter.
    """
    if parallel.expert * parallel.expert_tensor == 1:
        fault = "every rank has all experts, and upstream wants more ranks; raise parallel.expert"
    elif not is_elsewhere and (package := missing_for_flex(megatron)):
        fault = f"needs {package}, and Megatron-Core found none that it can load; install it"
    else:
        return
    raise ValueError(f"megatron.moe_token_dispatcher_type = 'flex': {fault}, or leave it out.")


def check_passed_through(
    given: dict[str, Any], ours: dict[str, Any], upstream: type[TransformerConfig] = TransformerConfig
) -> None:
    """Raise ValueError for the first `megatron:` field that Megatron lacks or that contradicts this package.

    A field may be set to the value that it would have anyway. given: the `megatron:` section. ours: the fields that the
    engine sets, with their values.
    """
    fields = {field.name: field for field in dataclasses.fields(upstream)}
    for key, value in given.items():
        if key not in fields:
            raise ValueError(
                f"megatron.{key} = {value!r}: not a field of megatron.core's {upstream.__name__}; leave it out, or "
                f"take a name from its documentation."
            )
        if key == "moe_token_dispatcher_type" and value not in ("alltoall", "flex"):
            raise ValueError(f"megatron.{key} = {value!r}: must be alltoall or flex, as microbatches differ in length.")
        is_ours = key in ours and key not in MAY_BE_SET
        if not (is_ours or key in OUR_KEYS or key in REASONS):
            continue
        if value == (ours[key] if key in ours else fields[key].default):
            continue
        if key in OUR_KEYS:
            raise ValueError(f"megatron.{key} = {value!r}: {OUR_KEYS[key]} decides this; set that instead.")
        reason = REASONS.get(key, "it follows from the model's config.json and the layout")
        raise ValueError(f"megatron.{key} = {value!r}: not to be set, {reason}; leave it out.")
