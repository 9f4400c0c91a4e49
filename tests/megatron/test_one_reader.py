"""Replicas of a shard share the reading of the model's files: one of them reads each part, and the others get it."""

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config import ParallelConfig
from megatron_rl.weights.hf_files import HFFolder
from megatron_rl.weights.mapping import weight_source
from megatron_rl.weights.reshard import _first_expert, _split_axis, rules_of
from tests.kit.models import MIXTURES, make_engine, make_model
from tests.kit.ranks import run_each

# Of four ranks: replicas alone, beside tensor ranks, of experts that have other replicas than the rest of a layer, and
# of two pipeline stages. The last one's context ranks are replicas too.
LAYOUTS = {
    "dp4": ("llama_tied", ParallelConfig()),
    "tp2_dp2": ("qwen2", ParallelConfig(tensor=2)),
    "ep2_dp4": ("qwen3_moe", ParallelConfig(expert=2)),
    "tp2_ep2": ("deepseek_v3", ParallelConfig(tensor=2, expert=2)),
    "pp2_cp2": ("mixtral", ParallelConfig(pipeline=2, context=2)),
}


def loaded(folder, layout):
    """What a rank read while its engine started, where it stands, and which parameters are not what the files say."""
    reads, read = Counter(), HFFolder.read

    def counting(self, name, dim, start, stop):
        reads[name, dim, start, stop] += 1
        return read(self, name, dim, start, stop)

    HFFolder.read = counting
    try:
        engine = make_engine(folder, layout)
    finally:
        HFFolder.read = read
    groups, arch, wrong = engine.groups, engine.arch, []
    source = weight_source(folder, arch)
    for parameter, rule in (entry for chunk in engine.chunks for entry in rules_of(chunk, arch)):
        axis, first_expert = _split_axis(rule, groups), _first_expert(groups.expert.rank, arch, groups)
        own = rule.load(source, tuple(parameter.shape), axis.rank, axis.size, arch, first_expert)
        wrong += [] if torch.equal(parameter.detach(), own.to(parameter.dtype)) else rule.names(first_expert)
    dense = groups.tensor.rank, groups.pipeline.rank
    return reads, dense, (groups.expert_tensor.rank, groups.pipeline.rank, groups.expert.rank), wrong


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp(family) for family, _ in LAYOUTS.values()}
    for family, folder in folders.items():
        make_model(family, folder, layers=2)
    found = run_each(4, loaded, {name: (folders[family], layout) for name, (family, layout) in LAYOUTS.items()})
    return folders, found


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_part_of_a_shard_is_read_once_in_the_world_and_all_replicas_have_it(name, starts):
    folders, found = starts
    family, _ = LAYOUTS[name]
    by_shard = Counter()
    for reads, dense, expert, wrong in found[name]:
        assert not wrong
        for part, count in reads.items():
            is_expert = family in MIXTURES and ".experts." in part[0]
            by_shard[(expert if is_expert else dense, part)] += count
    # A last stage has its own copy of a tied embedding; here no tied model has several stages.
    assert set(by_shard.values()) == {1}
    assert {part[0] for _, part in by_shard} == set(load_file(folders[family] / "model.safetensors"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_replicas_read_about_as_much_as_each_other(name, starts):
    def rows(reads):
        return sum(count * (stop - start) for (_, _, start, stop), count in reads.items())

    amounts = [rows(reads) for reads, *_ in starts[1][name]]
    assert max(amounts) < 2 * min(amounts), amounts
