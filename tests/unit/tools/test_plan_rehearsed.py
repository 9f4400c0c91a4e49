"""What a plan says of memory, against the real engine on a device without memory: bfloat16, CUDA's branches."""

import json
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.tools.plan.memory import memory_of_stage, models_of
from megatron_rl.tools.plan.step_sizes import PromptTokens, plan_batch
from tests.unit.tools.rehearse_cases import rehearsed

ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "configs" / "gsm8k_qwen3_4b.yaml")
PROMPT = 8
SETTINGS = [
    *("batch.share_prompts=false", "batch.updates_per_step=1", "batch.tokens_per_microbatch=4096"),
    *("generation.n_samples=2", "generation.max_new_tokens=248", f"data.max_prompt_tokens={PROMPT}"),
]
RANKS = 4
ATTENTION = dict(num_attention_heads=16, head_dim=64)
MODELS = {
    "qwen3-4b": dict(num_key_value_heads=8, intermediate_size=3072, tie_word_embeddings=False, **ATTENTION),
    "qwen3-30b-a3b": dict(
        num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=768, **ATTENTION
    ),
    "deepseek-v3": dict(
        first_k_dense_replace=1,
        intermediate_size=3072,
        kv_lora_rank=128,
        moe_intermediate_size=768,
        n_group=2,
        n_routed_experts=8,
        num_attention_heads=16,
        num_experts_per_tok=2,
        num_key_value_heads=16,
        num_nextn_predict_layers=0,
        q_lora_rank=384,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        topk_group=1,
        v_head_dim=64,
    ),
}
"""Published shapes made small, so that weights, gradients, optimizer, activations and head are all of one order."""
RECOMPUTE = "megatron.recompute_granularity=full megatron.recompute_method=uniform megatron.recompute_num_layers=1"
LAYOUTS = {
    "dense": ("qwen3-4b", "parallel.tensor=1"),
    "dense, tensor": ("qwen3-4b", "parallel.tensor=2"),
    "dense, tensor and pipeline": ("qwen3-4b", "parallel.tensor=2 parallel.pipeline=2"),
    "dense, recompute": ("qwen3-4b", f"parallel.tensor=1 {RECOMPUTE}"),
    "mixture, expert": ("qwen3-30b-a3b", "parallel.tensor=1 parallel.expert=4"),
    "mixture, tensor and expert": ("qwen3-30b-a3b", "parallel.tensor=2 parallel.expert=2"),
    "latent attention, expert": ("deepseek-v3", "parallel.tensor=1 parallel.expert=2"),
    "latent attention, tensor": ("deepseek-v3", "parallel.tensor=2"),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / "megatron_rl" / "_C_rehearsal.so").exists(), reason="a torch with CUDA has no place for the shim"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By layout: its settings, and what its last and its first rank found."""
    folder, settings = tmp_path_factory.mktemp("layouts"), {}
    for name, changes in MODELS.items():
        published = json.loads((ROOT / "tests" / "model_configs" / name / "config.json").read_text())
        published.pop("quantization_config", None)
        small = published | changes | dict(num_hidden_layers=2, hidden_size=1024, vocab_size=32768)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(small))
    for layout, (name, words) in LAYOUTS.items():
        settings[layout] = [f"model.path={folder / name}", *SETTINGS, *words.split()]
    order = {"world_size": RANKS, "gpus_per_node": 8, "memory_bytes": 80 << 30, "config": CONFIG}
    orders = {
        layout: {"faults": [], "orders": [order | {"overrides": words, "rank": rank} for rank in (RANKS - 1, 0)]}
        for layout, words in settings.items()
    }
    results = rehearsed(folder, orders)
    return {layout: (settings[layout], results[layout]) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_of_an_update_is_the_planned_one(layout, found):
    settings, by_rank = found[layout]
    config, tokens = load_config(CONFIG, settings), PromptTokens.of([PROMPT])
    (model,) = models_of(config)
    batch = plan_batch(config, tokens, RANKS // (config.parallel.tensor * config.parallel.pipeline))
    for rank, part in by_rank.items():
        assert isinstance(part, dict), part
        stage = rank * config.parallel.pipeline // RANKS
        planned = memory_of_stage(model, stage, config, batch, tokens, RANKS)
        at_update = max(sum(planned.update.values()), planned.moments["backward pass"])
        at_update = max(at_update, planned.moments["optimizer step"])
        peak = part["phases"]["update"]["peak_bytes"]
        assert planned.kept + at_update == pytest.approx(peak, rel=0.05), (rank, planned, part["peak_by_line"])
