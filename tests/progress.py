"""A line that says how far a run of many tests has come and how long it will take, in place of a dot for each test.

`--progress` turns it on; `make` passes it. The time left follows from what each file took the last time, here or on the
machine where tests/seconds.json was written, and from the speed of this run so far. Failures are named at once, and the
files that took longest at the end, before pytest's own summary.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kit.waiting import SLOWNESS, measured_slowness

KEPT = Path(__file__).with_name("seconds.json")
MEASURED = Path(__file__).parents[1] / "build" / "seconds.json"
SETS = {"not thorough": ["test"], "thorough": ["thorough"]}
"""Which of the measured sets of tests a -m selects; without one, both."""
EVERY_S = 30.0
UNKNOWN_S = 1.0
"""For a file that was never measured."""
SLOWEST = 10


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Progress:
    """Counts reports; under xdist those of all workers, in the process that starts them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.begun, self.said = config, time.monotonic(), time.monotonic()
        path = MEASURED if MEASURED.exists() else KEPT
        self.seconds: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
        """By set and file."""
        self.expected: dict[str, float] = {}
        """Seconds of each test of a file."""
        self.took: Counter[tuple[str, str]] = Counter()
        self.count = self.done = self.failed = 0
        self.whole_s = self.done_s = 0.0

    def begin(self, nodeids: list[str]) -> None:
        sets = SETS.get(self.config.option.markexpr, ["test", "thorough"])
        for path, count in Counter(map(file_of, nodeids)).items():
            known = [seconds[path] for seconds in map(self.seconds.get, sets) if seconds and path in seconds]
            self.expected[path] = (sum(known) if known else UNKNOWN_S) / count
            self.whole_s += self.expected[path] * count
        self.count = len(nodeids)

    def line(self) -> str:
        share, elapsed_s = self.done_s / self.whole_s, time.monotonic() - self.begun
        is_known = share > 0.03 and self.done < self.count
        left = f", about {max(1, round(elapsed_s * (1 / share - 1) / 60))} min left" if is_known else ""
        wrong = f", {self.failed} failed" if self.failed else ""
        return f"{share:4.0%}  {self.done:,} of {self.count:,} tests{wrong}, {elapsed_s / 60:.1f} min{left}"

    # -- pytest's hooks -----------------------------------------------------------------------------------------------

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if not self.count:  # all workers collect the same
            self.begin(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.skipped and not hasattr(report, "wasxfail"):
            return "skipped", "", "SKIPPED"
        if report.when == "call" and not hasattr(report, "wasxfail"):
            return report.outcome, "", report.outcome.upper()
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = "thorough" if "thorough" in report.keywords else "test"
        self.took[name, file_of(report.nodeid)] += report.duration
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed:
            self.failed += 1
            terminal.write_line(f"FAILED {report.nodeid}" + (f" ({report.when})" if report.when != "call" else ""))
        if report.when != "teardown":
            return
        self.done, self.done_s = self.done + 1, self.done_s + self.expected.get(file_of(report.nodeid), 0.0)
        if time.monotonic() - self.said > EVERY_S or self.done == self.count:
            self.said = time.monotonic()
            terminal.write_line(self.line())

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files: Counter[str] = Counter()
        for (name, path), seconds in self.took.items():
            files[path] += seconds
            self.seconds.setdefault(name, {})[path] = round(seconds, 1)
        terminalreporter.section(f"slowest {SLOWEST} of {len(files)} files")
        for path, seconds in files.most_common(SLOWEST):
            terminalreporter.line(f"{seconds:8.1f} s  {path}")
        terminalreporter.line(f"{files.total():8.1f} s  all files, one after the other")
        terminalreporter.line(
            f"{SLOWNESS:8.2f}    times as slow as a quiet machine of 2026, by a loop of Python before the tests; "
            f"{measured_slowness():.2f} after them"
        )
        if self.config.option.markexpr not in (*SETS, ""):
            return  # a part of a set says nothing of its files
        MEASURED.parent.mkdir(exist_ok=True)
        MEASURED.write_text(json.dumps(self.seconds, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", action="store_true", help="a line every half minute in place of a dot for each test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--progress") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))
