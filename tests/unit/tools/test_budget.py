"""The budget of a step, on a few layers of two models for clusters. A step that misses it is dearer, and not wrong."""

import copy
import functools

import pytest

from megatron_rl.tools.plan.devices import DEVICES
from megatron_rl.tools.rehearsal.budget import TARGETS, budget, budget_lines
from megatron_rl.tools.rehearsal.rehearsal import World
from tests.kit.rehearsals import order_of, write_shape

SHAPES = {"qwen3-4b": ("configs/math_qwen3_4b.yaml", 8), "qwen3-30b-a3b": ("configs/math_qwen3_30b_a3b_4nodes.yaml", 8)}
H100 = DEVICES["h100"]
WORLD = World(nodes=1, gpus_per_node=8, ranks=8, stages=1)
ROWS = ("batch.tokens_per_microbatch=32768", "rollout.servers=[http://127.0.0.1:1]")

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(scope="module")
def rehearsed(rehearsals, tmp_path_factory):
    """Rehearse a model of two layers, once: what its last rank found in a step of 32k tokens a rank."""
    folder = tmp_path_factory.mktemp("budget")

    @functools.cache
    def rehearse(model):
        config, ranks = SHAPES[model]
        shape = write_shape(folder / f"{model}-2", model, num_hidden_layers=2)
        words = [shape, *ROWS, "megatron.recompute_num_layers=1"]
        return rehearsals.of(folder / model, [order_of(config, ranks, words, rank=ranks - 1)])[ranks - 1]

    return rehearse


@pytest.mark.parametrize("model", SHAPES)
def test_an_update_meets_its_targets(model, rehearsed):
    found = rehearsed(model)
    assert isinstance(found, dict), found
    result = budget(found, WORLD, H100)
    figures = {target["what"]: target["found"] for target in result["targets"]}
    assert set(figures) == set(TARGETS) and None not in figures.values()
    missed = [target for target in result["targets"] if not target["is_met"]]
    assert not missed, missed
    assert found["phases"]["update"]["microbatches"] >= 2
    assert any(what.startswith("allgather") for what in result["exposed"])
    assert all("param_and_grad_buffer" not in what for what in result["exposed"]), "these are hidden by overlap"
    for row in result["exposed"].values():
        assert row["seconds"] == pytest.approx(row["bytes"] / H100.node_link) and row["bytes"] > 0, "a world of a node"


def test_a_wait_in_a_microbatch_and_a_copy_too_many_miss_their_targets(rehearsed):
    worse = copy.deepcopy(rehearsed("qwen3-4b"))
    phase, line = worse["phases"]["update"], "a number read at megatron_rl/algo/loss.py:1"
    phase["syncs"][line] = phase["in_microbatches"][line] = phase["microbatches"]
    phase["copies_in_microbatches"]["to device"] += 1
    worse["extra_bytes"] += 3 << 30
    worse["kernels_of_layers"]["engine"] *= 2
    missed = [target["what"] for target in budget(worse, WORLD, H100)["targets"] if not target["is_met"]]
    assert set(missed) == set(TARGETS) - {"own waits in a step"}
    assert sum("MISSED" in line for line in budget_lines(worse, WORLD, H100, shown=6)) == 4
    worse["kernels_of_layers"] = {}
    assert "not seen" in "".join(budget_lines(worse, WORLD, H100, shown=6))
