"""What a plan says of memory, against real engines of tiny models on CPU."""

import pytest

from megatron_rl import parallel
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import parameters_of_stage
from tests.megatron.ranks import run_ranks
from tests.megatron.tiny import LAYOUTS, make_engine, make_model


def parameters_of_rank(folder, layouts):
    """{(layout, head): (stage, parameters)} of this rank."""
    found = {}
    for name in layouts:
        groups = parallel.start(LAYOUTS[name][1], seed=1)
        for head in ("policy", "value"):
            engine = make_engine(folder, LAYOUTS[name][1], groups=groups, head=head)
            found[name, head] = groups.pipeline.rank, sum(p.numel() for p in engine.parameters())
    return found


# Every family and every way to cut: a padded vocabulary, fewer key-value heads than ranks, a tied embedding's second
# copy, experts with a tensor axis of their own.
CASES = {
    "llama": ["tp2", "pp2_vpp2"],
    "llama_tied": ["tp2", "pp2"],
    "qwen2": ["tp2_sp"],
    "qwen3_tied_one_kv_head": ["tp2_sp", "pp2"],
    "gemma3": ["tp2_sp", "pp2_vpp2"],
    "qwen3_moe": ["ep2", "tp2_etp2", "tp2_ep2"],
    "mixtral": ["etp2", "pp2"],
    "deepseek_v3": ["tp2_sp", "ep2"],
    "deepseek_v3_yarn_whole_queries": ["tp2_ep2"],
}


@pytest.mark.parametrize("family", CASES)
def test_planned_parameters_are_an_engines_on_every_rank(family, tmp_path):
    make_model(family, tmp_path)
    arch = read_architecture(tmp_path)
    for found in run_ranks(2, parameters_of_rank, tmp_path, CASES[family]):
        assert len(found) == 2 * len(CASES[family])
        for (name, head), (stage, count) in found.items():
            planned = parameters_of_stage(arch.with_head(head), LAYOUTS[name][1], stage)
            assert planned.total == count, (name, head, stage)
