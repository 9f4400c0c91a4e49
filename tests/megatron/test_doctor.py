"""The doctor names planted faults, and says nothing of sound models."""

import re

import pytest

from tests.kit.doctors_faults import FAULTS, HEALTHY, PAGE, TABLE, all_found, all_healthy, table
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
