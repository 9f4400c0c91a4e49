"""Writes a run's charts as separate files for papers: `figures/NAME.svg` and, with matplotlib, `figures/NAME.pdf`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.telemetry.run_log import TEXT, RunRecord, read_run
from megatron_rl.tools.report.picture import LIGHT, MARGIN, Bars, Curves, aim_curves, curve, placed, svg_file, time_bars
from megatron_rl.tools.report.report import TITLES

FORMATS = ("svg", "pdf")
WIDTH, HEIGHT = 470, 250
"""Size of a chart in pixels. A PDF has 100 pixels per inch."""


def write_figures(folder: Path, formats: list[str]) -> list[Path]:
    """Write each chart in each format into the folder `figures` of the run's folder. Return the paths.

    Raises ValueError for an unknown format, for pdf without matplotlib, and for a folder that contains no run.
    """
    if wrong := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"--format {','.join(formats)}: {wrong[0]!r} must be one of {', '.join(FORMATS)}.")
    if "pdf" in formats and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--format pdf: needs matplotlib, which is not installed; pip install matplotlib, or take svg.")
    run, files = read_run(folder, with_samples=False), []
    (folder / "figures").mkdir(exist_ok=True)
    for name, chart in charts(run):
        for kind in formats:
            path = folder / "figures" / f"{name}.{kind}"
            if kind == "svg":
                body, height = placed(chart.drawn(WIDTH, HEIGHT), 24.0)
                path.write_text(svg_file(body, WIDTH + 2 * MARGIN, height), **TEXT)
            else:
                write_pdf(chart, path)
            files.append(path)
    return files


def charts(run: RunRecord) -> Iterator[tuple[str, Curves | Bars]]:
    """Yield (file name, chart) for the main metric, the time per phase and each logged metric in TITLES."""
    found = [("main", aim_curves(run)), ("time", time_bars(run))]
    yield from ((name, chart) for name, chart in found if chart is not None)
    for key, title in TITLES.items():
        if series := curve(run.steps, key):
            yield re.sub(r"\W+", "_", key), Curves(heading=title, series=series, legend=[])


def write_pdf(chart: Curves | Bars, path: Path) -> None:
    """Draw a chart with matplotlib. Fonts are embedded as TrueType, which publishers require."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"pdf.fonttype": 42, "font.size": 8}):
        figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), layout="constrained")
        axes = figure.add_subplot()
        handles = _bars(chart, axes) if isinstance(chart, Bars) else _curves(chart, axes)
        axes.set_xlabel("step")
        axes.set_title(_plain(chart.heading), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        labels = [_plain(label) for _, label in chart.legend]
        if labels:
            figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=7)
        figure.savefig(path, metadata={"CreationDate": None})  # without a date, the same run gives the same bytes


def _curves(chart: Curves, axes: Any) -> list[Any]:
    """Draw curves. Return the curve shown in each legend entry: the first one of its colour that is not faint."""
    first: dict[str, Any] = {}
    for series in chart.series:
        style, color = series.style.rpartition(" ")[::2]
        y = [float("nan") if value is None else value for value in series.y]
        options = {"color": LIGHT[f"--{color}"], "linewidth": 1.2}
        options |= {"marker": {"marker": "o", "markersize": 4, "linestyle": ""}, "faint": {"alpha": 0.35}}.get(
            style, {}
        )
        options |= {"linestyle": "--"} if "dashed" in style else {}
        (line,) = axes.plot(list(series.x), y, **options)
        if style != "faint":
            first.setdefault(color, line)
    if chart.y_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    return [first[color] for color, _ in chart.legend]


def _bars(chart: Bars, axes: Any) -> list[Any]:
    gaps = [later - earlier for earlier, later in zip(chart.x, chart.x[1:], strict=False)]
    below, handles = [0.0] * len(chart.bars), []
    for number, name in enumerate(chart.order):
        values = [bar.get(name, 0.0) for bar in chart.bars]
        color = LIGHT[f"--c{number % 8}"]
        handles.append(axes.bar(chart.x, values, bottom=below, width=0.8 * min(gaps, default=1.0), color=color))
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_ylabel("seconds")
    return handles


def _plain(text: str) -> str:
    """Escape `$`, which matplotlib would read as the start of a formula."""
    return text.replace("$", r"\$")
