"""The doctor names faults of real SGLang from its replies alone, and says nothing of a sound server."""

from __future__ import annotations

import re

import pytest

from tests.kit.doctors_faults import PAGE, table
from tests.kit.ranks import run_ranks
from tests.kit.sglang_faults import SERVED, TABLE, all_found, planted, words_of
from tests.kit.waiting import LATE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,  # tests/unit/tools/test_doctor_elimination.py has the errors; seven servers take minutes
    pytest.mark.usefixtures("needs_sglang"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory, needs_sglang):
    told = {}
    for place in range(len(SERVED)):
        told |= run_ranks(1, all_found, tmp_path_factory.mktemp("sglang"), place, timeout_s=LATE_S)[0]
    return told


@pytest.mark.parametrize("name", planted())
def test_a_fault_of_real_sglang_is_named_from_its_replies(found, name):
    words = words_of(name)
    if not words:
        assert found[name] == []
    else:
        assert len(found[name]) == 1 and all(word in found[name][0] for word in words), found[name]


def test_the_page_has_what_the_doctor_says_of_sglang(found):
    """`python -m tests.kit.sglang_faults` writes the table. Numbers may differ between machines."""
    written = TABLE.search(PAGE.read_text(encoding="utf-8"))[2]
    faults = {name: said for name, said in found.items() if words_of(name)}
    assert re.sub(r"[\d.]+", "N", written) == re.sub(r"[\d.]+", "N", table(faults))
