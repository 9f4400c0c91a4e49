"""The tables of docs/correctness.md, made of the tests that passed.

A test says what it proves with `@pytest.mark.proves(table, row, column)`, where "{name}" stands for its parameter of
that name (of a list, for each entry). A cell is proven where all tests of the session that claim it passed. The page is
compared once all of them have run, in however many processes, as in `make test-all`; `make readme-tables` rewrites it.

`make test` leaves tests out that claim cells (`-m 'not thorough'`), and so the comparison: what was not tried has not
been disproved. A cell whose test ran and failed is found there by that test itself.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "correctness.md"
Cell = tuple[str, str, str]
"""(table, row, column)."""

FAMILIES = {
    "deepseek_v3": "DeepSeek-V3",
    "gemma3": "Gemma 3",
    "glm4_moe": "GLM-4.5",
    "gpt_oss": "GPT-OSS",
    "llama": "Llama",
    "minimax_m2": "MiniMax-M2",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo": "OLMo 2 and 3",
    "phi3": "Phi-3 and Phi-4",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "linear_rope": "Llama",
    "yarn_rope": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "seed_oss": "Seed-OSS",
}
"""The page's name of each model family, by how its name in tiny.FAMILIES begins (the longest counts)."""


class Proofs:
    """What the session's tests claim and which of them passed, both from their reports: workers send those."""

    def __init__(self) -> None:
        self.claims: dict[str, set[Cell]] = {}
        """By the test's node id."""
        self.passed: set[str] = set()

    def tables(self) -> dict[str, str]:
        """The proven cells as Markdown, by the name of their table."""
        claimed: set[Cell] = set().union(*self.claims.values())
        unproven: set[Cell] = set().union(*(cells for test, cells in self.claims.items() if test not in self.passed))
        return {name: _table(name, claimed, unproven) for name in sorted({table for table, _, _ in claimed})}

    # -- pytest's hooks -----------------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if cells := sorted(_cells(item)):
                item.user_properties.append(("proves", cells))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cells = {tuple(cell) for name, claimed in report.user_properties if name == "proves" for cell in claimed}
        if cells:
            self.claims[report.nodeid] = cells
            if report.when == "call" and report.passed:
                self.passed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        """Compare the page once every test has reported; the result counts as a test of its own."""
        result = yield
        config = session.config
        if not (hasattr(config, "workerinput") or config.option.collectonly or _left_out(config)):
            start = time.perf_counter()
            for name, proven in self.tables().items():
                wrong = _compare(name, proven, write=config.getoption("--write-readme-tables"))
                config.hook.pytest_runtest_logreport(report=_report(f"docs/correctness.md::{name}", wrong, start))
        return result


def _left_out(config: pytest.Config) -> bool:
    """Return whether tests that prove something were not asked for."""
    if config.option.markexpr or config.option.keyword:
        return True
    # A folder or a whole file may be asked for; a test's own name leaves others of its file out.
    asked = [Path(config.invocation_params.dir, argument).resolve() for argument in config.args]
    proving = (path for path in (ROOT / "tests").rglob("test_*.py") if "mark.proves(" in path.read_text())
    return not all(any(path.is_relative_to(folder) for folder in asked) for path in proving)


def _compare(name: str, proven: str, *, write: bool) -> str:
    """Return what is wrong with the page's table, '' where nothing is, after writing it if that was asked for."""
    text = PAGE.read_text(encoding="utf-8")
    if write:
        text = section(name).sub(lambda match: match[1] + proven, text)
        PAGE.write_text(text, encoding="utf-8")
    match = section(name).search(text)
    if match is None:
        return f"docs/correctness.md has no table {name!r}"
    shown = match[0].removeprefix(match[1])
    if shown == proven:
        return ""
    difference = "\n".join(difflib.ndiff(shown.splitlines(), proven.splitlines()))
    return f"docs/correctness.md's {name!r} (-) are not what the tests proved (+); `make readme-tables`:\n{difference}"


