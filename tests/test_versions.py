"""README's table of versions is of tests/versions.json, whose versions are those of constraints.txt and setup.py."""

import json
import re
import sys
from datetime import date
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests import matrix

ROOT = Path(__file__).parents[1]
PAIRS = list(matrix.PAIRS)
RECORDS = json.loads(matrix.RECORDS.read_text())
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="holds"/>
<testcase classname="tests.a" name="cannot"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="fails"><failure message="1 != 2">where</failure></testcase>
<testcase classname="tests.b" name="breaks"><error message="no file">where</error></testcase>
</testsuite></testsuites>"""


def pinned(python: str) -> dict[str, str]:
    """Return the versions that constraints.txt has by package, for a version of Python."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    wanted = [Requirement(line) for line in lines]
    here = [it for it in wanted if it.marker is None or it.marker.evaluate({"python_version": python})]
    return {it.name: str(it.specifier).removeprefix("==") for it in here}


def expected(name: str) -> dict[str, str]:
    pair = matrix.PAIRS[name]
    found = pinned(pair.python) | dict(package.split("==") for package in pair.packages)
    return {"python": pair.python} | {package: found[package] for package in matrix.SHOWN if package != "sglang"}


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("package", ["torch", "aiohttp", "httptools", "orjson", "uvloop"])
def test_a_package_that_reads_what_the_network_sends_has_one_version(package, python):
    assert re.fullmatch(r"[0-9.]+", pinned(python)[package])


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_of_the_versions_that_constraints_and_matrix_name(name):
    record = RECORDS[name]
    assert expected(name).items() <= record.items()
    assert all(part == "make test-all" or (ROOT / part).exists() for part in record["ran"])
    assert record["passed"] >= 30 and date.fromisoformat(record["date"]) <= date.today()
    assert re.fullmatch("[0-9a-f]{7,}", record["commit"])


def test_the_table_is_that_of_the_records_and_the_default_ran_as_a_whole():
    assert matrix.TABLE.search(matrix.README.read_text())[0] == matrix.table(RECORDS), "python tests/matrix.py"
    assert list(RECORDS) == [name for name in PAIRS if name in RECORDS]
    default = RECORDS[PAIRS[0]]
    assert default["ran"] == ["make test-all"]
    assert f"\nsglang=={default['sglang']};" in (ROOT / "requirements" / "sglang-cpu.txt").read_text()


def test_oldest_versions_that_setup_allows_are_tried_and_none_that_it_does_not():
    declared = map(Requirement, re.findall(r'^    "([^"]+)",', (ROOT / "setup.py").read_text(), re.MULTILINE))
    allowed = {it.name: it.specifier for it in declared if it.name in matrix.SHOWN}
    assert len(allowed) == 3
    for package, specifier in allowed.items():
        tried = [Version(expected(name)[package]) for name in PAIRS]
        (oldest,) = (Version(it.version) for it in specifier if it.operator == ">=")
        assert min(tried).release[:2] == oldest.release[:2] and all(version in specifier for version in tried)


def test_a_run_is_recorded_with_its_failures_and_the_other_rows_stay(tmp_path, monkeypatch):
    for name in ("README", "RECORDS"):
        copied = tmp_path / name
        copied.write_bytes(getattr(matrix, name).read_bytes())
        monkeypatch.setattr(matrix, name, copied)
    monkeypatch.setattr(matrix, "environment", lambda name: Path(sys.executable))
    matrix.record("0.18", ["tests/unit"], matrix.Outcome(1234, 5, "what failed"))
    written = json.loads(matrix.RECORDS.read_text())
    new = written["0.18"]
    assert (new["ran"], new["passed"], new["failed"]) == (["tests/unit"], 1234, 5)
    assert [written[name] for name in written if name != "0.18"] == [
        RECORDS[name] for name in RECORDS if name != "0.18"
    ]
    lines, before = (text.splitlines() for text in (matrix.README.read_text(), (ROOT / "README.md").read_text()))
    (row,) = [line for line in lines if line not in before]
    assert row.endswith("| unit | 1,234 | 5 |") and len(lines) == len(before)


def test_an_outcome_counts_what_passed_and_says_what_failed(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = matrix.outcome([tmp_path / "report.xml"])
    assert (found.passed, found.failed) == (1, 2)
    assert found.text == "tests.b::fails: 1 != 2\ntests.b::breaks: no file"


def test_this_environment_has_the_name_of_a_pair_and_its_versions():
    name = matrix.of_this_environment()
    assert expected(name).items() <= matrix.versions(Path(sys.executable)).items()
