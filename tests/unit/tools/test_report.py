from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from rich.console import Console

from megatron_rl.telemetry.run_log import RunLog, Sample, Turn, read_run
from megatron_rl.tools.report.charts import (
    Series,
    bars,
    line_chart,
    short,
    smooth,
    stacked_areas,
    tick_label,
    ticks,
    whole_ticks,
)
from megatron_rl.tools.report.compare import compare
from megatron_rl.tools.report.report import write_report
from megatron_rl.tools.report.summary import AIMS, aim_of, evaluation_curves
from tests.kit.waiting import LATE_S

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)> & "quoted" </td>'


class Page(HTMLParser):
    """Collects what a browser would see: tags, attributes and text; fails on tags that do not nest."""

    VOID = {"meta", "line", "br", "input"}

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self._open = [], [], "", []
        self.feed(source)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data if self._open[-1:] != ["script"] else ""


def write_run(folder, steps=12, reply="7", evaluations=(0, 12)):
    with RunLog(folder, steps, console=Console(file=io.StringIO())) as log:
        log.log_config("run:\n  name: <b>bold</b>\n")
        for step in range(steps):
            if step in evaluations:
                log_evaluation(log, step, 0.25, "10")
            metrics = {"reward/mean": step / steps, "policy/loss": None if step == 3 else 0.1 * step}
            log.log_step(
                step,
                metrics
                | {"time/rollout": 3.0, "time/update": 5.0, "time/step": 10.0, "odd/metric": step, "odd/constant": 7},
            )
        if steps in evaluations:
            log_evaluation(log, steps, 0.75, reply)


def log_evaluation(log, step, accuracy, reply):
    samples = [Sample(prompt=f"3+{i}=", reply=reply, reward=float(i % 2), answer=str(3 + i)) for i in range(20)]
    log.log_evaluation(step, "held_out", {"accuracy": accuracy}, samples)


def report(folder) -> tuple[Page, str]:
    source = write_report(folder).read_text(encoding="utf-8")
    return Page(source), source


def test_headline_says_accuracy_before_and_after(tmp_path):
    write_run(tmp_path)
    page, _ = report(tmp_path)
    assert "held-out accuracy25% → 75%over 12 steps" in page.text
    assert "2:00" in page.text  # 12 steps of 10 s


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            "model: {path: models/m}\nalgo: {advantage: gae, loss: gspo}",
            "model models/m · advantage gae · loss gspo · ",
        ),
        ("model: {path: models/m}\nsupervised: {answer: text}", "model models/m · trained on the answers in text · "),
        ("preference: {loss: dpo}\nalgo: {advantage: gae}", "preference loss dpo · "),
    ],
)
def test_first_screen_says_model_algorithm_commit_and_date(config, words, tmp_path):
    write_run(tmp_path, steps=3, evaluations=(0, 3))
    with RunLog(tmp_path, 3, first_step=3, console=Console(file=io.StringIO())) as log:
        log.log_config(config)
    page, _ = report(tmp_path)
    about = page.text[: page.text.index("held-out accuracy")]
    assert words in about and re.search(
        r"megatron_rl \d[\d.]+(, commit [0-9a-f]{7}( with changes)?)?, \d{4}-\d\d-\d\d", about
    )
    assert "first and last step" in page.text and "tenth" not in page.text, "a tenth of three steps is one"


def test_steps_have_the_numbers_of_the_terminal_and_replies_come_before_small_charts(tmp_path):
    write_run(tmp_path, steps=3, evaluations=(0, 3))
    _, source = report(tmp_path)
    steps = re.findall(r"<title>step (\d): [\d.]+</title>", source[source.index("Reward by step") :])
    assert steps[:3] == ["1", "2", "3"]
    assert source.index("<h2>Replies") < source.index("<h2>Time") < source.index("<h2>Metrics")
    assert source.index("<summary>1 other metrics") < source.index("odd/metric")


def test_time_of_each_phase_and_the_rest_is_listed(tmp_path):
    write_run(tmp_path)
    page, _ = report(tmp_path)
    for line in ("update 50% (60.0 s)", "rollout 30% (36.0 s)", "outside the phases 20% (24.0 s)"):
        assert line in page.text


