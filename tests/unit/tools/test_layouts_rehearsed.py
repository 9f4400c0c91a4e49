"""Plan and rehearsal agree: each family in each layout is refused by both with a way out, or rehearsed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.tools.plan.plan_command import check_as_started
from tests.kit.rehearsals import order_of, write_tiny

ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "configs" / "gsm8k_qwen3_4b.yaml")
SMALL = ["batch.tokens_per_microbatch=512", "generation.max_new_tokens=128", "data.max_prompt_tokens=64"]
RECOMPUTE = "megatron.recompute_granularity=full megatron.recompute_method=uniform megatron.recompute_num_layers=1"
LAYOUTS = {
    "tensor 4": "parallel.tensor=4",
    "tensor 2, stages of two chunks": "parallel.tensor=2 parallel.pipeline=2 parallel.virtual_pipeline=2",
    "tensor 2, context 2": f"parallel.tensor=2 parallel.context=2 {RECOMPUTE}",
    "tensor 2, expert 2 x 2": "parallel.tensor=2 parallel.expert=2 parallel.expert_tensor=2",
    "tensor 1, expert 4, three stages": "parallel.tensor=1 parallel.expert=4 parallel.pipeline=3",
    "adapters": f"parallel.tensor=2 lora.rank=4 algo.kl_coefficient=0.1 {RECOMPUTE}",
    "optimizer on the CPU": "parallel.tensor=2 optimizer.megatron.use_precision_aware_optimizer=true "
    "optimizer.megatron.optimizer_cpu_offload=true",
}
RANKS = 24
FAMILIES = (
    *("deepseek_v3", "gemma3", "glm4_moe", "gpt_oss", "llama_tied", "minimax_m2", "mistral_windowed", "mixtral"),
    *("olmo", "phi3", "qwen2", "qwen3", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "seed_oss"),
)
FEWER = {"qwen3_next": {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}}
"""A model with two delta nets, one in each chunk of layers. For each of them, torch launches thousands of kernels."""
KEPT = {
    ("deepseek_v3", "tensor 2, context 2"),
    ("gpt_oss", "tensor 2, expert 2 x 2"),
    ("gpt_oss", "adapters"),
    ("qwen3_next", "tensor 2, stages of two chunks"),
    ("gemma3", "tensor 4"),
    ("llama_tied", "tensor 4"),
    ("llama_tied", "tensor 2, stages of two chunks"),
}
"""The cases that `make test` runs."""
CASES = [
    pytest.param(family, layout, marks=() if (family, layout) in KEPT else pytest.mark.thorough)
    for family in FAMILIES
    for layout in LAYOUTS
]
WAY_OUT = re.compile(r"; (set|leave|lower|choose|take|raise|remove|name)\b.*\.$")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_layout_is_refused_with_a_way_out_or_rehearsed(family, layout, rehearsals, tmp_path):
    write_tiny(tmp_path, family, **FEWER.get(family, {}))
    words = [f"model.path={tmp_path}", *SMALL, *LAYOUTS[layout].split()]
    try:
        check_as_started(load_config(CONFIG, words))
    except ValueError as error:
        key = str(error).partition(" = ")[0].partition(":")[0]
        assert key.split(".")[0] in ("parallel", "lora", "model", "megatron") and WAY_OUT.search(str(error)), error
        return
    orders = [order_of(CONFIG, RANKS, words, rank=rank) for rank in (RANKS - 1, 0)]
    found = rehearsals.of(tmp_path / "found", orders)
    assert all(isinstance(part, dict) for part in found.values()), found
