"""The tables of docs/correctness.md are made of claims, with which tests/proofs.py compares them after all tests."""

import shutil
import subprocess
import sys

import pytest

from tests import proofs
from tests.proofs import Proofs, family_name, layout_name

CLAIMING = """
import pytest

@pytest.mark.proves("layouts", "{layout}", "policy")
@pytest.mark.parametrize("layout", ["1", pytest.param("tp2", marks=pytest.mark.thorough)])
def test_gradient(layout):
    assert layout in PROVEN
"""
SHOWN = "<!-- proven: layouts -->\n| layout | policy |\n|---|---|\n| 1 process, TP2 | yes |\n<!-- end -->\n"


@pytest.mark.thorough
def test_session_fails_where_the_page_shows_more_than_its_tests_proved(tmp_path):
    (tmp_path / "tests").mkdir()
    shutil.copy(proofs.__file__, tmp_path / "tests" / "proofs.py")
    page = tmp_path / "docs" / "correctness.md"
    page.parent.mkdir()
    page.write_text(SHOWN)

    def outcome(proven: str, *options: str) -> str:
        (tmp_path / "tests" / "test_claims.py").write_text(f"PROVEN = {proven!r}{CLAIMING}")
        command = [sys.executable, "-m", "pytest", "-p", "tests.proofs", *options, "tests"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    assert "3 passed" in outcome("1 tp2", "-n", "2")
    failed = outcome("1", "-n", "2")
    assert "2 failed, 1 passed" in failed and "FAILED docs/correctness.md::layouts" in failed
    assert "- | 1 process, TP2 | yes |" in failed and "+ | TP2 |  |" in failed
    for left_out in (("-k", "not tp2"), ("-m", "not thorough")):  # the second as `make test` does
        assert "1 passed, 1 deselected" in outcome("1", *left_out), "what was left out has not been disproved"
    assert "1 failed, 1 deselected" in outcome("tp2", "-m", "not thorough"), "what was not has its own failure"
    assert "1 failed, 2 passed" in outcome("1", "--write-readme-tables")
    assert "| 1 process | yes |\n| TP2 |  |\n<!-- end -->" in page.read_text()


def test_cell_is_proven_where_all_tests_that_claim_it_passed():
    made = Proofs()
    made.claims = {
        "a": {("layouts", "tp2", "policy"), ("layouts", "tp2", "checkpoint")},
        "b": {("layouts", "1", "policy"), ("layouts", "tp2", "checkpoint")},
        "c": {("families", "llama", "1"), ("families", "llama", "pp2_vpp2")},
        "d": {("families", "llama_tied", "1")},
    }
    made.passed = {"a", "c", "d"}
    assert made.tables()["layouts"].splitlines()[2:] == ["| 1 process |  |  |", "| TP2 | yes |  |"]
    assert made.tables()["families"].splitlines()[2:] == ["| Llama | 1 process, PP2 x VPP2 |"]
    made.passed = {"a", "b", "c"}  # of two variants one fails in one layout
    assert made.tables()["layouts"].splitlines()[2:] == ["| 1 process | yes |  |", "| TP2 | yes | yes |"]
    assert made.tables()["families"].splitlines()[2:] == ["| Llama | PP2 x VPP2 |"]


def test_names_in_the_tables():
    assert layout_name("tp2_pp2_dp2_sp") == "TP2 x PP2 x DP2 + SP"
    assert layout_name("dp2_distributed_overlap") == "DP2 + distributed optimizer + overlap"
    assert family_name("qwen3_tied_one_kv_head") == "Qwen3" and family_name("llama3_rope") == "Llama"
