"""The recorded cases in tests/reports still have their values."""

import re

import pytest

from megatron_rl.replay.replay_file import model_of, unpack
from tests.kit.records import CASES, take_again
from tests.kit.runs import ROOT

REPORTS = ROOT / "tests" / "reports"
FILES = sorted(REPORTS.glob("*.tar.*"))


def test_every_case_is_small_and_described():
    named = re.findall(r"^\| `(\S+)` \|", (REPORTS / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == [path.name for path in FILES] and len(FILES) <= 40
    assert CASES.keys() <= {path.name.partition(".")[0] for path in FILES}
    assert all(path.stat().st_size < 200_000 for path in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_recorded_case_has_its_values(file, tmp_path):
    run = unpack(file, tmp_path / "run")
    lines, difference = take_again(run, 1, *model_of(run, []), to=tmp_path / "replay", tolerance=1e-6)
    assert difference == "", "\n".join(lines)
