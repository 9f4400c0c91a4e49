"""Every config of a cluster is rehearsed on its whole layout with few layers, and all layers follow from those.

Seven of nine have one layer of each kind on a stage, and two have two and three: kernels, syncs, copies and bytes are
linear in them. So two such rehearsals give the figures in the table of docs/cluster.md.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.tools.plan.devices import DEVICES
from megatron_rl.tools.plan.memory import memory_of_stage, models_of
from megatron_rl.tools.plan.step_sizes import PromptTokens, plan_batch
from megatron_rl.tools.rehearsal.rehearsal import Rehearsal, check, world_of
from tests.unit.tools.rehearse_cases import NEEDS_SHIM, order_of, rehearsed

ROOT = Path(__file__).resolve().parents[3]
LARGE = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if re.search(r"qwen3|llama3|deepseek", path.name)]
COMPARED = ("gsm8k_qwen3_4b", "math_llama3_70b_8nodes")
"""One stage, and several: two depths of all nine would take minutes."""
CHEAPEST = "gsm8k_qwen3_4b"

pytestmark = [*NEEDS_SHIM, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def table():
    """The benchmark that writes the table."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("rehearse_configs")


@pytest.fixture(scope="module")
def found(table, tmp_path_factory):
    """By config and depth: its settings, and the rehearsal of its first and last rank."""
    folder = tmp_path_factory.mktemp("few_layers")
    cases, settings, worlds = {}, {}, {}
    for path in LARGE:
        few = table.FewLayers(path)
        world = worlds[path] = world_of(few.config, nodes=table.nodes_of(path), gpus_per_node=8)
        for depth in depths_of(path, table):
            case = f"{path.stem}-{depth}"
            settings[path, depth] = few.settings(depth, folder / f"model-{case}")
            ranks = world.chosen(table.ranks_of(world))
            orders = [order_of(path, world.ranks, settings[path, depth], rank=rank) for rank in ranks]
            cases[case] = {"faults": [], "orders": orders}
    results = rehearsed(folder, cases)
    return {
        (path, depth): (words, Rehearsal(None, worlds[path], DEVICES["h100"], results[f"{path.stem}-{depth}"]))
        for (path, depth), words in settings.items()
    }


def depths_of(path, table):
    if path.stem not in COMPARED:
        return (1,)
    return (*table.DEPTHS, 4) if path.stem == CHEAPEST else table.DEPTHS


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_config_of_a_cluster_runs_without_a_fault_and_waits_for_nothing_in_a_microbatch(path, table, found):
    for depth in depths_of(path, table):
        _, result = found[path, depth]
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
    settings, result = found[path, 1]
    config, tokens = load_config(path, settings), PromptTokens.of([1])
    (model,) = models_of(config)
    for rank, part in result.by_rank.items():
        stage, of_part = rank // result.world.ranks_of_stage, part["host"]["peak_by_part"]
        batch = plan_batch(config, tokens, 1)
        planned = memory_of_stage(model, stage, config, batch, tokens, result.world.ranks).on_cpu
        assert of_part["optimizer"] + of_part["gradients"] == pytest.approx(planned, rel=0.02)
        assert part["host"]["peak_bytes"] < 1.02 * planned


def test_what_follows_from_few_layers_is_what_more_layers_take(table, found):
    (path,) = [path for path in LARGE if path.stem == CHEAPEST]
    few, (_, four) = table.FewLayers(path), found[path, 4]
    few.depths = [4]
    expected = table.most([table.figures(part, four.world) for part in four.by_rank.values()])
    for name, value in few.figures({depth: found[path, depth][1] for depth in table.DEPTHS}).items():
        assert value == pytest.approx(expected[name], rel=0.01), name


@pytest.fixture(scope="module")
def rows(table):
    """The table in docs/cluster.md: the figures of each config."""
    text = (ROOT / "docs" / "cluster.md").read_text().partition("<!-- results: rehearse_configs.txt -->")[2]
    lines = [line.split() for line in text.partition("```\n\n")[0].splitlines()]
    names = {path.stem for path in LARGE}
    return {
        name: dict(zip(table.COLUMNS, (float(word.replace(",", "")) for word in words), strict=True))
        for name, *words in filter(None, lines)
        if name in names
    }


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_the_table_says_what_a_rehearsal_says(path, table, rows, found):
    row, (_, result) = rows[path.stem], found[path, depths_of(path, table)[0]]
    expected = {"ranks": result.world.ranks, "planned": table.planned_gib(path, [], result)}
    if path.stem in COMPARED:
        few = table.FewLayers(path)
        expected |= few.figures({depth: found[path, depth][1] for depth in table.DEPTHS})
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=0.02, abs=0.06), name
    assert row["GiB"] <= 1.05 * row["planned"], "the plan is one of the longest replies"
    assert row["own"] <= 3, "waits of our own lines in an update"
