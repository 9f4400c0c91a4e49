"""Renders rehearsal.html: charts of a rehearsal's results on one self-contained page."""

from __future__ import annotations

from collections import Counter
from html import escape
from itertools import groupby
from typing import Any

from megatron_rl.tools.plan.devices import GIB
from megatron_rl.tools.report.charts import bars, stacked_areas
from megatron_rl.tools.report.report import card, figure, html_page, render_legend, table

SHOWN = 12
"""Maximum number of bars in each chart."""
WIDTH = 960
LINKS = {"in a node": "c0", "between nodes": "c1"}


def page_of(found: dict[str, Any], *, title: str) -> str:
    """Return the HTML page of a rehearsal. found: the content of rehearsal.json."""
    ranks = found["ranks"]
    fullest = max(ranks, key=lambda rank: ranks[rank]["peak_bytes"])
    most = f"{ranks[fullest]['peak_bytes'] / GIB:.1f} GiB"
    cards = [
        card("trainer ranks", f"{found['trainer_ranks']:,}", f"{found['nodes']} x {found['gpus_per_node']} GPUs"),
        card("most memory", most, f"rank {fullest}, {found['device']}", "big"),
        card("rehearsed", str(len(ranks)), "ranks: " + ", ".join(map(str, sorted(ranks)))),
    ]
    sections = "".join(_section(rank, part) for rank, part in sorted(ranks.items()))
    return html_page(title, f"<div class='cards'>{''.join(cards)}</div>{sections}")


def _section(rank: int, found: dict[str, Any]) -> str:
    syncs: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for name, phase in found["phases"].items():
        if name != "start":
            syncs.update(phase["syncs"])
            copies.update(phase["copied_bytes"])
    traffic = sorted(found["traffic"], key=lambda row: -row["bytes"])[:SHOWN]
    sent = [
        (
            f"{row['kind']} of {row['group'].lower()}, {row['ranks']} ranks, in {row['phase']}",
            row["bytes"],
            f"{row['bytes'] / 1e9:.2f} GB",
            LINKS[row["link"]],
        )
        for row in traffic
    ]
    waits = [(what, float(count), f"{count:,}", "c4") for what, count in syncs.most_common(SHOWN)]
    copied = [(what, float(size), f"{size / 1e6:.1f} MB", "c5") for what, size in copies.most_common(SHOWN)]
    links = render_legend([(color, link) for link, color in LINKS.items()])
    return (
        f"<h2>Rank {rank} <small>{escape(_peak(found))}</small></h2>"
        + figure("Memory by part, over the kernels launched (GiB)", _memory(found))
        + _phases(found)
        + _unordered(found)
        + figure("Bytes sent by each collective", bars(sent, width=WIDTH, title="Bytes sent") + links)
        + figure("Places where the host waits, after the start", bars(waits, width=WIDTH, title="Host syncs by line"))
        + figure("Copies, after the start", bars(copied, width=WIDTH, title="Copies between host and device"))
    )


def _peak(found: dict[str, Any]) -> str:
    return f"{found['peak_bytes'] / GIB:.1f} GiB at most, in {found['peak_phase']}, at {found['peak_line']}"


def _memory(found: dict[str, Any]) -> str:
    parts, points = found["timeline"]["parts"], found["timeline"]["points"]
    columns = [(part, [point[2 + number] / GIB for point in points]) for number, part in enumerate(parts)]
    launched, at_peak = [point[0] for point in points], found["peak_by_part"]
    chart = stacked_areas(
        columns,
        launched,
        width=WIDTH,
        height=320,
        title="Memory by part",
        mark=_peak(found),
        spans=_long_phases(launched, [point[1] for point in points]),
    )
    legend = [(f"c{number % 8}", f"{part} {at_peak[part] / GIB:.2f}") for number, part in enumerate(parts)]
    return chart + render_legend(legend)


def _long_phases(launched: list[int], phases: list[str]) -> list[tuple[float, str]]:
    """Return (start, name) of each phase that is wide enough in the chart to be labelled."""
    spans: list[tuple[float, str]] = []
    start = 0
    for name, group in groupby(phases):
        end = start + len(list(group))
        if launched[end - 1] - launched[start] > 0.06 * launched[-1]:
            spans.append((launched[start], name))
        start = end
    return spans


def _unordered(found: dict[str, Any]) -> str:
    rows = [[f"{count:,}", escape(what)] for what, count in Counter(found["unordered"]).most_common(SHOWN)]
    return f"<div>{table(['times', 'uses of memory in no order between streams'], rows)}</div>" if rows else ""


def _phases(found: dict[str, Any]) -> str:
    head = ["phase", "kernels", "TFLOP", "peak GiB", "host syncs", "copies"]
    rows = [
        [
            escape(name),
            f"{phase['kernels']:,}",
            f"{sum(phase['flops'].values()) / 1e12:.1f}",
            f"{phase['peak_bytes'] / GIB:.1f}",
            str(sum(phase["syncs"].values())),
            str(sum(phase["copies"].values())),
        ]
        for name, phase in found["phases"].items()
    ]
    return f"<div>{table(head, rows)}</div>"