def test_replies_before_and_after_are_side_by_side(tmp_path):
    write_run(tmp_path, reply="after!")
    page, _ = report(tmp_path)
    assert "after 0 steps" in page.text and "after 12 steps" in page.text
    row = page.text[page.text.index("3+1=") :]
    assert row.startswith("3+1=4110" + "1after!")  # prompt, answer, reward and reply before, reward and reply after
    assert "8 more" in page.text  # of 20 rows 12 are shown


def test_text_of_a_model_is_shown_and_never_becomes_markup(tmp_path):
    write_run(tmp_path, reply=HOSTILE)
    page, source = report(tmp_path)
    assert HOSTILE in page.text and "<b>bold</b>" in page.text
    assert not {"img", "b"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert source.count("<script") == page.tags.count("script") == 2  # the samples as data, and what shows them


def dom_in_a_browser(page, script="") -> str:
    """The page as a real browser has it after its scripts, and `script` after these, have run."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    copy = page.with_name("copy.html")
    copy.write_text(page.read_text(encoding="utf-8") + f"<script>{script}</script>", encoding="utf-8")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    asked = [browser, *arguments, "--dump-dom", copy.as_uri()]
    return subprocess.run(asked, capture_output=True, text=True, timeout=LATE_S, check=True).stdout


def samples_shown(dom: str) -> list[list[str]]:
    body = dom[dom.index('id="rows"') : dom.index("</tbody>", dom.index('id="rows"'))]
    rows = [re.findall(r"<td><div[^>]*>(.*?)</div></td>", row, re.S) for row in body.split("<tr>")[1:]]
    return [[html.unescape(cell) for cell in row] for row in rows]


def test_a_browser_shows_finds_and_orders_samples_and_runs_nothing_that_a_model_wrote(tmp_path):
    hostile = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    with RunLog(tmp_path, 3, console=Console(file=io.StringIO())) as log:
        for step, reply in enumerate(["first words", hostile, "other words of it"]):
            log.log_step(
                step, {"reward/mean": 0.5}, [Sample(prompt=f"p{step}", reply=reply, reward=step % 2, answer="a")]
            )
    page = write_report(tmp_path)
    dom = dom_in_a_browser(page)
    assert "<title>taken" not in dom
    newest_first = [["2", "0", "p2", "a", "other words of it"], ["1", "1", "p1", "a", hostile]]
    assert samples_shown(dom) == [*newest_first, ["0", "0", "p0", "a", "first words"]]
    ask = "box = document.getElementById('{}'); box.value = '{}'; box.dispatchEvent(new Event('input'));"
    dom = dom_in_a_browser(page, ask.format("find", "a WORDS") + ask.format("order", "oldest"))
    assert [row[2] for row in samples_shown(dom)] == ["p0", "p2"]


def test_distributions_are_drawn_with_classes_upwards(tmp_path):
    with RunLog(tmp_path, 2, console=Console(file=io.StringIO())) as log:
        log.log_step(0, {"histogram/reply_tokens": {"16 to 31": 3, "0 to 1": 1}})
        log.log_step(1, {"histogram/reply_tokens": {"128 to 255": 2}})
    _, source = report(tmp_path)
    cells = re.findall(r'y="([\d.]+)"[^>]*fill-opacity="([\d.]+)"><title>([^<]*)</title>', source)
    assert {title: float(shade) for _, shade, title in cells} == {
        "0 to 1, step 1: 25.0%": pytest.approx(0.06 + 0.94 * 0.25, abs=0.01),
        "16 to 31, step 1: 75.0%": pytest.approx(0.06 + 0.94 * 0.75, abs=0.01),
        "128 to 255, step 2: 100.0%": 1.0,
    }
    heights = {title.partition(",")[0]: float(y) for y, _, title in cells}
    assert heights["128 to 255"] < heights["16 to 31"] < heights["0 to 1"]  # y counts downwards


def test_page_of_a_long_run_keeps_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.tools.report.report_samples.SAMPLE_BYTES", 1500)
    write_run(tmp_path, steps=12)
    _, source = report(tmp_path)
    assert re.search(r"<h2>Samples <small>\d+ of 40 in samples.jsonl", source)
    assert len(re.search(r"id='samples'>(.*?)</script>", source)[1]) <= 1500


def write_dialogue(folder, reply="is it 2?"):
    turns = [Turn(by="others", text="guess"), Turn(by="policy", text=reply), Turn(by="others", text="more")]
    dialogue = Sample(prompt="guess", reply="7", reward=1.0, answer="7", turns=[*turns, Turn(by="policy", text="7")])
    with RunLog(folder, 1, console=Console(file=io.StringIO())) as log:
        log.log_evaluation(0, "held_out", {"accuracy": 1.0}, [dialogue])
        log.log_step(0, {"reward/mean": 1.0}, [dialogue, Sample(prompt="p", reply="alone", reward=0.0)])


def test_a_dialogue_is_shown_turn_by_turn(tmp_path):
    write_dialogue(tmp_path, reply=HOSTILE)
    page, source = report(tmp_path)
    shown = f"{html.escape(HOSTILE)}</div><div class='turn others'>more</div><div class='turn policy'>7</div>"
    assert f"<div class='text'><div class='turn policy'>{shown}" in source and "img" not in page.tags
    assert '[["policy", "\\u003cscript>' in source and '["train", 1, 0.0, "p", "", "alone", []]' in source


def test_a_browser_shows_and_finds_what_was_said_in_a_dialogue(tmp_path):
    write_dialogue(tmp_path)
    ask = "box = document.getElementById('find'); box.value = 'MORE'; box.dispatchEvent(new Event('input'));"
    dom = dom_in_a_browser(write_report(tmp_path), ask)
    turns = re.findall(r'<div class="turn (\w+)">(.*?)</div>', dom[dom.index('id="rows"') :])
    assert turns[:3] == [("policy", "is it 2?"), ("others", "more"), ("policy", "7")] and "alone</div>" not in dom


def test_a_run_from_before_dialogues_had_turns_has_a_report(tmp_path):
    write_dialogue(tmp_path)
    path = tmp_path / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "turns"}) + "\n" for row in rows))
    page, source = report(tmp_path)
    assert "class='turn" not in source and "guess" in page.text


def test_a_phone_scrolls_nothing_sideways_and_can_read_the_charts(tmp_path):
    """As far as the style sheet goes: no column and no chart is wider than its place, whatever stands in a cell."""
    write_run(tmp_path)
    _, source = report(tmp_path)
    style = source[source.index("<style>") : source.index("</style>")]
    assert not re.search(r"minmax\(\d", style) and style.count(",100%)") == 2
    assert re.search(r"th,td\{[^}]*overflow-wrap:anywhere", style)
    on_a_phone = style[style.index("@media(max-width:600px)") :]
    for size, width in (("wide", 960), ("half", 470)):
        font = float(re.search(rf"svg\.{size} \.tick\{{font-size:(\d+)px", on_a_phone)[1])
        assert font * (420 - 2 * 12 - 2 * 13) / width > 9  # a phone's width without margins and frame
    assert 'svg class="wide" viewBox="0 0 960' in source and 'svg class="small" viewBox="0 0 340' in source


def test_curves_tell_their_values_and_the_config_is_folded(tmp_path):
    write_run(tmp_path, steps=20)
    _, source = report(tmp_path)
    assert "<title>step 5: 0.4</title>" in source
    long = Series(x=range(1000), y=[0.5] * 1000)
    assert line_chart([long], title="long").count('class="hover') == 50
    assert "<details><summary>config.yaml</summary><pre class='config'>" in source


def test_page_asks_no_network(tmp_path):
    write_run(tmp_path)
    page, source = report(tmp_path)
    assert not {name for name, _ in page.attributes} & {"src", "href"}
    assert not re.search(r"https?://|@import|url\(", source)


@pytest.mark.parametrize(
    ("rewards", "label", "change"),
    [((0.0, 1.0), "held-out accuracy", "50% → 75%"), ((0.25, 0.75), "held-out reward", "0.50 → 0.75")],
)
def test_mean_reward_is_called_accuracy_only_where_replies_are_right_or_wrong(tmp_path, rewards, label, change):
    with RunLog(tmp_path, 1, console=Console(file=io.StringIO())) as log:
        for step, mean in ((0, 0.5), (1, 0.75)):
            samples = [Sample(prompt=str(i), reply="r", reward=r) for i, r in enumerate(rewards)]
            log.log_evaluation(step, "held_out", {"reward/mean": mean}, samples)
    (curve,) = evaluation_curves(read_run(tmp_path))
    assert (curve.label, curve.change) == (label, change)


def test_metric_that_never_changes_is_a_line_and_not_a_chart(tmp_path):
    write_run(tmp_path)
    page, source = report(tmp_path)
    assert "The same in every step: odd/constant 7" in page.text
    assert 'aria-label="odd/constant"' not in source


def test_metric_unknown_to_the_report_gets_a_chart(tmp_path):
    write_run(tmp_path)
    page, _ = report(tmp_path)
    assert "odd/metric" in page.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "evaluations"),
    [
        *((1, ()), (1, (0, 1)), (5, (0,))),
        pytest.param(500, (0, 100, 500), marks=pytest.mark.thorough),
    ],
)
def test_short_long_and_unfinished_runs_have_a_report(tmp_path, steps, evaluations):
    write_run(tmp_path, steps=steps, evaluations=evaluations)
    page, source = report(tmp_path)
    assert "nan" not in source
    assert page.tags.count("svg") >= 3


def test_run_that_has_logged_nothing_has_an_empty_report(tmp_path):
    RunLog(tmp_path, 5, console=Console(file=io.StringIO())).close()
    page, _ = report(tmp_path)
    assert "svg" not in page.tags


def drawing(folder):
    """The root element of report.svg."""
    return ElementTree.fromstring((folder / "report.svg").read_text())


def words_of(element):
    return [text for text in element.itertext() if text.strip()]


def test_picture_has_the_pages_two_charts_and_needs_no_style_of_the_page(tmp_path):
    write_run(tmp_path)
    write_report(tmp_path)
    picture = drawing(tmp_path)
    width, height = (float(picture.get(side)) for side in ("width", "height"))
    charts = picture.findall("{*}svg")
    assert len(charts) == 2 and "var(" not in "".join(picture.itertext())
    below = [float(chart.get("y")) + float(chart.get("height")) for chart in charts]
    assert below[0] < float(charts[1].get("y")) and below[1] < height
    for word in picture.findall("{*}text"):
        assert 0 < float(word.get("x")) < width and 0 < float(word.get("y")) < height
    page = (tmp_path / "report.html").read_text()
    for chart in charts:
        curves = [curve.get("d") for curve in chart.iter() if curve.tag.endswith("path")]
        assert all(f'd="{curve}"' in page for curve in curves)


def test_a_picture_escapes_what_the_run_says_and_breaks_a_legend_that_is_too_long(tmp_path):
    with RunLog(tmp_path, 1, console=Console(file=io.StringIO())) as log:
        for step in (0, 1):
            for number in range(9):
                log.log_evaluation(step, f"<b>{number} {'and a long name ' * 3}", {"accuracy": 0.5})
        log.log_step(0, {"reward/mean": 0.5, "time/step": 1.0})
    write_report(tmp_path)
    legend = [word for word in drawing(tmp_path).findall("{*}text") if "<b>" in word.text and word.get("class") is None]
    assert len(legend) == 9 and len({word.get("y") for word in legend}) > 2


@pytest.mark.parametrize(
    ("metric", "score", "heading", "card", "evaluation"),
    [
        ("reward/mean", "accuracy", "Reward", "train reward0.50 → 0.75", "held-out accuracy50% → 75%"),
        ("preference/accuracy", "accuracy", "Accuracy", "train accuracy50% → 75%", "held-out accuracy50% → 75%"),
        (
            "supervised/loss",
            "loss",
            "Loss",
            "train loss (lower is better)0.500 → 0.750",
            "held-out loss (lower is better)0.500 → 0.750",
        ),
    ],
)
def test_a_run_is_shown_by_what_it_works_towards(tmp_path, metric, score, heading, card, evaluation):
    with RunLog(tmp_path, 2, console=Console(file=io.StringIO())) as log:
        for step, value in ((0, 0.5), (1, 0.75)):
            log.log_evaluation(step, "held_out", {"pairs": 3, score: value})
            log.log_step(step, {metric: value, "preference/loss": 0.7 - step})
    page, source = report(tmp_path)
    assert card in page.text and evaluation in page.text
    assert f"<h2>{heading}</h2>" in source and f'aria-label="{heading} by step"' in source
    assert f'aria-label="{metric}"' not in source, "not once more among the other metrics"
    # A loss has an axis of its own range, a reward or a share one from 0.
    chart = source[source.index(f'aria-label="{heading} by step"') :]
    assert ('text-anchor="end">0<' in chart[: chart.index("</svg>")]) == (heading != "Loss")
    words = words_of(drawing(tmp_path))
    assert heading in words and f"{card.partition('0.5')[0].partition('50%')[0]} of each step's batch" in words


def test_the_aim_is_the_first_that_has_a_value_and_a_run_may_have_none(tmp_path):
    assert [aim.metric for aim in AIMS] == ["reward/mean", "preference/accuracy", "supervised/loss"]
    with RunLog(tmp_path, 1, console=Console(file=io.StringIO())) as log:
        log.log_evaluation(0, "held_out", {"accuracy": 0.5})
        page, _ = report(tmp_path)
        assert "Evaluations" in page.text and aim_of(read_run(tmp_path)) is None
        log.log_step(0, {"reward/mean": float("nan"), "supervised/loss": 2.0})
    assert aim_of(read_run(tmp_path)).metric == "supervised/loss"


def test_curve_goes_through_its_points_and_a_gap_lifts_the_pen():
    chart = line_chart([Series(x=[0, 1, 2, 3], y=[0.0, 1.0, None, 1.0])], width=166, height=134, title="t")
    # Margins 54 left, 12 right, 10 top, 24 bottom leave 100 x 100 pixels for x in [0, 3] and y in [0, 1].
    assert 'd="M54.0 110.0 L87.3 10.0 M154.0 10.0"' in chart


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (-3.0, 9.0, [-5.0, 0.0, 5.0, 10.0]),
        (0.0, 0.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (2.0, 2.0, [0.0, 0.5, 1.0, 1.5, 2.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_step_axis_has_whole_numbers_only():
    assert whole_ticks(0, 12) == [0, 2, 4, 6, 8, 10, 12]
    assert whole_ticks(0, 1) == [0, 1]
    assert whole_ticks(7, 7) == [7]


def test_numbers_are_written_short_and_neighbouring_ticks_differ():
    assert [short(v) for v in (0, 0.25, 12.0, 3559.4, 12345, 2.5e9, 1e-5)] == [
        "0",
        "0.25",
        "12",
        "3559",
        "12.3k",
        "2.5G",
        "1e-05",
    ]
    assert [tick_label(v, 2e-5) for v in (0.99998, 1.0)] == ["0.99998", "1.00000"]


def test_moving_average_has_no_bias_at_its_start():
    assert smooth([2.0, 2.0, None, 2.0], 0.9) == pytest.approx([2.0, 2.0, None, 2.0])
    assert smooth([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])


def test_areas_lie_upon_one_another_and_the_highest_moment_is_marked():
    drawn = stacked_areas(
        [("low", [1, 1, 2]), ("high", [0, 3, 1])], [0, 5, 10], width=162, height=134, title="t", mark="here"
    )
    # From 54 to 150 pixels go 0 to 10, and from 110 up to 10 go 0 to 4: 25 pixels each.
    shapes = dict(re.findall(r'class="fill (c\d)" points="([^"]*)"', drawn))
    assert shapes["c0"] == "54.0,110.0 54.0,85.0 102.0,85.0 150.0,60.0 150.0,110.0"
    assert shapes["c1"] == "54.0,110.0 54.0,85.0 102.0,10.0 150.0,35.0 150.0,110.0"
    assert drawn.index('"fill c1"') < drawn.index('"fill c0"'), "the lower one covers the other's foot"
    assert 'class="peak" cx="102.0" cy="10.0" r="4.5"><title>here' in drawn


def test_the_longest_bar_has_all_the_room_and_names_are_no_markup():
    drawn = bars([("<a>", 8.0, "8 MB", "c0"), ("b", 2.0, "2 MB", "c1")], width=1000, title="t")
    assert re.findall(r'class="fill (c\d)" x="550" y="(\d+)" width="([\d.]+)"', drawn) == [
        ("c0", "4", "340.0"),
        ("c1", "26", "85.0"),
    ]
    assert "&lt;a&gt;" in drawn and "8 MB" in drawn


ODD_SAMPLES = [
    *("null", "[]", "[" * 50_000, '{"step": 1, "split": ' + "[" * 50_000, "\ud800", "\0\0", '{"step": NaN}'),
    *(
        json.dumps({"step": 1, "split": "train", "number": 0, "prompt": "p", "answer": "", "reply": "r"} | changed)
        for changed in [
            *({"reward": "high"}, {"reward": float("nan")}, {"reward": 10**400}, {"reward": [1]}, {"prompt": None}),
            *({"reply": ["r"]}, {"answer": 7}, {"turns": "all"}, {"turns": [1]}, {"turns": [{"by": "policy"}]}),
            *({"split": 3}, {"number": "0"}, {"step": 10**30}, {"step": True}, {"turns": {"by": "policy"}}),
        ]
    ),
]
ODD_METRICS = [
    '{"kind": "step"}',
    *(
        json.dumps({"kind": "step", "step": 99} | changed)
        for changed in [
            *({"reward/mean": float("inf")}, {"reward/mean": 10**400}, {"time/step": [1.0]}, {"step": 1.5}),
            *({"histogram/reply_tokens": {"1 to 2": "x"}}, {"elapsed_s": "long"}, {"kind": "evaluation", "name": 1}),
            *({"kind": [], "name": "x"}, {"x": {"y": {"z": 1}}}, {"kind": "other", "name": "x"}),
        ]
    ),
]
ODD_VALUES = [
    *({"reward/mean": "text"}, {"reward/mean": {"1": 2}}, {"time/step": "long"}, {"time/step": True}, {"time/x": {}}),
    *({"histogram/reply_tokens": {"": 1, "x": 2, "3 to 4": None}}, {"histogram/reply_tokens": 5}, {"tiny": 5e-324}),
    *({"mismatch/mean_age_": 1.0, "mismatch/mean_age_x": 0.5}, {"huge": -9e299}, {"huge": 9e299}, {"half": "\ud800"}),
    *({"kind": "evaluation", "name": "\ud800", "accuracy": "x"}, {"kind": "evaluation", "name": "odd", "accuracy": 1}),
]


def test_odd_lines_do_not_cost_the_report_and_are_named(tmp_path, caplog):
    """Of the wrong type, deep, huge, not a number, not UTF-8: each is left out, or costs its own value alone."""
    write_run(tmp_path)
    calm, _ = report(tmp_path)
    for name, lines in {"samples": ODD_SAMPLES, "metrics": ODD_METRICS}.items():
        with (tmp_path / f"{name}.jsonl").open("ab") as file:
            file.write(b"\xff\xfe{\n" + "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))
    half = json.dumps({"step": 11, "split": "train", "number": 0, "prompt": "\ud800", "reply": "half a character"})
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(half + "\n")
    with (tmp_path / "config.yaml").open("ab") as file:
        file.write(b"# \xff\n")
    page, _ = report(tmp_path)
    assert f"samples.jsonl: {len(ODD_SAMPLES) + 1} line(s) are damaged and left out" in caplog.text
    assert f"metrics.jsonl: {len(ODD_METRICS) + 1} line(s) are damaged and left out" in caplog.text
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(errors="replace").splitlines()[:1]]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for number, values in enumerate(ODD_VALUES):
            file.write(json.dumps({"kind": "step", "step": 100 + number} | steps[0] | {"step": 100 + number} | values))
            file.write("\n")
    report(tmp_path)
    compare([tmp_path, shutil.copytree(tmp_path, tmp_path / "second")])
    with RunLog(tmp_path, 200, console=Console(file=io.StringIO()), first_step=150):
        pass
    assert read_run(tmp_path).steps[-1]["step"] < 150
