"""Configs of clusters are rehearsed on their whole layout, with one layer of each kind: the depth repeats.

`make test` keeps one of each kind of model and trainer. Two with all their layers have the figures in the table of
docs/cluster.md; all of them at full depth would take ten minutes.
"""

from __future__ import annotations

import functools
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
from tests.kit.examples import IS_THOROUGH
from tests.kit.rehearsals import few_layers, order_of

ROOT = Path(__file__).resolve().parents[3]
LARGE = [
    path for path in sorted((ROOT / "configs").glob("*.yaml")) if re.search(r"qwen3|llama3|deepseek|glm", path.name)
]
KINDS = {
    "math_llama3_70b_8nodes": "dense layers, in stages",
    "math_qwen3_30b_a3b_1node": "mixtures, the optimizer on the CPU",
}
"""The configs that `make test` rehearses. It rehearses adapters, and a mixture's optimizer on the device, by
test_plan_rehearsed.py."""
CONFIGS = [pytest.param(path, id=path.stem, marks=() if path.stem in KINDS else pytest.mark.thorough) for path in LARGE]
WITH_ALL_LAYERS = ("gsm8k_qwen3_4b", "math_llama3_70b_8nodes")
"""One stage, and several."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table():
    """The benchmark that writes the table."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("rehearse_configs")


@pytest.fixture(scope="module")
def rehearsed(table, rehearsals, tmp_path_factory):
    """Rehearse a config's first and last rank, once; return its settings and what they found.

    Of a config without stages `make test` rehearses the first rank, which publishes.
    """
    folder = tmp_path_factory.mktemp("configs")

    @functools.cache
    def rehearse(path, all_layers=False):
        name = f"{path.stem}-{'all' if all_layers else 'few'}"
        if all_layers:
            words = [f"model.path={with_models(load_config(path), table.MODELS).model.path}"]
        else:
            words = few_layers(path, folder / f"model-{name}")
        world = table_world(table, path)
        ranks = world.chosen(table.ranks_of(world)) if IS_THOROUGH or world.stages > 1 else [0]
        orders = [order_of(path, world.ranks, words, rank=rank) for rank in ranks]
        return words, Rehearsal(None, world, DEVICES["h100"], rehearsals.of(folder / name, orders))

    return rehearse


def table_world(table, path):
    return world_of(load_config(path), nodes=table.nodes_of(path), gpus_per_node=8)


@pytest.mark.parametrize("path", CONFIGS)
def test_a_config_of_a_cluster_runs_without_a_fault_and_waits_for_nothing_in_a_microbatch(path, rehearsed):
    _, result = rehearsed(path)
    assert all(isinstance(part, dict) for part in result.by_rank.values()), result.by_rank
    check(result)
    for rank, part in result.by_rank.items():
        syncs = part["phases"]["update"]["syncs"]
        own = {what: count for what, count in syncs.items() if " at megatron_rl/" in what}
        assert sum(own.values()) <= 3 and all(count == 1 for count in own.values()), (rank, own)
        assert part["unordered"] == {}, rank


@pytest.mark.parametrize(
    "path", [config for config in CONFIGS if "optimizer_cpu_offload" in config.values[0].read_text()]
)
def test_an_optimizer_on_the_cpu_has_the_planned_host_memory(path, rehearsed):
    settings, result = rehearsed(path)
    config, tokens = load_config(path, settings), PromptTokens.of([1])
    (model,) = models_of(config)
    for rank, part in result.by_rank.items():
        stage, of_part = rank // result.world.ranks_of_stage, part["host"]["peak_by_part"]
        batch = plan_batch(config, tokens, 1)
        planned = memory_of_stage(model, stage, config, batch, tokens, result.world.ranks).on_cpu
        assert of_part["optimizer"] + of_part["gradients"] == pytest.approx(planned, rel=0.02)
        assert part["host"]["peak_bytes"] < 1.02 * planned
    assert as_text(result).count("GiB at most in large tensors") == len(result.by_rank)


@pytest.mark.parametrize("path", CONFIGS)
def test_a_rank_has_no_more_to_write_of_a_checkpoint_than_planned_and_gathers_nothing_for_it(path, rehearsed):
    settings, result = rehearsed(path)
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
def test_the_table_says_what_a_plan_says(path, table, rows):
    row, world = rows[path.stem], table_world(table, path)
    planned = table.planned_gib(path, [], Rehearsal(None, world, DEVICES["h100"]))
    for name, value in {"ranks": world.ranks, "planned": planned}.items():
        assert row[name] == format(value, table.COLUMNS[name]).strip(), name
    assert float(row["GiB"]) <= 1.05 * float(row["planned"]), "the plan is one of the longest replies"
    assert int(row["own"]) <= 3, "waits of our own lines in an update"


@pytest.mark.thorough
@pytest.mark.parametrize("name", WITH_ALL_LAYERS)
def test_the_table_says_what_a_rehearsal_says(name, table, text, rows, rehearsed):
    if f"megatron-core {version('megatron-core')}\n" not in text:
        pytest.skip("each version of Megatron-Core launches its own number of kernels")
    _, result = rehearsed(ROOT / "configs" / f"{name}.yaml", all_layers=True)
    assert all(isinstance(part, dict) for part in result.by_rank.values()), result.by_rank
    check(result)
    for column, value in table.most(
        [table.figures(part, result.world, result.device) for part in result.by_rank.values()]
    ).items():
        assert rows[name][column] == format(value, table.COLUMNS[column]).strip(), column
