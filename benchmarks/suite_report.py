"""Rows of tables as they come, to stdout as markdown and to a file as JSON; and how much time a table has."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import frame  # noqa: F401  puts the repository's folder, which has tests.kit, on sys.path
import torch


class Budget:
    """Whether there is time for another row of one table."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self.now, self.begin, self.seconds = now, now(), seconds

    def is_spent(self) -> bool:
        return self.now() - self.begin >= self.seconds


@dataclass
class Report:
    """The JSON is written after every row, so that a run that is stopped has its rows."""

    path: Path
    facts: dict[str, Any]
    peers: bool = True
    """Are others measured too, or our own operators and their floors alone?"""
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)

    def table(self, name: str, legend: str, columns: Iterable[str]) -> None:
        self.columns = tuple(columns)
        self.current: dict[str, Any] = {"rows": [], "skipped": []}
        self.tables[name] = self.current
        print(f"\n### {name}\n\n{legend}\n\n| {' | '.join(self.columns)} |\n|{'---|' * len(self.columns)}", flush=True)

    def row(self, **values: Any) -> None:
        self.current["rows"].append(values)
        print(f"| {' | '.join(shown(values.get(name)) for name in self.columns)} |", flush=True)
        self.write()

    def wants(self, what: str) -> bool:
        return self.peers or what.startswith("ours")

    def skip(self, what: object) -> None:
        self.current["skipped"].append(str(what))

    def close(self, budget: Budget) -> None:
        self.current["seconds"] = budget.now() - budget.begin
        if self.current["skipped"]:
            print(f"\nSkipped, no time or no memory: {'; '.join(self.current['skipped'])}.", flush=True)
        self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps(self.facts | {"tables": self.tables}, indent=1) + "\n")


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.1e}" if value != 0 and abs(value) < 0.01 else f"{value:.{0 if abs(value) >= 100 else 2}f}"
    return str(value).replace("|", "/")


def each_case(report: Report, budget: Budget, cases: Iterable[Any], measure: Callable[[Any], None]) -> None:
    """`measure(case)` while there is time, with the memory of the case before given back."""
    for case in cases:
        if budget.is_spent():
            report.skip(case)
            continue
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            measure(case)
        except torch.OutOfMemoryError:
            report.skip(f"{case} (out of memory)")
    report.close(budget)


def guarded(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What was measured, or why nothing was: a peer that fails must not take the other rows with it."""
    try:
        return measure(*arguments)
    except Exception as error:
        return {"us": None, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
