"""Compares several runs: their results, config differences and curves."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.table import Table

from megatron_rl.telemetry.run_log import TEXT, RunRecord, clock, is_number, read_run
from megatron_rl.tools.report.charts import LONG_CURVE, Series, line_chart, short, smooth
from megatron_rl.tools.report.parting import parting
from megatron_rl.tools.report.report import TITLES, figure, html_page, render_legend
from megatron_rl.tools.report.summary import AIMS, change_of, column, evaluation_curves, has_values, numbers

Rows = list[tuple[str, list[str]]]
"""Table rows: a heading and one cell per run."""
HIDDEN = ("step", "elapsed_s")


def compare(folders: list[Path], target: Path | None = None) -> tuple[Table, Path]:
    """Write a page that compares the runs. Return a table for the console, and the page's path.

    The page is `target`, or else compare.html in the closest common parent of the runs' folders. ValueError for fewer
    than two folders, or for a folder that contains no run.
    """
    if len(folders) < 2:
        raise ValueError(f"runs = {[str(f) for f in folders]}: nothing to compare; give two folders or more.")
    names = distinct_names(folders)
    runs = [read_run(folder) for folder in folders]
    table = Table(*("", *names))
    reached, different = what_they_reached(runs), differing_options(runs)
    for heading, cells in reached:
        table.add_row(heading, *cells)
    table.add_section()
    for heading, cells in different:
        table.add_row(heading, *cells, style="dim")
    target = target or Path(os.path.commonpath([folder.resolve().parent for folder in folders])) / "compare.html"
    target.write_text(render(names, runs, reached, different), **TEXT)
    return table, target


def partings(folders: list[Path], *, bound: float = 0.0) -> dict[str, str]:
    """Return {run's name: text that says where the run first differs from the first folder's run}.

    Runs that do not differ are absent.

    bound: largest relative difference of a metric that counts as equal.
    """
    names, runs = distinct_names(folders), [read_run(folder) for folder in folders]
    found = {}
    for name, run, folder in zip(names[1:], runs[1:], folders[1:], strict=True):
        if (place := parting((runs[0], run), (folders[0], folder), bound=bound)) is not None:
            found[name] = f"{names[0]} and {name} {place}"
    return found


def distinct_names(folders: list[Path]) -> list[str]:
    """Return the folders' names, with as many parent folders as needed to make them unique.

    If the same folder is listed twice, the names are numbered instead.
    """
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = [str(Path(*part[-depth:])) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def what_they_reached(runs: list[RunRecord]) -> Rows:
    """Return table rows of the runs' steps, scores, main metrics and speed. A missing number is shown as a dash."""
    rows: Rows = [("steps", [str(len(run.steps)) for run in runs])]
    curves = [{curve.label: curve for curve in evaluation_curves(run)} for run in runs]
    for label in dict.fromkeys(label for own in curves for label in own):
        rows.append((label, [own[label].change if label in own else "–" for own in curves]))
    for aim in AIMS:
        rows.append((f"{aim.label}, first and last tenth", [change_of(run, aim) or "–" for run in runs]))
    rows.append(("step time, median", [_median(run, "time/step", " s") for run in runs]))
    rows.append(("generated tokens/s, median", [_median(run, "rollout/tokens_per_s") for run in runs]))
    rows.append(("reply tokens, median", [_median(run, "rollout/reply_tokens") for run in runs]))
    rows.append(("time", [clock(sum(t for t in column(run.steps, "time/step") if t is not None)) for run in runs]))
    return [(heading, cells) for heading, cells in rows if set(cells) != {"–"}]


def differing_options(runs: list[RunRecord]) -> Rows:
    """Return a table row for each option in which the configs differ, except run.folder."""
    # Parse the YAML, so that 1e-6 and 0.000001 are equal.
    configs = [dict(_leaves(OmegaConf.to_container(OmegaConf.create(run.config)))) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [str(config.get(key, "–")) for config in configs]) for key in keys if key != "run.folder"]
    return [(key, cells) for key, cells in rows if len(set(cells)) > 1]


def render(names: list[str], runs: list[RunRecord], reached: Rows, different: Rows) -> str:
    legend = render_legend([(f"c{number % 8}", name) for number, name in enumerate(names)])
    keys = dict.fromkeys(key for run in runs for line in run.steps for key, value in line.items() if is_number(value))
    first = [*(aim.metric for aim in AIMS), "time/step", *TITLES]
    order = [key for key in [*first, *sorted(set(keys) - set(first))] if key in keys and key not in HIDDEN]
    figures = []
    for curve in dict.fromkeys(curve.label for run in runs for curve in evaluation_curves(run)):
        figures.append(figure(curve, line_chart(_evaluations(runs, curve), title=curve)))
    for key in order:
        series = [line for number, run in enumerate(runs) for line in _curve(run, key, f"c{number % 8}")]
        title = TITLES.get(key, key)
        figures.append(figure(title, line_chart(series, title=title)))
    options = f"<h2>Config <small>where they differ</small></h2>{_table(names, different)}" if different else ""
    curves = f"<h2>Curves <small>by step</small></h2>{legend}<div class='grid-of-charts'>{''.join(figures)}</div>"
    return html_page(" against ".join(names), _table(names, reached) + options + curves)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _evaluations(runs: list[RunRecord], label: str) -> list[Series]:
    series = []
    for number, run in enumerate(runs):
        for curve in evaluation_curves(run):
            if curve.label == label:
                series.append(Series(x=curve.steps, y=curve.scores, style=f"line c{number % 8}"))
                series.append(Series(x=curve.steps, y=curve.scores, style=f"marker c{number % 8}", label=label))
    return series


def _curve(run: RunRecord, key: str, color: str) -> list[Series]:
    x, y = numbers(run.steps), column(run.steps, key)
    if not has_values(y):
        return []
    return [Series(x=x, y=y if len(y) < LONG_CURVE else smooth(y), style=f"line {color}")]


def _table(names: list[str], rows: Rows) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
    body = "".join(
        f"<tr><th>{escape(heading)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for heading, cells in rows
    )
    return (
        f"<div class='scroll'><table class='compared'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _median(run: RunRecord, key: str, unit: str = "") -> str:
    values = [value for value in column(run.steps, key) if value is not None]
    return f"{short(statistics.median(values))}{unit}" if values else "–"
