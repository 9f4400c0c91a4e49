"""Tiny random HF models and batches for the layout tests, and an engine in a given layout."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
)

from megatron_rl.config import DraftConfig, EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import FinetuneSpec, TrajectoryBatch

VOCAB = 97  # odd: the vocabulary needs padding at every tensor size but 1
SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB,
    max_position_embeddings=128,
)
ROPES = {
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# transformers takes no gradient of a padding token's embedding, and these are no tokens of the tiny vocabulary.
NO_TOKENS = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
# Two layers in three have a delta net, whose key heads have two value heads each.
DELTA = dict(
    head_dim=16,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=20,
    linear_conv_kernel_dim=4,
)
FAMILIES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    **{
        f"{kind}_rope": LlamaConfig(
            **SIZES,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": kind, "rope_theta": 10000.0} | scaling,
        )
        for kind, scaling in ROPES.items()
    },
    "qwen2_tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen2_half_windowed": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=2),
    # As Phi-4 is, and as its small sibling's rotation is.
    "phi3": Phi3Config(**SIZES, **NO_TOKENS, tie_word_embeddings=False),
    "phi3_partly_rotated": Phi3Config(
        **SIZES,
        **NO_TOKENS,
        sliding_window=4,
        rope_parameters=HALF_ROTATED,
    ),
    "olmo": Olmo3Config(
        **SIZES, **NO_TOKENS, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "olmo_tied": Olmo2Config(**SIZES, **NO_TOKENS, tie_word_embeddings=True),
    "seed_oss": SeedOssConfig(**SIZES, head_dim=24, attention_out_bias=False),
    "mistral": MistralConfig(**SIZES, head_dim=24, sliding_window=None),
    "mistral_windowed": MistralConfig(**SIZES, head_dim=24, sliding_window=4),
    # Layers 0 and 2 have a window and a rotary embedding of their own.
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=4,
        pad_token_id=None,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    ),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **DELTA, **NO_TOKENS, rope_parameters=HALF_ROTATED),
    "qwen3_tied_one_kv_head": Qwen3Config(**SIZES | {"num_key_value_heads": 1}, head_dim=16, tie_word_embeddings=True),
}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40)
DEEPSEEK = dict(
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=40,
    n_shared_experts=2,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    kv_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    rms_norm_eps=1e-5,
)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7}
OPEN_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
OPEN_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GLM = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
    n_shared_experts=1,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
    partial_rotary_factor=0.5,
)
# Larger weights than transformers' 0.02: experts of clearly different weight, and no gradient so small that Adam makes
# much of its rounding.
SPARSE = SIZES | {"initializer_range": 0.06}
MIXTURES = {
    # Layer 1 is dense; the last family does not renormalise the chosen experts' weights.
    "qwen3_moe": Qwen3MoeConfig(**SPARSE, **EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_moe_raw_weights": Qwen3MoeConfig(**SPARSE, **EXPERTS, head_dim=16, norm_topk_prob=False),
    "mixtral": MixtralConfig(**SPARSE, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "deepseek_v3": DeepseekV3Config(**SPARSE | DEEPSEEK, q_lora_rank=24),
    "deepseek_v3_yarn_whole_queries": DeepseekV3Config(
        **SPARSE | DEEPSEEK | {"n_group": 1, "topk_group": 1},
        q_lora_rank=None,
        rope_parameters=YARN | {"mscale_all_dim": 0.9},
    ),
    "minimax_m2": MiniMaxM2Config(
        **SPARSE, **NO_TOKENS, num_local_experts=4, num_experts_per_tok=2, head_dim=24, rope_parameters=HALF_ROTATED
    ),
    # Layer 1 is dense in the first.
    "qwen3_next": Qwen3NextConfig(
        **SPARSE, **EXPERTS, **DELTA, **NO_TOKENS, shared_expert_intermediate_size=48, mlp_only_layers=[1]
    ),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **SPARSE, **EXPERTS, **DELTA, **NO_TOKENS, shared_expert_intermediate_size=48, rope_parameters=HALF_ROTATED
    ),
    # Layers 0 and 2 have a window.
    "gpt_oss": GptOssConfig(
        **SPARSE, num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=4, rope_parameters=OPEN_YARN
    ),
    # As GLM-4.5 is, and as its small sibling is: without norms of queries and keys.
    "glm4_moe": Glm4MoeConfig(**SPARSE | GLM, head_dim=24, attention_bias=True, use_qk_norm=True),
    "glm4_moe_air": Glm4MoeConfig(**SPARSE | GLM | {"n_shared_experts": 2}, head_dim=16, attention_bias=True),
}
FAMILIES |= MIXTURES
# Differ from another family in what the layout does not touch.
VARIANTS = {"llama3_rope", "linear_rope", "yarn_rope", "qwen3_moe_raw_weights", "deepseek_v3_yarn_whole_queries"}
VARIANTS |= {"glm4_moe_air", "olmo_tied", "phi3_partly_rotated"}
LAYOUTS = {
    "1": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2, sequence=False)),
    "tp2_sp": (2, ParallelConfig(tensor=2)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "pp2_vpp2": (2, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "tp2_pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "dp2": (2, ParallelConfig()),
    "cp2": (2, ParallelConfig(context=2)),
    "cp4": (4, ParallelConfig(context=4)),
    "cp2_tp2": (4, ParallelConfig(context=2, tensor=2)),
    "cp2_tp2_pp2": (8, ParallelConfig(context=2, tensor=2, pipeline=2)),
    "tp2_dp2": (4, ParallelConfig(tensor=2)),
    "tp2_pp2_dp2": (8, ParallelConfig(tensor=2, pipeline=2)),
    "pp2_vpp2_dp2": (4, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "ep2": (2, ParallelConfig(expert=2)),
    "tp2_etp2": (2, ParallelConfig(tensor=2, expert_tensor=2)),
    "etp2": (2, ParallelConfig(expert_tensor=2)),
    "tp2_ep2": (2, ParallelConfig(tensor=2, expert=2)),
    "tp2_ep2_etp2": (4, ParallelConfig(tensor=2, expert=2, expert_tensor=2)),
    "cp2_ep2": (2, ParallelConfig(context=2, expert=2)),
    "pp2_ep2": (4, ParallelConfig(pipeline=2, expert=2)),
    "tp2_pp2_ep2": (4, ParallelConfig(tensor=2, pipeline=2, expert=2)),
    "tp2_pp2_dp2_ep2": (8, ParallelConfig(tensor=2, pipeline=2, expert=2)),
}


def config_of(family: str, layers: int | None):
    """A copy of the family's config, with its first `layers` layers: two are enough for all but chunks of stages."""
    config = copy.deepcopy(FAMILIES[family])
    if layers is not None:
        config.update({"num_hidden_layers": layers})
        if getattr(config, "layer_types", None):
            config.update({"layer_types": config.layer_types[:layers]})
    return config


