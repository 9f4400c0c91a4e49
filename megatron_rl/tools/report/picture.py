"""Draws report.png with matplotlib: the run's main metric, its evaluations, and the time per phase."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_rl.telemetry.run_log import RunRecord
from megatron_rl.tools.report.charts import LONG_CURVE, smooth
from megatron_rl.tools.report.summary import (
    Aim,
    aim_of,
    column,
    evaluation_curves,
    numbers,
    phase_seconds,
    phases_by_size,
)

COLORS = ("#2563eb", "#e8590c", "#0f9d6e", "#9333ea", "#d6336c", "#0c8599", "#a07400", "#868e96")


def write_picture(run: RunRecord, path: Path, title: str) -> None:
    """Draw a run's picture into a file.

    The picture has its own canvas, so this needs no display and changes no matplotlib settings.
    """
    figure = Figure(figsize=(12, 4.6), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    draw_aim(run, aim_of(run), left)
    draw_time(run, right)
    claims = [f"{one.label} {one.change}" for one in evaluation_curves(run) if len(one.steps) > 1]
    figure.suptitle("   ".join([title, *claims]), fontsize=14, fontweight="bold", x=0.012, ha="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e5ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path)


def draw_aim(run: RunRecord, aim: Aim | None, axes: Axes) -> None:
    if aim is not None:
        draw_metric(run, aim.metric, aim.label, axes)
    for number, one in enumerate(evaluation_curves(run), start=1):
        axes.plot(one.steps, one.scores, "o--", color=COLORS[number % len(COLORS)], linewidth=1.2, label=one.label)
    falls = aim is not None and aim.lower_is_better
    if not falls:  # with 0 on the axis, a loss curve would look flat
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_title("Evaluations" if aim is None else aim.name.capitalize(), loc="left", fontsize=11)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper right" if falls else "lower right", fontsize=9)


def draw_metric(run: RunRecord, key: str, label: str, axes: Axes) -> None:
    """Draw a metric by step. If it has many steps, draw faint values under their moving average."""
    x = numbers(run.steps)
    y = column(run.steps, key)
    if len(y) >= LONG_CURVE:
        axes.plot(x, _with_gaps(y), color=COLORS[0], alpha=0.3, linewidth=1)
        y, label = smooth(y), f"{label}, moving average"
    axes.plot(x, _with_gaps(y), color=COLORS[0], linewidth=2, label=label)


def _with_gaps(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def draw_time(run: RunRecord, axes: Axes) -> None:
    seconds = [phase_seconds(line) for line in run.steps]
    order = list(phases_by_size(seconds))
    x, bottom = numbers(run.steps), [0.0] * len(run.steps)
    for number, name in enumerate(order):
        heights = [phases.get(name, 0.0) for phases in seconds]
        axes.bar(x, heights, 0.85, bottom, color=COLORS[number % len(COLORS)], label=name)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_title("Seconds per step by phase", loc="left", fontsize=11)
    if order:
        axes.set_ylim(0, max(bottom) * 1.3 or 1.0)
        axes.legend(frameon=False, loc="upper right", fontsize=9, ncols=3)
