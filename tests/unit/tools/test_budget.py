"""The budget of a step, on a few layers of two models for clusters."""

import copy
import json
from pathlib import Path

import pytest

from megatron_rl.tools.rehearsal.budget import TARGETS, budget, budget_lines
from tests.unit.tools.rehearse_cases import rehearsed

ROOT = Path(__file__).resolve().parents[3]
SHAPES = {"qwen3-4b": ("math_qwen3_4b", 8), "qwen3-30b-a3b": ("math_qwen3_30b_a3b_4nodes", 8)}
ROWS = ("batch.tokens_per_microbatch=32768", "rollout.servers=[http://127.0.0.1:1]")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / "megatron_rl" / "_C_rehearsal.so").exists(), reason="a torch with CUDA has no place for the shim"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By model, what its last rank found in a step of 32k tokens a rank, with two layers."""
    folder = tmp_path_factory.mktemp("budget")
    cases = {}
    for model, (config, ranks) in SHAPES.items():
        shape = json.loads((ROOT / "tests" / "model_configs" / model / "config.json").read_text())
        (folder / f"{model}-2").mkdir()
        (folder / f"{model}-2" / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 2}))
        order = {"world_size": ranks, "gpus_per_node": 8, "memory_bytes": 80 << 30, "rank": ranks - 1}
        order["config"] = str(ROOT / "configs" / f"{config}.yaml")
        order["overrides"] = [f"model.path={folder / f'{model}-2'}", *ROWS, "megatron.recompute_num_layers=1"]
        cases[model] = {"faults": [], "orders": [order]}
    return {model: ranks[cases[model]["orders"][0]["rank"]] for model, ranks in rehearsed(folder, cases).items()}


@pytest.mark.parametrize("model", SHAPES)
def test_an_update_meets_its_targets(model, found):
    assert isinstance(found[model], dict), found[model]
    result = budget(found[model])
    figures = {target["what"]: target["found"] for target in result["targets"]}
    assert set(figures) == set(TARGETS) and None not in figures.values()
    missed = [target for target in result["targets"] if not target["is_met"] and "GiB" not in target["what"]]
    assert not missed, missed
    assert found[model]["phases"]["update"]["microbatches"] >= 2
    assert any(what.startswith("allgather") for what in result["exposed"])
    assert all("param_and_grad_buffer" not in what for what in result["exposed"]), "these are hidden by overlap"


def test_a_wait_in_a_microbatch_and_a_copy_too_many_miss_their_targets(found):
    worse = copy.deepcopy(found["qwen3-4b"])
    phase, line = worse["phases"]["update"], "a number read at megatron_rl/algo/loss.py:1"
    phase["syncs"][line] = phase["in_microbatches"][line] = phase["microbatches"]
    phase["copies_in_microbatches"]["to device"] += 1
    worse["extra_bytes"] += 3 << 30
    worse["kernels_of_layers"]["engine"] *= 2
    missed = [target["what"] for target in budget(worse)["targets"] if not target["is_met"]]
    assert set(missed) == set(TARGETS) - {"own waits in a step"}
    assert sum("MISSED" in line for line in budget_lines(worse, shown=6)) == 4
    worse["kernels_of_layers"] = {}
    assert "not seen" in "".join(budget_lines(worse, shown=6))
