"""The doctor names planted faults, and says nothing of sound models."""

import re

import pytest
import torch

from megatron_rl.tools.doctor import doctor
from tests.kit.doctors_faults import FAULTS, HEALTHY, IDS, PAGE, TABLE, all_found, all_healthy, table
from tests.kit.models import LAYOUTS, make_engine, make_model
from tests.kit.ranks import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(1, all_found, tmp_path_factory.mktemp("faults"))[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(found, name):
    assert len(found[name]) == 1 and all(word in found[name][0] for word in FAULTS[name].words), found[name]


def test_the_page_has_what_the_doctor_says(found):
    """`python -m tests.kit.doctors_faults` writes the table. Numbers may differ between machines."""
    written = TABLE.search(PAGE.read_text(encoding="utf-8"))[2]
    assert re.sub(r"[\d.]+", "N", written) == re.sub(r"[\d.]+", "N", table(found))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return run_ranks(1, all_healthy, tmp_path_factory.mktemp("healthy"))[0]


@pytest.mark.parametrize("family", HEALTHY)
def test_nothing_is_said_of_a_sound_model(healthy, family):
    assert healthy[family] == []


# -- in layouts --------------------------------------------------------------------------------------------------------


def in_layout(folder, layout, plant=None):
    """What the doctor says on each rank of the trainer in a layout. plant: gets the engine and its rank."""
    engine = make_engine(folder, LAYOUTS[layout][1])
    if plant is not None:
        plant(engine, engine.groups)
    return [str(finding) for finding in doctor.compare_layout(engine, folder, IDS)]


def other_activation(engine, groups):
    """On the second stage alone."""
    for layer in engine.chunks[-1].decoder.layers if groups.pipeline.rank == 1 else ():
        layer.mlp.config.activation_func = torch.nn.functional.gelu


def other_shard(engine, groups):
    """On the second tensor-parallel rank alone."""
    if groups.tensor.rank == 1:
        engine.chunks[0].decoder.layers[1].mlp.linear_fc2.weight.data[:, :4] = 0.0


def norms_of_one_rank(engine, groups):
    """The second tensor-parallel rank normalises its part of the sequence otherwise."""
    if groups.tensor.rank == 1:
        engine.chunks[0].decoder.layers[0].input_layernorm.eps = 1e-2


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "pp2", "dp2", pytest.param("tp2_pp2", marks=pytest.mark.thorough)])
def test_nothing_is_said_of_a_sound_trainer_in_a_layout(layout, tmp_path):
    make_model("qwen3", tmp_path, 2)
    assert run_ranks(LAYOUTS[layout][0], in_layout, tmp_path, layout)[0] == []


@pytest.mark.parametrize(
    ("layout", "plant", "words"),
    [
        ("pp2", other_activation, ("layer 1: feed-forward, position 0", "the activation is gelu, and should be silu")),
        ("tp2", other_shard, ("model.layers.1.mlp.down_proj.weight", "differs from the trainer's weights")),
        ("tp2_sp", norms_of_one_rank, ("layer 0: first norm, position 12",)),
    ],
    ids=["stage", "shard", "sequence"],
)
def test_a_fault_of_one_rank_is_named_in_its_layout(layout, plant, words, tmp_path):
    make_model("llama", tmp_path, 2)
    found = run_ranks(LAYOUTS[layout][0], in_layout, tmp_path, layout, plant)[0]
    assert len(found) == 1 and all(word in found[0] for word in ("trainer, ", *words)), found
