"""The report of a run that is long or goes on: its size, what it keeps, its live page, and pictures for papers."""

import http.client
import importlib.util
import io
import json
import re
import shutil
import subprocess
import threading
import time
import tracemalloc
from urllib.parse import urlencode
from xml.etree import ElementTree

import pytest
from rich.console import Console

from megatron_rl import cli
from megatron_rl.telemetry.run_log import RunLog, Sample, Turn, read_run
from megatron_rl.tools.report.charts import Series, line_chart
from megatron_rl.tools.report.figures import write_figures
from megatron_rl.tools.report.live_script import LIVE_SCRIPT
from megatron_rl.tools.report.report import write_report
from megatron_rl.tools.report.report_samples import SCRIPT
from megatron_rl.tools.report.sample_index import SampleIndex
from megatron_rl.tools.watch.live_report import MOST_SENT
from megatron_rl.tools.watch.watch import WatchServer
from tests.kit.waiting import LATE_S, wait_until


def write_run(folder, steps, *, letters=20, samples=2, first=0, metrics=3, every=1):
    """A run with `samples` replies of `letters` characters in each step, and an evaluation every 1000 steps."""
    with RunLog(folder, steps, console=Console(file=io.StringIO(), quiet=True), first_step=first) as log:
        log.log_config("run: {}\n")
        for step in range(first, steps):
            filling = f"<step {step}> é{'abcdefghi ' * (letters // 10)}"
            replies = [Sample(prompt=f"p{step}", reply=filling, reward=step % 2, answer="7") for _ in range(samples)]
            if step % 1000 == 0:
                log.log_evaluation(step, "held_out", {"accuracy": step / steps}, replies)
            own = {f"own/metric_{number}": step % (number + 2) for number in range(metrics)}
            own |= {"reward/mean": 9.0 if step == steps // 2 else 0.5, "time/step": 2.0, "time/update": 1.0}
            own |= {"histogram/reply_tokens": {"16 to 31": 3, "32 to 63": step % 3}}
            log.log_step(step, own, replies if step % every == 0 else [])
    return folder


def rows_of(page: str) -> list[list]:
    return json.loads(re.search(r"id='samples'>(.*?)</script>", page)[1])["rows"]


def test_a_long_curve_keeps_its_extremes_and_its_gaps_and_loses_the_crowd():
    y = [0.5] * 4000
    y[1234], y[2345] = 7.0, -3.0
    y[3000:3100] = [None] * 100
    path = re.search(r'd="([^"]*)"', line_chart([Series(x=list(range(4000)), y=y)], title="t", y_zero=False))[1]
    points = re.findall(r"([ML])([\d.]+) ([\d.]+)", path)
    assert len(points) < 300 and [pen for pen, _, _ in points].count("M") == 2
    heights = [float(height) for _, _, height in points]
    # The axis has ticks from -5 to 7.5, and the chart 136 pixels between its margins.
    for value in (7.0, -3.0):
        assert min(abs(height - (146 - (value + 5) / 12.5 * 136)) for height in heights) < 0.1


def test_samples_of_a_long_run_are_spread_over_its_steps_and_their_texts_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.tools.report.report_samples.SAMPLE_BYTES", 20_000)
    monkeypatch.setattr("megatron_rl.tools.report.report_samples.LETTERS", 100)
    page = write_report(write_run(tmp_path, 200, letters=1000)).read_text()
    rows = rows_of(page)
    steps = [row[1] for row in rows if row[0] == "train"]
    assert 20 < len(rows) < 402 and f"<small>{len(rows)} of 402 in samples.jsonl" in page
    assert steps == sorted(steps) and max(b - a for a, b in zip([0, *steps], [*steps, 201], strict=True)) < 25
    assert all(re.fullmatch(r"<step \d+> .{80,93} \.\.\. \d+ more characters are in samples.jsonl", r[5]) for r in rows)


def test_a_long_dialogue_is_cut_after_the_first_turns(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.tools.report.report_samples.SAMPLE_BYTES", 2000)
    monkeypatch.setattr("megatron_rl.tools.report.report_samples.LETTERS", 100)
    turns = [Turn(by="policy" if n % 2 else "others", text=f"{n:>40}") for n in range(60)]
    with RunLog(tmp_path, 1, console=Console(quiet=True)) as log:
        log.log_step(0, {"reward/mean": 1.0}, [Sample(prompt="p", reply="r", reward=1.0, turns=turns)])
    (row,) = rows_of(write_report(tmp_path).read_text())
    assert [by for by, _ in row[6]] == ["policy", "others", "others"]
    assert row[6][2][1] == "... 57 more turns are in samples.jsonl"


def test_an_index_finds_rows_that_are_written_later_logged_again_damaged_or_of_another_make(tmp_path):
    path = tmp_path / "samples.jsonl"
    index = SampleIndex(path)
    index.update()
    assert len(index) == 0 and index.rows(index.places()) == []
    write_run(tmp_path, 3)
    whole = read_run(tmp_path).samples
    index.update()
    assert [(row["split"], row["step"], row["number"]) for row in index.rows(index.places())] == sorted(
        (row["split"], row["step"], row["number"]) for rows in whole.values() for row in rows
    )
    with path.open("a") as file:
        file.write('{"split": "train", "number": 1, "step": 2, "reply": "other order"}\n')
        file.write('{"step": 5, "split": "train", "number": 0, "reply": 7}\n')  # its reply is no text
        file.write('rubbish\n{"step": 6, "split": "train", "number": 0, "reply": "not yet')
    index.update()
    kept = index.rows(index.places([("train", 2)]))
    assert [row["reply"] for row in kept] == [whole["train", 2][0]["reply"], "other order"]
    assert index.rows(index.places([("train", 5)])) == [] and ("train", 6) not in index.blocks
    with path.open("a") as file:
        file.write(' but now"}\n')
    index.update()
    assert [row["reply"] for row in index.rows(index.places([("train", 6)]))] == ["not yet but now"]
    write_run(tmp_path, 2, first=1)  # the run has resumed, which writes the file anew
    index.update()
    assert {step for _, step in index.blocks} == {0, 1}
    assert len(index) == sum(map(len, read_run(tmp_path).samples.values()))


def test_a_search_finds_words_in_any_case_with_quotes_and_of_any_language(tmp_path):
    texts = ['say "Hello"\nthere', "ÄRGER und Öl", "back\\slash", "<b> & co", "nothing"]
    with RunLog(tmp_path, 1, console=Console(quiet=True)) as log:
        samples = [Sample(prompt="p", reply=text, reward=1.0, answer="A7") for text in texts]
        dialogue = [Turn(by="others", text="p"), Turn(by="policy", text="MOVE e4")]
        log.log_step(0, {}, [*samples, Sample(prompt="p", reply="x", reward=0.0, turns=dialogue)])
    index = SampleIndex(tmp_path / "samples.jsonl")
    index.update()

    def found(words):
        return [row["number"] for row in index.search(words.split(), index.places(), most=10)]

    assert found('"hello" THERE') == [0] and found("ärger öL") == [1] and found("back\\SLASH a7") == [2]
    assert found("<B> co") == [3] and found("move E4") == [5] and found("hello nothing") == []
    assert found("train") == [] and found("reply") == [], "names of columns are no text"
    assert len(index.search([], index.places(), most=2)) == 2


# -- live --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    """A run's folder and a function that asks its server: status, headers and body of a GET."""
    write_run(tmp_path, 3)
    with WatchServer(tmp_path, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()

        def ask(path, **headers):
            connection = http.client.HTTPConnection(*server.server_address[:2], timeout=LATE_S)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read().decode()
            connection.close()
            return answer.status, answer.headers, body

        ask.url = server.url.rstrip("/")
        yield tmp_path, ask
        server.shutdown()
        thread.join()


def test_a_live_report_follows_the_run_and_is_sent_again_only_if_it_has_changed(served):
    folder, ask = served
    status, headers, page = ask("/report")
    assert status == 200 and "data-live=yes" in page and "default-src 'none'" in headers["Content-Security-Policy"]
    assert rows_of(page) == [] and "3 steps, median" in page and "src=" not in page
    known = {"If-None-Match": headers["ETag"]}
    status, _, page = ask("/report", **known)
    assert status == 304 and page == ""
    write_run(folder, 5, first=3)
    wait_until(lambda: ask("/report", **known)[0] == 200, "the page of five steps")
    assert "5 steps, median" in ask("/report")[2]


def test_a_live_report_searches_all_samples_of_the_run(served):
    folder, ask = served
    write_run(folder, 80, first=3)

    def found(**query):
        status, _, body = ask(f"/samples.json?{urlencode(query)}")
        assert status == 200
        return json.loads(body)

    answer = found(find="p7", split="train", order="newest")
    assert [row[1] for row in answer["rows"]] == [80, 80, *(step for step in range(79, 70, -1) for _ in "ab"), 8, 8]
    assert answer["note"] == "22 found"
    answer = found(order="oldest")
    assert len(answer["rows"]) == MOST_SENT and answer["note"] == f"the oldest {MOST_SENT} of those found"
    assert {row[2] for row in found(find="p7", order="best")["rows"][:8]} == {1}
    assert found(find="p7", order="worst")["rows"][0][2] == 0
    assert {row[0] for row in found(split="held_out")["rows"]} == {"held_out"}
    assert found(find="nowhere") == {"rows": [], "note": "0 found"}
    assert found(order="<b>", split="../x", find='"')["rows"] == []


# Enough of a browser's document for the page's two scripts, in an engine that has none.
DOCUMENT = """
class Node {
  constructor(tag) { this.tag = tag; this.children = []; this.own = ""; this.heard = {}; this.dataset = {}; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  replaceWith(other) { known[this.id] = other; }
  querySelectorAll() { return []; }
  addEventListener(name, act) { this.heard[name] = act; }
  get firstChild() { return this.children[0]; }
  set textContent(text) { this.own = String(text); }
  get textContent() { return this.own + this.children.map((child) => child.textContent).join("|"); }
}
const known = {}, body = new Node("body");
const document = new Node("document");
Object.assign(document, {
  body, createElement: (tag) => new Node(tag), adoptNode: (node) => node,
  getElementById: (id) => known[id] || (known[id] = Object.assign(new Node(id), { id })),
  dispatchEvent: (event) => document.heard[event.type] && document.heard[event.type](),
});
class DOMParser {
  parseFromString(text) {
    const parts = [...text.matchAll(/<section id='([^']*)'>(.*?)<.section>/gs)];
    return { querySelectorAll: () => parts.map(([, id, innerHTML]) => Object.assign(new Node(id), { id, innerHTML })) };
  }
}
const later = [];
const setTimeout = (act) => later.push(act);
const put = (id, values) => Object.assign(document.getElementById(id), values);
body.dataset.live = "yes";
put("find", { value: "" }); put("split", { value: "all" }); put("order", { value: "newest" });
put("samples", { textContent: '{"rows": []}' });
"""


def run_in_node(script):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed (apt package nodejs)")
    done = subprocess.run([node, "-"], input=script, capture_output=True, text=True, timeout=LATE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_scripts_of_a_live_page_ask_the_server_and_show_what_is_new(served):
    folder, ask = served
    acts = """
      const settled = () => new Promise((done) => setImmediate(() => setImmediate(done)));
      const wait = async (holds) => { for (let n = 0; n < 10000 && !holds(); n++) await settled(); };
      (async () => {
        const said = (id) => document.getElementById(id).textContent;
        await wait(() => said("found"));
        const first = said("rows"), all = said("found");
        put("find", { value: "P1" });
        known.find.heard.input();
        await wait(() => said("found") !== all);
        const found = known.rows.children.length;
        later.shift()();
        await wait(() => said("live"));
        const changed = Object.keys(known).filter((id) => known[id].innerHTML);
        console.log(JSON.stringify([first, all, found, known.live.textContent, changed, later.length]));
      })();
    """
    fetching = f'const fetch = (path, options) => real("{ask.url}" + path, options);'
    first, everything, found, live, changed, again = run_in_node(
        f"const real = fetch; {{ {DOCUMENT} {fetching} {SCRIPT} {LIVE_SCRIPT} {acts} }}"
    )
    assert first.startswith("3|0|p2|7|<step 2> é") and everything == "8 found"
    assert found == 2 and live == "live" and again == 1
    assert "headline" in changed and "samples-part" not in changed, "what a reader looks for stays"


def test_the_live_report_is_not_for_other_pages_of_a_browser(served):
    _, ask = served
    for path in ("/report", "/samples.json?find=p"):
        assert ask(path, Host="evil.example:80")[0] == 403


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_each_chart_becomes_a_file_for_papers(tmp_path, capsys):
    write_run(tmp_path, 40)
    cli.main(["report", str(tmp_path), "--format", "svg"])
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == ["main.svg", "time.svg"] and str(tmp_path / "figures" / "time.svg") in capsys.readouterr().out
    root = ElementTree.parse(tmp_path / "figures" / "main.svg").getroot()
    assert "var(" not in "".join(root.itertext()) and float(root.get("width")) < 600
    assert any(path.get("d") for path in root.iterfind(".//{*}path"))


def test_a_pdf_is_drawn_by_matplotlib_with_embedded_fonts_and_no_formula_of_a_name(tmp_path):
    pytest.importorskip("matplotlib")
    with RunLog(tmp_path, 3, console=Console(quiet=True)) as log:
        for step in range(3):
            log.log_evaluation(step, "a$_b{$", {"accuracy": step / 3})
            log.log_step(
                step, {"reward/mean": float("nan") if step == 1 else 0.5, "time/step": 1.0, "policy/loss": 0.1 * step}
            )
    files = write_figures(tmp_path, ["pdf"])
    assert [path.name for path in files] == ["main.pdf", "time.pdf", "policy_loss.pdf"]
    for path in files:
        data = path.read_bytes()
        assert data.startswith(b"%PDF-") and b"/FontFile2" in data and b"CreationDate" not in data


def test_other_formats_and_a_pdf_without_matplotlib_are_refused_by_name(tmp_path, monkeypatch):
    write_run(tmp_path, 1)
    with pytest.raises(ValueError, match="--format svg,png: 'png' must be one of svg, pdf"):
        write_figures(tmp_path, ["svg", "png"])
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(ValueError, match="--format pdf: needs matplotlib, which is not installed"):
        write_figures(tmp_path, ["svg", "pdf"])
    assert not (tmp_path / "figures").exists()


# -- a week ------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_week_of_a_gigabyte_of_samples_has_a_page_that_is_small_and_made_in_little_memory(tmp_path):
    write_run(tmp_path, 5000, letters=25_000, samples=8, metrics=60)
    assert (tmp_path / "samples.jsonl").stat().st_size > 1e9
    tracemalloc.start()
    page = write_report(tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert page.stat().st_size < 5e6 and (tmp_path / "report.svg").stat().st_size < 1e6
    assert most < 400e6, "the page takes the memory of its selection and of the metrics, not that of all samples"
    source = page.read_text()
    # The reward is 9 in one step, of an axis to 10: 36.6 pixels below the top of a chart of 300.
    assert len(rows_of(source)) > 100 and re.search(r"L[\d.]+ 36\.6 ", source)
    begin = time.monotonic()
    json.loads((tmp_path / "samples.jsonl").open().readline())
    write_report(tmp_path)
    print(f"page of {page.stat().st_size / 1e6:.2f} MB, made in {time.monotonic() - begin:.1f} s, {most / 1e6:.0f} MB")
