"""Writes a run's report: `report.html`, a self-contained page that needs no network, and `report.svg`.

Model output is untrusted: every text from the run's files is escaped with `html.escape`.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path

import yaml

from megatron_rl.telemetry.provenance import read_provenance
from megatron_rl.telemetry.run_log import TEXT, RunRecord, clock, is_number, read_run
from megatron_rl.telemetry.trace import FOLDER
from megatron_rl.tools.report.charts import Series, heat_map, line_chart, short
from megatron_rl.tools.report.live_script import LIVE_SCRIPT
from megatron_rl.tools.report.picture import Chart, aim_chart, curve, picture, time_chart
from megatron_rl.tools.report.report_css import STYLE
from megatron_rl.tools.report.report_samples import Row, ShownSamples, samples_section, shown_samples, turns_of
from megatron_rl.tools.report.summary import (
    aim_of,
    change_of,
    column,
    evaluation_curves,
    has_values,
    numbers,
    tenth_of,
)

TITLES = {
    "rollout/reply_tokens": "Reply length (tokens)",
    "policy/loss": "Loss",
    "policy/grad_norm": "Gradient norm",
    "policy/entropy": "Entropy (nats)",
    "policy/reference_kl": "KL to the reference",
    "policy/approx_kl": "KL to the policy before the step",
    "policy/ratio_deviation": "Distance of the ratio from 1",
    "policy/clipped_tokens": "Clipped tokens (share)",
    "mismatch/mean": "Log-prob difference, trainer to server",
    "mismatch/equal": "Log-probs equal to the bit, trainer and server (share)",
    "rollout/tokens_per_s": "Generated tokens per second",
    "rollout/staleness": "Staleness (versions)",
}
"""{metric: title of its chart}. These charts come first, in this order. Charts of other metrics have the metric's key
as title."""
HISTOGRAMS = {
    "histogram/reply_tokens": "Tokens that the model wrote in a trajectory",
    "histogram/token_age": "Age of the trained tokens (versions)",
}
MISMATCHES = {"age": "By age of the token (versions)", "position": "By place in the reply (tokens before it)"}
CHART_BYTES = 1_300_000
"""Maximum total size of the small metric charts. Metrics without room for a chart are listed by name."""
COLUMNS = 80
"""Maximum columns of a distribution's drawing."""
ROWS_SHOWN = 12
"""Maximum visible rows of a table. The rest is folded."""


def write_report(folder: str | Path) -> Path:
    """Write report.html and report.svg into a run's folder; return report.html's path. The run may still be running.

    The page of a run of any length stays below 5 MB: curves keep their extremes, and samples are a selection.
    """
    folder = Path(folder)
    run = read_run(folder, with_samples=False)
    page = folder / "report.html"
    page.write_text(render(run, folder, shown_samples(folder)), **TEXT)
    (folder / "report.svg").write_text(picture(run, title=folder.resolve().name), **TEXT)
    return page


def render(run: RunRecord, folder: Path, samples: ShownSamples) -> str:
    """Return the page's HTML.

    run: the run's record, which needs no samples. folder: the run's folder, which gives the title and the traces.
    """
    run = dataclasses.replace(run, samples=samples.rounds)
    traces = sorted((folder / FOLDER).glob("step-*.json.gz"), key=lambda path: (len(path.name), path.name))
    sections = {
        "about": about(run),
        "headline": headline(run),
        "aim": chart_section(aim_chart(run)),
        "replies": evaluation_section(run),
        "samples-part": samples_section(samples),
        "times": chart_section(time_chart(run)),
        # A live page's server serves no trace files.
        "traces": trace_section([path.name for path in traces if not samples.is_live]),
        "distributions": histogram_section(run),
        "mismatches": mismatch_section(run),
        "metrics": metric_section(run),
        "config": config_section(run),
    }
    # A live page replaces each section that has changed, and needs the empty ones too.
    body = "".join(f"<section id='{name}'>{part}</section>" for name, part in sections.items())
    return html_page(folder.resolve().name, body, is_live=samples.is_live)


def html_page(title: str, body: str, *, is_live: bool = False) -> str:
    live = f"<p class='about' id='live'>live</p><script>{LIVE_SCRIPT}</script>" if is_live else ""
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style></head><body{' data-live=yes' if is_live else ''}>"
        f"<main><h1>{escape(title)}</h1>{live}{body}</main></body></html>\n"
    )


def config_section(run: RunRecord) -> str:
    if not run.config:
        return ""
    text = f"<pre class='config'>{escape(run.config)}</pre>"
    return f"<h2>Config</h2><details><summary>config.yaml</summary>{text}</details>"


def about(run: RunRecord) -> str:
    """Return a line of HTML with the model, the algorithm, the data, the code version and the time."""
    words = [*(f"{name} {value}" for name, value in model_and_algorithm(run.config)), read_provenance(run.config)]
    return f"<p class='about'>{escape(' · '.join(filter(None, words)))}</p>" if any(words) else ""


