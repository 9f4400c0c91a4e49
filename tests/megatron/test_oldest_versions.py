"""The layouts' theorems with the oldest Megatron-Core, which needs a Python of its own: `make oldest` installs it."""

import sys

import pytest

from tests import matrix

OLDEST = "0.16"
THEOREMS = "tests/megatron/test_theorems.py"


@pytest.mark.thorough
def test_layouts_do_not_change_results_with_the_oldest_versions():
    if sys.version_info[:2] == (3, 11):
        pytest.skip("these are the oldest versions")
    if not matrix.is_installed(OLDEST):
        pytest.skip(f"needs Megatron-Core {OLDEST} in {matrix.FOLDER}: make oldest")
    found = matrix.run(OLDEST, [THEOREMS], workers=0)
    assert found.passed >= 30 and not found.failed, found.text
