"""The README's tables say what the tests that ran have proved; this one runs after all of them."""

import pytest

from tests.proofs import PROOFS, README, Proofs, family_name, layout_name, section


@pytest.mark.parametrize("table", ["layouts", "families"])
def test_readme_shows_what_the_tests_prove(table, pytestconfig):
    proofs = pytestconfig.stash[PROOFS]
    if proofs.left_out:
        pytest.skip(f"not all proving tests were asked for: {sorted(path.name for path in proofs.left_out)}")
    text, proven = README.read_text(encoding="utf-8"), proofs.tables()[table]
    (start,) = section(table).findall(text)
    if pytestconfig.getoption("--write-readme-tables"):
        text = section(table).sub(lambda match: match[1] + proven, text)
        README.write_text(text, encoding="utf-8")
    shown = section(table).search(text)[0].removeprefix(start)
    assert shown == proven, "run `make readme-tables`, and look at what is missing from its result"


def test_cell_is_proven_where_all_tests_that_claim_it_passed():
    proofs = Proofs()
    proofs.claims = {
        "a": {("layouts", "tp2", "policy"), ("layouts", "tp2", "checkpoint")},
        "b": {("layouts", "1", "policy"), ("layouts", "tp2", "checkpoint")},
        "c": {("families", "llama", "1"), ("families", "llama", "pp2_vpp2")},
        "d": {("families", "llama_tied", "1")},
    }
    proofs.passed = {"a", "c", "d"}
    assert proofs.tables()["layouts"].splitlines()[2:] == ["| 1 process |  |  |", "| TP2 | yes |  |"]
    assert proofs.tables()["families"].splitlines()[2:] == ["| Llama | 1 process, PP2 x VPP2 |"]
    proofs.passed = {"a", "b", "c"}  # of two variants one fails in one layout
    assert proofs.tables()["layouts"].splitlines()[2:] == ["| 1 process | yes |  |", "| TP2 | yes | yes |"]
    assert proofs.tables()["families"].splitlines()[2:] == ["| Llama | PP2 x VPP2 |"]


def test_names_in_the_tables():
    assert layout_name("tp2_pp2_dp2_sp") == "TP2 x PP2 x DP2 + SP"
    assert layout_name("dp2_distributed_overlap") == "DP2 + distributed optimizer + overlap"
    assert family_name("qwen3_tied_one_kv_head") == "Qwen3" and family_name("llama3_rope") == "Llama"
