"""Every config of a cluster is rehearsed on its whole layout: two with all layers, the others with one of each kind.

The two have the figures in the table of docs/cluster.md. All of them at their full depth would take ten minutes.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.tools.plan.devices import DEVICES
from megatron_rl.tools.plan.memory import memory_of_stage, models_of
from megatron_rl.tools.plan.plan_command import with_models
from megatron_rl.tools.plan.step_sizes import PromptTokens, plan_batch
from megatron_rl.tools.rehearsal.rehearsal import Rehearsal, check, world_of
from megatron_rl.tools.rehearsal.rehearsal_text import as_text
from megatron_rl.weights.architecture import read_architecture
from tests.unit.tools.rehearse_cases import order_of, rehearsed, write_shape

ROOT = Path(__file__).resolve().parents[3]
LARGE = [
    path for path in sorted((ROOT / "configs").glob("*.yaml")) if re.search(r"qwen3|llama3|deepseek|glm", path.name)
]
COMPARED = ("gsm8k_qwen3_4b", "math_llama3_70b_8nodes")
"""One stage, and several: these have all their layers."""
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def table():
    """The benchmark that writes the table."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("rehearse_configs")


def few_layers(table, path, folder):
    """Write the model's config.json with one layer of each kind on a stage; return the settings for it.

    Dense layers before mixtures all stay, on the first stage. Of a config that recomputes some layers of a stage, the
    layer that is recomputed comes with one that is not.
    """
    config = with_models(load_config(path), table.MODELS)
    mixture = read_architecture(config.model.path).mixture
    dense, given = mixture.layers.index(True) if mixture else 0, config.megatron
    is_half = given.get("recompute_method") == "block"
    each, sizes = 1 + is_half, {FIRST: dense + 1 + is_half, LAST: 1 + is_half}
    layers = dense + each * config.parallel.pipeline
    model = write_shape(folder, Path(config.model.path).name, num_hidden_layers=layers)
    cuts = [f"megatron.{key}={size}" for key, size in sizes.items() if key in given]
    return [model, *cuts, *(["megatron.recompute_num_layers=1"] if is_half else [])]


@pytest.fixture(scope="module")
def found(table, tmp_path_factory):
    """By config: its settings, and the rehearsal of its first and last rank."""
    folder = tmp_path_factory.mktemp("few_layers")
    cases, settings, worlds = {}, {}, {}
    for path in LARGE:
        world = worlds[path] = world_of(load_config(path), nodes=table.nodes_of(path), gpus_per_node=8)
        if path.stem in COMPARED:
            words = [f"model.path={with_models(load_config(path), table.MODELS).model.path}"]
        else:
            words = few_layers(table, path, folder / f"model-{path.stem}")
        settings[path], ranks = words, world.chosen(table.ranks_of(world))
        orders = [order_of(path, world.ranks, words, rank=rank) for rank in ranks]
        cases[path.stem] = {"faults": [], "orders": orders}
    results = rehearsed(folder, cases)
    return {
        path: (words, Rehearsal(None, worlds[path], DEVICES["h100"], results[path.stem]))
        for path, words in settings.items()
    }


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_config_of_a_cluster_runs_without_a_fault_and_waits_for_nothing_in_a_microbatch(path, table, found):
    _, result = found[path]
    assert all(isinstance(part, dict) for part in result.by_rank.values()), result.by_rank
    check(result)
    for rank, part in result.by_rank.items():
        syncs = part["phases"]["update"]["syncs"]
        own = {what: count for what, count in syncs.items() if " at megatron_rl/" in what}
        assert sum(own.values()) <= 3 and all(count == 1 for count in own.values()), (rank, own)


@pytest.mark.parametrize(
    "path", [path for path in LARGE if "optimizer_cpu_offload" in path.read_text()], ids=lambda p: p.stem
)
def test_an_optimizer_on_the_cpu_has_the_planned_host_memory(path, table, found):
    settings, result = found[path]
    config, tokens = load_config(path, settings), PromptTokens.of([1])
    (model,) = models_of(config)
    for rank, part in result.by_rank.items():
        stage, of_part = rank // result.world.ranks_of_stage, part["host"]["peak_by_part"]
        batch = plan_batch(config, tokens, 1)
        planned = memory_of_stage(model, stage, config, batch, tokens, result.world.ranks).on_cpu
        assert of_part["optimizer"] + of_part["gradients"] == pytest.approx(planned, rel=0.02)
        assert part["host"]["peak_bytes"] < 1.02 * planned
    assert as_text(result).count("GiB at most in large tensors") == len(result.by_rank)


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_rank_has_no_more_to_write_of_a_checkpoint_than_planned_and_gathers_nothing_for_it(path, found):
    settings, result = found[path]
    config, tokens = load_config(path, settings), PromptTokens.of([1])
    (model,) = models_of(config)
    for rank, part in result.by_rank.items():
        stage, batch = rank // result.world.ranks_of_stage, plan_batch(config, tokens, 1)
        planned = memory_of_stage(model, stage, config, batch, tokens, result.world.ranks).checkpoint
        assert part["checkpoint_bytes"] == pytest.approx(planned, rel=0.03), rank
        assert "checkpoint" not in part["phases"], "tensors are made on the device for it"


@pytest.fixture(scope="module")
def text():
    """The table in docs/cluster.md, its head too."""
    found = (ROOT / "docs" / "cluster.md").read_text().partition("<!-- results: rehearse_configs.txt -->")[2]
    return found.partition("```\n\n")[0]


@pytest.fixture(scope="module")
def rows(table, text):
    """The figures of each config."""
    names = {path.stem for path in LARGE}
    lines = [line.split() for line in text.splitlines()]
    return {name: dict(zip(table.COLUMNS, words, strict=True)) for name, *words in filter(None, lines) if name in names}


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_the_table_says_what_a_rehearsal_says(path, table, text, rows, found):
    row, (_, result) = rows[path.stem], found[path]
    expected = {"ranks": result.world.ranks, "planned": table.planned_gib(path, [], result)}
    # Each version of Megatron-Core launches its own number of kernels.
    if path.stem in COMPARED and f"megatron-core {version('megatron-core')}\n" in text:
        expected |= table.most([table.figures(part, result.world) for part in result.by_rank.values()])
    for name, value in expected.items():
        assert row[name] == format(value, table.COLUMNS[name]).strip(), name
    assert float(row["GiB"]) <= 1.05 * float(row["planned"]), "the plan is one of the longest replies"
    assert int(row["own"]) <= 3, "waits of our own lines in an update"