def model_and_algorithm(config: str) -> list[tuple[str, str]]:
    """Return (name, value) pairs for the model, the algorithm and the data of a config."""
    try:
        sections = yaml.safe_load(config) or {}
    except yaml.YAMLError:  # the run was killed while it wrote the config
        return []

    def value(section: str, key: str) -> str:
        part = sections.get(section)
        return str(part.get(key) or "") if isinstance(part, dict) else ""

    if value("supervised", "answer"):
        how = [("trained on", f"the answers in {value('supervised', 'answer')}")]
    elif value("preference", "loss"):
        how = [("preference loss", value("preference", "loss"))]
    else:
        how = [("advantage", value("algo", "advantage")), ("loss", value("algo", "loss"))]
    found = [("model", value("model", "path")), *how, ("data", value("data", "train"))]
    return [(name, said) for name, said in found if said]


def headline(run: RunRecord) -> str:
    cards = [
        card(one.label, one.change, f"over {one.steps[-1] - one.steps[0]} steps", "big")
        for one in evaluation_curves(run)
        if len(one.steps) > 1
    ]
    if (aim := aim_of(run)) is not None:
        count = tenth_of(run, aim)
        note = f"mean of the first and last {count} steps" if count > 1 else "first and last step"
        cards.append(card(aim.label, str(change_of(run, aim)), note))
    rates = [r for r in column(run.steps, "rollout/tokens_per_s") if r is not None]
    if rates:
        cards.append(card("generation", f"{short(statistics.median(rates))} tokens/s", "median step"))
    times = [t for t in column(run.steps, "time/step") if t is not None]
    if times:
        cards.append(card("time", clock(sum(times)), f"{len(times)} steps, median {statistics.median(times):.1f} s"))
    return f"<div class='cards'>{''.join(cards)}</div>"


def card(label: str, value: str, note: str, style: str = "") -> str:
    return (
        f"<div class='card {style}'><div class='label'>{escape(label)}</div>"
        f"<div class='value'>{escape(value)}</div><div class='note'>{escape(note)}</div></div>"
    )


def chart_section(chart: Chart | None) -> str:
    if chart is None:
        return ""
    return f"<h2>{chart.heading}</h2><figure>{chart.drawing}{render_legend(chart.legend)}</figure>"


def trace_section(names: Sequence[str]) -> str:
    if not names:
        return ""
    links = ", ".join(f"<a href='{FOLDER}/{escape(name)}' download>{escape(name)}</a>" for name in names)
    return f"<p>What each process did when, to be opened in ui.perfetto.dev: {links}</p>"


