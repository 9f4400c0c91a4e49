"""Every family's largest published model is planned on its nodes; the two whose rehearsals are longest are rehearsed.

The bounds are of memory, which the kit asserts, and of work: seconds depend on the machine.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from megatron_rl.tools.rehearsal.rehearsal import Rehearsal, check, world_of
from megatron_rl.weights.families import FAMILIES
from tests.kit.rehearsals import HAS_FLA, order_of, write_shape

ROOT = Path(__file__).resolve().parents[3]
LONGEST = ("qwen3_5", "qwen3_next")
MOST_KERNELS = 400_000
"""Bound of the kernels that both ranks launch in a step. A rehearsal takes about a second for a thousand of them."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def largest():
    """The benchmark that writes the table."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("rehearse_largest")


def test_every_familys_largest_model_fits_its_nodes(largest):
    assert largest.CASES.keys() == FAMILIES.keys()
    for family, case in largest.CASES.items():
        plan = case.plan
        assert plan.models[0].arch.family == family and plan.fits, (family, plan.trainer.parts, plan.server)
        world = world_of(case.config, nodes=case.nodes, gpus_per_node=largest.GPUS_PER_NODE)
        assert world.ranks == plan.trainer_gpus, family


@pytest.fixture(scope="module")
def rows(largest):
    """The table in docs/cluster.md: by family its figures, as text. It has the families that were rehearsed so far."""
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    text = page.partition("<!-- results: rehearse_largest.txt -->")[2].partition("```\n\n")[0]
    found = {words[0]: words[1:] for line in text.splitlines() if (words := line.split()) and words[0] in FAMILIES}
    assert found.keys() >= set(LONGEST)
    return {family: dict(zip(largest.NAMES, words, strict=True)) for family, words in found.items()}


def test_the_table_says_that_each_is_rehearsed_within_five_minutes_and_four_gibibytes(rows):
    for family, row in rows.items():
        assert float(row["cpu s"]) <= 300 and float(row["host GiB"]) <= 4, family
        assert float(row["GPU GiB"]) <= 1.05 * float(row["planned"]), family


@pytest.mark.thorough
def test_a_model_of_many_small_tensors_leaves_the_device_without_host_memory(largest, rehearsals, tmp_path):
    """The model has four layers, of which a rank has 2.4 GB of states in tensors of 4 MB."""
    case = largest.CASES["qwen3_next"]
    model = write_shape(tmp_path / "model", case.model, num_hidden_layers=4)
    turns = ["rollout.colocated=true", "rollout.publication=ipc", "rollout.max_staleness=0", "model.delta_kernel=fla"]
    words = [model, *turns, "parallel.tensor=2", "parallel.pipeline=1", "parallel.expert=32"]
    (found,) = rehearsals.of(tmp_path / "found", [order_of(largest.CONFIG, 32, words, rank=0)]).values()
    assert isinstance(found, dict) and found["phases"]["offload"]["kernels"] > 0, found


@pytest.mark.thorough
@pytest.mark.parametrize("family", LONGEST)
@pytest.mark.skipif(not HAS_FLA, reason="the package fla is not installed")
def test_the_longest_rehearsals_are_within_bounds_and_as_the_table_says(family, largest, rows, rehearsals, tmp_path):
    case = largest.CASES[family]
    world = world_of(case.config, nodes=case.nodes, gpus_per_node=largest.GPUS_PER_NODE)
    orders = [order_of(largest.CONFIG, world.ranks, case.overrides, rank=rank) for rank in world.chosen("first")]
    found = rehearsals.of(tmp_path / "found", orders)
    assert all(isinstance(part, dict) for part in found.values()), found
    check(Rehearsal(case.config, world, case.plan.cluster.device, found))
    kernels = sum(phase["kernels"] for rank in found.values() for phase in rank["phases"].values())
    assert kernels <= MOST_KERNELS
    assert kernels == pytest.approx(int(re.sub(",", "", rows[family]["kernels"])), rel=0.02)