def make_model(family: str, folder: Path, layers: int | None = None, **changes):
    """Write the family's tiny random model to `folder` and return it as transformers has it, in float32."""
    torch.manual_seed(0)
    config = config_of(family, layers)
    config.update(changes)
    # The plain loop over experts; transformers' grouped products take fewer dtypes.
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").float().eval()
    with torch.no_grad():  # transformers starts biases at 0 and norms at 1, which would hide a mix-up
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("gate_up_proj_bias"):  # some of them beyond the bounds that GPT-OSS has for gate and up
                parameter.copy_(torch.randn_like(parameter) * 4)
            elif name.endswith("down_proj_bias") or name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
            if name.endswith("A_log"):  # states that last for some tokens: transformers' random ones are gone after one
                parameter.copy_(torch.rand_like(parameter) - 2.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    return model


def make_value_model(family: str, folder: Path, layers: int | None = None):
    """The same with a scalar head: a critic or reward model as transformers saves it."""
    torch.manual_seed(0)
    config = config_of(family, layers)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    with torch.no_grad():
        model.score.weight.mul_(3.0)  # values of about 0.5
    model.save_pretrained(folder)
    return model


def make_batch(seed: int = 0, lengths: tuple[int, ...] = (5, 12, 7, 12, 3, 9)) -> TrajectoryBatch:
    """Ragged random trajectories; about a third of the tokens is prompt."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    mask = torch.cat([torch.arange(n) >= max(1, n // 3) for n in lengths])
    tokens = {
        "input_ids": torch.randint(0, VOCAB, (count,), generator=generator),
        "loss_mask": mask,
        "logprobs": -torch.rand(count, generator=generator) * mask,
        "versions": torch.where(mask, 0, -1),
        "advantages": torch.randn(count, generator=generator),
    }
    sequences = {"rewards": torch.rand(len(lengths), generator=generator), "group": torch.arange(len(lengths)) // 2}
    return TrajectoryBatch(tokens, sequences, torch.tensor([0, *lengths]).cumsum(0))


def make_groups(seed: int = 0, prompts: tuple[int, ...] = (9, 1, 14), replies: int = 4) -> TrajectoryBatch:
    """Groups of replies to common prompts, as RL has them, the first reply of each empty or of one token.

    Every second reply of a group forks from the one before it, as an agent's dialogues do.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))  # noqa: E731
    parts, masks, groups = [], [], []
    for number, length in enumerate(prompts):
        prompt = torch.randint(0, VOCAB, (length,), generator=generator)
        for reply in range(replies):
            begin = parts[-1][: drawn(length, len(parts[-1]) + 1)] if reply and reply % 2 == 0 else prompt
            own = drawn(1, 8) if reply else number % 2
            parts.append(torch.cat([begin, torch.randint(0, VOCAB, (own,), generator=generator)]))
            masks.append(torch.arange(len(parts[-1])) >= length)
            groups.append(number)
    mask, count = torch.cat(masks), sum(map(len, parts))
    tokens = {
        "input_ids": torch.cat(parts),
        "loss_mask": mask,
        "logprobs": -torch.rand(count, generator=generator) * mask,
        "versions": torch.where(mask, 0, -1),
        "advantages": torch.randn(count, generator=generator),
    }
    sequences = {"rewards": torch.rand(len(parts), generator=generator), "group": torch.tensor(groups)}
    return TrajectoryBatch(tokens, sequences, torch.tensor([0, *map(len, parts)]).cumsum(0))


def make_engine(
    folder: Path,
    parallel: ParallelConfig,
    *,
    tokens_per_microbatch: int = 64,
    megatron: dict | None = None,
    share_prompts: bool = True,
    groups: ParallelGroups | None = None,
    head: str = "policy",
    flash_attention: str = "torch",
    shared_keys: str = "copied",
    delta_kernel: str = "torch",
    lora: LoraConfig | None = None,
    draft: DraftConfig | None = None,
    dtype: str = "float32",
    routing_replay: str = "off",
    exact: bool = False,
    **options,
) -> MegatronEngine:
    """Return an initialised engine; `megatron` goes to TransformerConfig, `options` to OptimizerConfig."""
    # eps 1e-6: near-zero gradients must not turn rounding into whole Adam steps.
    optimizer = OptimizerConfig(**{"lr": 1e-3, "eps": 1e-6} | options)
    engine = MegatronEngine(
        EngineConfig(
            model=ModelConfig(
                path=str(folder),
                flash_attention=flash_attention,
                shared_keys=shared_keys,
                delta_kernel=delta_kernel,
                dtype=dtype,
            ),
            parallel=parallel,
            optimizer=optimizer,
            lora=lora or LoraConfig(),
            draft=draft or DraftConfig(),
            tokens_per_microbatch=tokens_per_microbatch,
            share_prompts=share_prompts,
            routing_replay=routing_replay,
            exact=exact,
        ),
        megatron=megatron,
        groups=groups,
        head=head,
    )
    return start(engine)


_layouts: dict[str, ParallelGroups] = {}
"""This process's world in each layout that an engine has had there; none in the process that forks ranks."""


def start(engine: MegatronEngine) -> MegatronEngine:
    """Initialise an engine, in groups that an earlier one of its world and layout has built if there is one."""
    layout = repr(engine.config.parallel)
    engine.groups = engine.groups or _layouts.get(layout)
    engine.initialize(None, FinetuneSpec(total_updates=10))
    _layouts.setdefault(layout, engine.groups)
    return engine


def share_of(batch: TrajectoryBatch, engine: MegatronEngine) -> TrajectoryBatch:
    """This data-parallel rank's trajectories: every `dp`-th one."""
    data = engine.groups.data
    return batch.select(range(data.rank, len(batch), data.size))