def histogram_section(run: RunRecord) -> str:
    """Draw the distributions of reply length and of token age (in policy versions) by step.

    In long runs, neighbouring steps are summed.
    """
    figures = []
    per_column = -(-len(run.steps) // COLUMNS)
    for key, name in HISTOGRAMS.items():
        lines = [line for line in run.steps if isinstance(line.get(key), dict)]
        columns, x = [], []
        for start in range(0, len(lines), per_column or 1):
            counts: dict[str, float] = {}
            for line in lines[start : start + per_column]:
                for label, count in line[key].items():
                    counts[label] = counts.get(label, 0.0) + (count or 0)
            whole = sum(counts.values()) or 1.0
            columns.append({label: count / whole for label, count in counts.items()})
            x.append(lines[start]["step"] + 1)
        # Sort by the lowest number of a class: 16 for `16 to 31`.
        classes = sorted({label for column in columns for label in column}, key=_first_number)
        if len(classes) > 1:
            chart = heat_map(columns, x, classes, width=470, height=210, title=name)
            figures.append(figure(name, chart))
    return side_by_side("Distributions <small>share of each step's, by step</small>", figures)


def mismatch_section(run: RunRecord) -> str:
    """Draw how much the trainer's log-probs of tokens differ from the servers', by token age and by position."""
    figures = []
    for kind, name in MISMATCHES.items():
        start = f"mismatch/mean_{kind}_"
        keys = sorted({key for line in run.steps for key in line if key.startswith(start)}, key=_first_number)
        series, legend = [], []
        for number, key in enumerate(keys):
            x, y = numbers(run.steps), column(run.steps, key)
            if has_values(y):
                series.append(Series(x=x, y=y, style=f"line c{number % 8}"))
                legend.append((f"c{number % 8}", key.removeprefix(start).replace("_", " ")))
        if series:
            chart = line_chart(series, width=470, height=210, title=name, y_zero=True)
            figures.append(figure(name, chart + render_legend(legend)))
    return side_by_side("Trainer against servers <small>mean |log-prob difference|, nats</small>", figures)


def side_by_side(heading: str, figures: list[str]) -> str:
    return f"<h2>{heading}</h2><div class='halves'>{''.join(figures)}</div>" if figures else ""


def _first_number(key: str) -> int:
    return int(next((part for part in re.split("[_ ]", key) if part.isascii() and part.isdecimal()), 0))


def metric_section(run: RunRecord) -> str:
    """Draw one small chart per logged metric. Charts of metrics that are not in TITLES are folded."""
    aim = aim_of(run)
    hidden = {"step", "elapsed_s"} | ({aim.metric} if aim is not None else set())
    values: dict[str, set[float]] = {}
    for line in run.steps:
        for key, value in line.items():
            if is_number(value) and key not in hidden and not key.startswith(("time/", "mismatch/mean_")):
                values.setdefault(key, set()).add(value)
    # A constant metric gets a line of text instead of a chart. After one step, constant ones are not known yet.
    constant = sorted(key for key, seen in values.items() if len(seen) == 1 and len(run.steps) > 1)
    changing = [key for key in [*TITLES, *sorted(set(values) - set(TITLES))] if key in values and key not in constant]
    figures, size = dict[str, str](), 0
    for key in changing:
        drawn = figure(TITLES.get(key, key), line_chart(curve(run.steps, key), title=key))
        size += len(drawn)
        if size > CHART_BYTES:
            break
        figures[key] = drawn
    first = "".join(drawn for key, drawn in figures.items() if key in TITLES)
    rest = [drawn for key, drawn in figures.items() if key not in TITLES]
    others = f"<details><summary>{len(rest)} other metrics</summary>{grid(''.join(rest))}</details>" if rest else ""
    unchanged = " · ".join(f"{key} {short(*values[key])}" for key in constant)
    note = f"<p class='unchanged'>The same in every step: {escape(unchanged)}</p>" if constant else ""
    undrawn = [key for key in changing if key not in figures]
    if undrawn:
        note += f"<p class='unchanged'>Only in metrics.jsonl: {escape(' · '.join(undrawn))}</p>"
    body = f"{grid(first)}{others}{note}"
    return f"<h2>Metrics <small>by step</small></h2>{body}" if values else ""


def grid(figures: str) -> str:
    return f"<div class='grid-of-charts'>{figures}</div>"


def figure(name: str, drawing: str) -> str:
    return f"<figure><figcaption>{escape(name)}</figcaption>{drawing}</figure>"


def render_legend(entries: list[tuple[str, str]]) -> str:
    spans = "".join(f"<span><i class='{style}'></i>{escape(label)}</span>" for style, label in entries)
    return f"<div class='legend'>{spans}</div>"


def evaluation_section(run: RunRecord) -> str:
    """Show the replies of each evaluation's first and last round to the same prompts, side by side."""
    parts = []
    for name in dict.fromkeys(line["name"] for line in run.evaluations):
        steps = sorted(step for split, step in run.samples if split == name)
        if not steps:
            continue
        first, last = run.samples[name, steps[0]], run.samples[name, steps[-1]]
        heading = escape(name.replace("_", "-"))
        if len(steps) == 1:
            head = ["prompt", "answer", f"reply after {steps[0]} steps"]
            rows = [[text(s["prompt"]), text(s["answer"]), reply(s)] for s in first]
        else:
            head = ["prompt", "answer", f"after {steps[0]} steps", f"after {steps[-1]} steps"]
            rows = [[text(b["prompt"]), text(b["answer"]), reply(b), reply(a)] for b, a in pair_by_prompt(first, last)]
        parts.append(f"<h2>Replies <small>{heading}</small></h2>{table(head, rows)}")
    return "".join(parts)


def pair_by_prompt(first: list[Row], last: list[Row]) -> list[tuple[Row, Row]]:
    """Pair each prompt's n-th reply in `first` with its n-th reply in `last`. Unpaired replies are dropped."""
    waiting: dict[str, list[Row]] = {}
    for sample in reversed(last):  # reversed, so that pop() takes the earliest
        waiting.setdefault(sample["prompt"], []).append(sample)
    return [(s, waiting[s["prompt"]].pop()) for s in first if waiting.get(s["prompt"])]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Render a table of cells that already are HTML. Rows after the first ROWS_SHOWN are folded."""
    rest = rows[ROWS_SHOWN:]
    folded = f"<details><summary>{len(rest)} more</summary>{rows_as_table(head, rest)}</details>" if rest else ""
    return rows_as_table(head, rows[:ROWS_SHOWN]) + folded


def rows_as_table(head: list[str], rows: list[list[str]]) -> str:
    columns = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<div class='scroll'><table class='columns-{len(head)}'><thead><tr>{columns}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def text(value: str) -> str:
    return f"<div class='text'>{escape(value)}</div>"


def reply(sample: Row) -> str:
    reward = sample["reward"]
    style = "none" if reward is None else "good" if reward >= 0.999 else "bad" if reward <= 0.0 else "part"
    number = "–" if reward is None else short(reward)
    said = text(sample["reply"])
    if sample.get("turns"):  # a dialogue; samples of older versions have no turns
        turns = [("policy" if by == "policy" else "others", words) for by, words in turns_of(sample)]
        spoken = "".join(f"<div class='turn {by}'>{escape(words)}</div>" for by, words in turns)
        said = f"<div class='text'>{spoken}</div>"
    return f"<div class='reply'><span class='reward {style}'>{number}</span>{said}</div>"
