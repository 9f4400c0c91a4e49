"""The report's charts of the run's main metric and of the time per phase, for the page and for `report.svg`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import Any

from megatron_rl.telemetry.run_log import RunRecord
from megatron_rl.tools.report.charts import LONG_CURVE, Series, line_chart, smooth, stacked_bars
from megatron_rl.tools.report.report_css import STYLE
from megatron_rl.tools.report.summary import (
    aim_of,
    column,
    evaluation_curves,
    has_values,
    numbers,
    phase_seconds,
    phases_by_size,
)

WIDTH, MARGIN = 960, 24
MOST_BARS = 80
LETTER = 6.2
"""Mean width in pixels of a letter of a legend, since text in an SVG file cannot be measured."""
LIGHT = dict(re.findall(r"(--[\w-]+):([^;}]+)", STYLE.partition("@media")[0]))
RULES = "\n".join(re.findall(r"^(?:svg |\.c\d).*$", STYLE, re.MULTILINE))
"""The page's CSS rules for charts. SVG files get light mode's colours instead of variables, which some viewers lack."""
PICTURE_STYLE = "text{font-family:sans-serif;font-size:12px;fill:var(--soft)}.title{fill:var(--ink);font-weight:600}"


Legend = list[tuple[str, str]]
"""Pairs of a colour class and a label."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawing of `width` x `height` pixels with its heading and legend."""

    heading: str
    drawing: str
    height: int
    legend: Legend
    width: int = WIDTH


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The data of a line chart."""

    heading: str
    series: list[Series]
    legend: Legend
    y_zero: bool = False
    """True if the y axis includes 0."""

    def drawn(self, width: int, height: int) -> Chart:
        title = f"{self.heading} by step"
        drawing = line_chart(self.series, width=width, height=height, title=title, y_zero=self.y_zero)
        return Chart(heading=self.heading, drawing=drawing, height=height, legend=self.legend, width=width)


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The data of a chart of stacked bars: for each bar, the seconds of each phase."""

    heading: str
    bars: list[dict[str, float]]
    x: list[float]
    order: list[str]
    legend: Legend

    def drawn(self, width: int, height: int) -> Chart:
        title = "Seconds per phase"
        drawing = stacked_bars(self.bars, self.x, self.order, width=width, height=height, title=title)
        return Chart(heading=self.heading, drawing=drawing, height=height, legend=self.legend, width=width)


def aim_chart(run: RunRecord) -> Chart | None:
    """Draw the run's main metric by step, together with its evaluations."""
    curves = aim_curves(run)
    return None if curves is None else curves.drawn(WIDTH, 300)


def aim_curves(run: RunRecord) -> Curves | None:
    """Return the curves of the run's main metric and of its evaluations; None if it has neither."""
    aim = aim_of(run)
    series = [] if aim is None else curve(run.steps, aim.metric)
    legend = [] if aim is None else [("c0", f"{aim.label} of each step's batch")]
    heading = "Evaluations" if aim is None else aim.name.capitalize()
    for number, one in enumerate(evaluation_curves(run), start=1):
        color = f"c{number % 8}"
        series.append(Series(x=one.steps, y=one.scores, style=f"line dashed {color}"))
        series.append(Series(x=one.steps, y=one.scores, style=f"marker {color}", label=one.label))
        legend.append((color, one.label))
    if not series:
        return None
    starts_at_zero = aim is None or not aim.lower_is_better  # a loss curve would look flat
    return Curves(heading=heading, series=series, legend=legend, y_zero=starts_at_zero)


def curve(steps: list[dict[str, Any]], key: str) -> list[Series]:
    """Return a metric's curve; [] if no step has the metric.

    A long curve is returned as two: the values, drawn faint, and their moving average.
    """
    x, y = numbers(steps), column(steps, key)
    if not has_values(y):
        return []
    if len(y) < LONG_CURVE:
        return [Series(x=x, y=y)]
    return [Series(x=x, y=y, style="faint c0"), Series(x=x, y=smooth(y))]


def time_chart(run: RunRecord) -> Chart | None:
    """Draw seconds per phase as stacked bars."""
    bars = time_bars(run)
    return None if bars is None else bars.drawn(WIDTH, 240)


def time_bars(run: RunRecord) -> Bars | None:
    """Return seconds per phase; None if none was measured. In long runs, a bar is the mean of neighbouring steps."""
    seconds = [phase_seconds(line) for line in run.steps]
    totals = phases_by_size(seconds)
    order, whole = list(totals), sum(totals.values())
    if not whole:
        return None
    per_bar = -(-len(run.steps) // MOST_BARS)  # rounded up
    bars, x = [], []
    for start in range(0, len(run.steps), per_bar):
        part = seconds[start : start + per_bar]
        bars.append({name: sum(phases.get(name, 0.0) for phases in part) / len(part) for name in order})
        x.append(run.steps[start]["step"] + 1)
    legend = [
        (f"c{i % 8}", f"{name} {totals[name] / whole:.0%} ({totals[name]:.1f} s)") for i, name in enumerate(order)
    ]
    note = "" if per_bar == 1 else f", mean of {per_bar} steps per bar"
    return Bars(heading=f"Time, seconds per step by phase{note}", bars=bars, x=x, order=order, legend=legend)


def picture(run: RunRecord, title: str) -> str:
    """Return the picture as the text of an SVG file. Before the first step, it only shows the title."""
    claims = [f"{one.label} {one.change}" for one in evaluation_curves(run) if len(one.steps) > 1]
    parts, y = [text(" · ".join([title, *claims]), MARGIN, 34, 18)], 72.0
    for chart in (aim_chart(run), time_chart(run)):
        if chart is not None:
            drawn, y = placed(chart, y)
            parts.append(drawn)
    return svg_file("".join(parts), WIDTH + 2 * MARGIN, y)


def svg_file(body: str, width: float, height: float) -> str:
    """Return the text of an SVG file that contains its own styles."""
    colors = re.sub(r"var\((--[\w-]+)\)", lambda name: LIGHT[name[1]], PICTURE_STYLE + RULES)
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    panel = f'<rect width="100%" height="100%" fill="{LIGHT["--panel"]}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{colors}</style>{panel}{body}</svg>\n'


def placed(chart: Chart, y: float) -> tuple[str, float]:
    """Draw a chart with heading and legend at height `y`. Return the drawing and the height at which it ends."""
    parts = [text(chart.heading, MARGIN, y, 14)]
    size = f'x="{MARGIN}" y="{y + 12:.0f}" width="{chart.width}" height="{chart.height}"'
    parts.append(chart.drawing.replace("<svg ", f"<svg {size} ", 1))
    x, y = float(MARGIN + 54), y + chart.height + 34
    for color, label in chart.legend:
        width = 40 + LETTER * len(label)
        if x + width > chart.width and x > MARGIN + 54:
            x, y = float(MARGIN + 54), y + 20
        parts.append(f'<rect class="fill {color}" x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" rx="3"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{y:.0f}">{escape(label)}</text>')
        x += width
    return "".join(parts), y + 44


def text(words: str, x: float, y: float, size: int) -> str:
    return f'<text class="title" x="{x:.0f}" y="{y:.0f}" style="font-size:{size}px">{escape(words)}</text>'