def _report(nodeid: str, wrong: str, start: float) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=nodeid,
        location=("docs/correctness.md", None, nodeid),
        keywords={},
        outcome="failed" if wrong else "passed",
        longrepr=wrong or None,
        when="call",
        duration=time.perf_counter() - start,
    )


def _cells(item: pytest.Item) -> Iterator[Cell]:
    for marker in item.iter_markers("proves"):
        table, *names = marker.args
        rows, columns = (_values(name, item) for name in names)
        yield from ((table, row, column) for row in rows for column in columns)


def _values(name: str, item: pytest.Item) -> list[str]:
    if not name.startswith("{"):
        return [name]
    value = item.callspec.params[name.strip("{}")]
    return value if isinstance(value, list) else [value]


def _table(name: str, claimed: set[Cell], unproven: set[Cell]) -> str:
    cells = [(row, column, (table, row, column) not in unproven) for table, row, column in claimed if table == name]
    return _families(cells) if name == "families" else _layouts(cells)


def _layouts(cells: list[tuple[str, str, bool]]) -> str:
    """Layouts that are proven alike share a line."""
    columns = [
        c
        for c in ("policy", "SFT", "critic", "trees", "HF round trip", "checkpoint")
        if c in {cell[1] for cell in cells}
    ]
    proven: dict[str, list[str]] = {row: [] for row in _by_axes({row for row, _, _ in cells})}
    for row, column, holds in cells:
        if holds:
            proven[row].append(column)
    lines = [f"| layout | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    for rows, found in _alike(proven):
        marks = ["yes" if column in found else "" for column in columns]
        lines.append(f"| {', '.join(dict.fromkeys(map(layout_name, rows)))} | {' | '.join(marks)} |")
    return "\n".join(lines)


def _families(cells: list[tuple[str, str, bool]]) -> str:
    """The layouts where all variants of a family hold; families with the same ones share a line."""
    proven: dict[str, list[str]] = {family: [] for family in sorted({family_name(row) for row, _, _ in cells})}
    failed = {(family_name(row), column) for row, column, holds in cells if not holds}
    for family, column in {(family_name(row), column) for row, column, _ in cells} - failed:
        proven[family].append(column)
    lines = ["| family | logits equal to transformers', weights to the byte |", "|---|---|"]
    for families, layouts in _alike(proven):
        lines.append(f"| {', '.join(families)} | {', '.join(map(layout_name, _by_axes(layouts)))} |")
    return "\n".join(lines)


def _alike(proven: dict[str, list[str]]) -> list[tuple[list[str], frozenset[str]]]:
    groups: dict[frozenset[str], list[str]] = {}
    for key, values in proven.items():
        groups.setdefault(frozenset(values), []).append(key)
    return [(keys, values) for values, keys in groups.items()]


def _by_axes(layouts: Iterable[str]) -> list[str]:
    return sorted(layouts, key=lambda layout: (layout.count("_"), layout))


def family_name(variant: str) -> str:
    fitting = [start for start in FAMILIES if variant.startswith(start)]
    assert fitting, f"{variant}: say in FAMILIES what the page calls this family"
    return FAMILIES[max(fitting, key=len)]


def layout_name(layout: str) -> str:
    """`tp2_pp2_dp2_sp` -> TP2 x PP2 x DP2 + SP."""
    if layout == "1":
        return "1 process"
    words = {"sp": " + SP", "distributed": " + distributed optimizer", "overlap": " + overlap"}
    parts = layout.split("_")
    axes = [part.upper() for part in parts if part not in words]
    return " x ".join(axes) + "".join(words[part] for part in parts if part in words)


def section(name: str) -> re.Pattern[str]:
    return re.compile(f"(<!-- proven: {name} -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-readme-tables", action="store_true", help="write docs/correctness.md")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Proofs())
