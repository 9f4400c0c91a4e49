"""The layouts' theorems with the oldest Megatron-Core, which needs a Python of its own: `make oldest` installs it."""

import sys

import pytest

from tests import matrix

OLDEST = "0.16"
THEOREMS = "tests/megatron/test_theorems.py"
QUICK = ("pp2_vpp2", "tp2_ep2")
"""Lines of the theorems' grid: its schedule; its tensor ranks, experts and distributed optimizer."""
RUNS = {
    "quick": ([f"{THEOREMS}::test_update_is_that_of_one_process[{line}]" for line in QUICK], len(QUICK)),
    "all": ([THEOREMS], 30),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quick", pytest.param("all", marks=pytest.mark.thorough)])
def test_layouts_do_not_change_results_with_the_oldest_versions(name):
    if sys.version_info[:2] == (3, 11):
        pytest.skip("these are the oldest versions")
    if not matrix.is_installed(OLDEST):
        pytest.skip(f"needs Megatron-Core {OLDEST} in {matrix.FOLDER}: make oldest")
    tests, least = RUNS[name]
    found = matrix.run(OLDEST, tests, workers=0)
    assert found.passed >= least and not found.failed, found.text
