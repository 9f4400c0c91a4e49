"""The live page of a run: what it tells, of runs that go on and that have ended, and that a browser shows it."""

import asyncio
import http.client
import io
import json
import os
import shutil
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_rl.api import RolloutWorkflow
from megatron_rl.cli import main
from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.rollout.status import FOLDER, SLOWEST, StatusFile
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics
from megatron_rl.telemetry.run_log import RunLog
from megatron_rl.tools.watch import watch as watch_module
from megatron_rl.tools.watch.watch import POINTS, Watch, WatchServer
from megatron_rl.tools.watch.watch_page import PAGE, SCRIPT
from megatron_rl.types import LLMRequest
from tests.kit.replies import RecordingEngine
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S, until

NOW = time.time()
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(autouse=True)
def time_stands_still(monkeypatch):
    """For who looks at a run: how old its words are does not depend on how long a test takes."""
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(time=lambda: NOW))


def write_steps(folder, steps, first=0):
    with RunLog(folder, 1000, console=Console(file=io.StringIO()), first_step=first) as log:
        for step in steps:
            log.log_step(step, {"reward/mean": step / 10, "rollout/staleness": 1.0, "rollout/tokens_per_s": 50.0})


def tell(folder, rank=0, age_s=0.0, **changed):
    status = {"time": NOW - age_s, "pid": 1, "version": 3, "ended": False, "failures": {"AgentTimeout": 2}}
    status |= {"episodes": {"running": 5, "queued": 7}, "servers": [server_of("http://a:1"), server_of("http://b:2")]}
    turns = [{"tokens": 9, "text": HOSTILE}]
    status["slowest"] = [{"prompt": f"p{rank}", "seconds": 60.0 + rank, "version": 2, "replies": 1, "turns": turns}]
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / f"rollout-{rank}.json").write_text(json.dumps(status | changed))


def server_of(url):
    return {"url": url, "state": "serving", "calls": 4, "weights": "3", "failures": 0, "trouble": ""}


def test_the_state_adds_up_what_the_rollout_processes_tell(tmp_path):
    write_steps(tmp_path, range(3))
    tell(tmp_path, 0)
    tell(tmp_path, 1)
    lost = {"time": "2026-01-01T00:00:00+00:00", "error": "ValueError: no", "traceback": "..", "prompt": {}}
    (tmp_path / "dead_letters.jsonl").write_text("half a line\n" + json.dumps(lost) + "\n")
    state = Watch(tmp_path).state()
    assert state["state"] == "running" and "version 3, 3 steps, 2 rollout" in state["about"]
    assert state["episodes"] == {"running": 10, "queued": 14} and state["failures"] == {"AgentTimeout": 4}
    assert [one["prompt"] for one in state["slowest"]] == ["p1", "p0"] and len(state["servers"]) == 2
    assert state["steps"]["reward"] == [0.0, 0.1, 0.2] and state["steps"]["staleness"] == [1.0] * 3
    assert state["lost"] == [{"time": lost["time"], "error": lost["error"]}]


def test_a_run_that_has_ended_says_so_and_one_that_died_is_silent(tmp_path):
    write_steps(tmp_path, range(2))
    assert Watch(tmp_path).state()["state"] == "ended", "a run without rollouts, or of an earlier version"
    tell(tmp_path, 0, age_s=100, ended=True)
    assert Watch(tmp_path).state()["state"] == "ended"
    tell(tmp_path, 1, age_s=100)
    state = Watch(tmp_path).state()
    assert state["state"] == "silent" and state["episodes"] == {} and "100 s ago" in state["about"]


def test_each_step_is_read_once_also_of_a_run_that_was_resumed_earlier(tmp_path):
    write_steps(tmp_path, range(5))
    watch = Watch(tmp_path)
    assert watch.state()["steps"]["step"] == [1, 2, 3, 4, 5]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 5, "reward/mean": 9}\n{"kind": "step", "st')
    assert watch.state()["steps"]["reward"][-1] == 9
    write_steps(tmp_path, range(2, 4), first=2)
    assert watch.state()["steps"]["step"] == [1, 2, 3, 4]


def test_a_chart_has_a_bounded_number_of_points_and_the_last_one(tmp_path):
    lines = [json.dumps({"kind": "step", "step": step, "reward/mean": 0.5}) for step in range(10 * POINTS + 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    steps = Watch(tmp_path).state()["steps"]["step"]
    assert POINTS / 2 < len(steps) <= POINTS and steps[-1] == 10 * POINTS + 1 and steps == sorted(steps)


class Waits(RolloutWorkflow):
    """Asks once, then waits until it is told to end."""

    def __init__(self):
        self.may_end = asyncio.Event()

    async def arun_episode(self, engine, data):
        await engine.agenerate(LLMRequest(rid="r", input_ids=[1]))
        await self.may_end.wait()
        raise OSError("its world is down")


class Versioned(RecordingEngine):
    def get_version(self):
        return 4


@pytest.mark.slow
def test_the_status_of_thousands_of_episodes_is_as_small_as_that_of_a_few(tmp_path):
    engine, sizes = Versioned(make_tokenizer(), ends=("stop",)), {}

    async def run(count):
        config = RolloutConfig(max_concurrent_episodes=count, episode_attempts=1)
        executor, workflow = RolloutExecutor(engine, config, RolloutMetrics()), Waits()
        file = StatusFile(
            tmp_path / FOLDER / "rollout-0.json",
            lambda: executor,
            engine.tokenizer,
            version=engine.get_version,
            servers=lambda: [],
        )
        file.begin()
        prompts = [{"prompt": str(number)} for number in range(count)]
        batch = asyncio.create_task(executor.rollout_batch(prompts, workflow))
        await until(lambda: len(engine.served) == count)
        sizes[count] = len(json.dumps(file.status()))
        state = Watch(tmp_path).state()
        workflow.may_end.set()
        await asyncio.gather(batch, return_exceptions=True)
        failures = file.status()["failures"]
        await file.close()
        engine.served.clear()
        return state, failures

    state, _ = asyncio.run(run(SLOWEST))
    assert state["state"] == "running" and len(state["slowest"]) <= SLOWEST
    _, failures = asyncio.run(run(1500))
    assert sizes[1500] < 2 * sizes[SLOWEST]
    assert failures == {"OSError, given up": 1500}
    ended = json.loads((tmp_path / FOLDER / "rollout-0.json").read_text())
    assert ended["ended"] and ended["episodes"]["running"] == 0 and Watch(tmp_path).state()["state"] == "ended"


def test_the_last_word_of_a_process_comes_after_a_write_that_its_slow_disk_still_does(tmp_path):
    engine = Versioned(make_tokenizer(), script=lambda _: "it is 42<eos>")
    begun, may_write = threading.Event(), threading.Event()

    async def run():
        executor = RolloutExecutor(engine, RolloutConfig(), RolloutMetrics())
        file = StatusFile(tmp_path / "s", lambda: executor, None, version=engine.get_version, servers=lambda: [])
        write = file._write

        def slow(status):
            if not status["ended"]:
                begun.set()
                may_write.wait()
            write(status)

        file._write = slow
        file.begin()
        await asyncio.to_thread(begun.wait)
        closing = asyncio.create_task(file.close())
        for _ in range(10):
            await asyncio.sleep(0)
        may_write.set()
        await closing

    asyncio.run(run())  # ends its threads too
    assert json.loads((tmp_path / "s").read_text())["ended"]


def test_what_a_slow_episode_said_last_is_told(tmp_path):
    engine = Versioned(make_tokenizer(), script=lambda _: "it is 42<eos>")

    async def run():
        executor = RolloutExecutor(engine, RolloutConfig(), RolloutMetrics())
        workflow = Waits()
        batch = asyncio.create_task(executor.rollout_batch([{"prompt": "p", "sample_key": "key"}], workflow))
        file = StatusFile(
            tmp_path / "s", lambda: executor, engine.tokenizer, version=engine.get_version, servers=lambda: []
        )
        await until(lambda: any(one["replies"] for one in file.status()["slowest"]))
        told = file.status()["slowest"]
        batch.cancel()
        executor.fail("the test is over")
        return told

    ((one,),) = [asyncio.run(run())]
    assert one["prompt"] == "key" and one["replies"] == 1 and one["turns"][0]["text"] == "it is 42"


@pytest.fixture
def server(tmp_path):
    write_steps(tmp_path, range(4))
    tell(tmp_path)
    with WatchServer(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def get(server, path, host="127.0.0.1:1"):
    connection = http.client.HTTPConnection(*server.server_address, timeout=LATE_S)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def test_the_page_is_served_to_this_host_alone_and_needs_nothing_from_elsewhere(server):
    assert server.server_address[0] == "127.0.0.1"
    status, page, headers = get(server, "/")
    assert status == 200 and page.decode() == PAGE and "default-src 'none'" in headers["Content-Security-Policy"]
    assert "http" not in PAGE.replace("http://www.w3.org/2000/svg", "")
    assert json.loads(get(server, "/state.json")[1])["episodes"] == {"running": 5, "queued": 7}
    assert get(server, "/state.json", host="evil.example:80")[0] == 403
    assert get(server, "/../config.yaml")[0] == 404


def test_the_command_refuses_a_folder_without_a_run_and_a_port_in_use(server, tmp_path):
    (tmp_path / "empty").mkdir()
    for words, message in (
        ([str(tmp_path / "empty")], "no run has begun there"),
        ([str(tmp_path), "--port", str(server.server_address[1])], "give another one, or 0"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(["watch", *words])


# Enough of a browser's document for the page's script, in an engine that has none.
DOCUMENT = """
class Node {
  constructor(tag) { this.tag = tag; this.children = []; this.own = ""; this.attributes = {}; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  setAttribute(name, value) { this.attributes[name] = value; }
  set textContent(text) { this.own = String(text); }
  get textContent() { return this.own + this.children.map((child) => child.textContent).join("|"); }
}
const known = {};
const document = {
  getElementById: (id) => known[id] || (known[id] = new Node(id)),
  createElement: (tag) => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
};
let asked = 0;
const setTimeout = (again, ms) => { asked += 1; };
"""


def run_in_node(script):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed (apt package nodejs)")
    done = subprocess.run([node, "-"], input=script, capture_output=True, text=True, timeout=LATE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_script_shows_the_state_that_it_is_given(server):
    fetching = f'const fetch = (path) => real("{server.url}" + path);'
    told = "Object.fromEntries(Object.entries(known).map(([id, node]) => [id, node.textContent]))"
    path = "known.reward.children[0].attributes.d"
    last = f"ask().then(() => console.log(JSON.stringify([{told}, {path}, asked])));"
    body = SCRIPT.rstrip().removesuffix("ask();") + last
    shown, drawn, again = run_in_node(f"const real = fetch; {{ {DOCUMENT} {fetching} {body} }}")
    assert shown["state"] == "running" and shown["gone"] == "" and again == 1
    assert "running|5" in shown["episodes"] and "AgentTimeout|2" in shown["failures"]
    assert HOSTILE in shown["slowest"] and "1:00 min" in shown["slowest"] and "http://b:2|serving" in shown["servers"]
    assert shown["reward-words"] == "0.3 (step 4), 0 to 0.3" and drawn.startswith("M4.0 76.0") and drawn.count("L") == 3


def test_after_a_run_no_empty_table_is_left():
    """What an ended run has no line of, such as episodes in flight, is not shown; what it has is."""
    nothing = {"episodes": {}, "failures": {"AgentTimeout": 2}, "servers": [], "slowest": [], "lost": []}
    steps = {"step": [1], "reward": [0.5], "staleness": [0], "tokens_per_s": [9]}
    state = {"run": "mine", "state": "ended", "about": "1 steps", "steps": steps, **nothing}
    body = SCRIPT.rstrip().removesuffix("ask();")
    for words, hidden in (("ended", True), ("running", False)):
        shown = f"show({json.dumps(state | {'state': words})});"
        told = "Object.fromEntries(Object.entries(known).map(([id, node]) => [id, node.hidden]))"
        found = run_in_node(f"{{ {DOCUMENT} {body} {shown} console.log(JSON.stringify({told})); }}")
        assert all(found[f"{name}-part"] is hidden for name in ("episodes", "servers", "slowest", "lost"))
        assert found["failures-part"] is False and found["after"] is not hidden


def test_the_script_says_that_nobody_answers_and_asks_again():
    last = "ask().then(() => console.log(JSON.stringify([known.gone.textContent, asked])));"
    body = SCRIPT.rstrip().removesuffix("ask();") + last
    fetching = 'const fetch = () => Promise.reject(new Error("refused"));'
    words, again = run_in_node(f"{{ {DOCUMENT} {fetching} {body} }}")
    assert "does not answer (refused); start it again" in words and again == 1


def test_a_browser_shows_the_page_and_runs_nothing_that_a_model_wrote(server, tmp_path):
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine (apt package chromium)")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    asked = [browser, *arguments, "--virtual-time-budget=4000", "--dump-dom", server.url]
    dom = subprocess.run(asked, capture_output=True, text=True, timeout=LATE_S, check=True).stdout
    assert "<title>megatron-rl watch" in dom and "<img" not in dom and "&lt;img src=x" in dom
    assert "<td>running</td><td>5</td>" in dom and 'd="M4.0 76.0' in dom


ODD_STATUS = {
    "deep": "[" * 100_000,
    "deep in a field": json.dumps({"time": NOW, "version": 1, "servers": [{"url": "u", "trouble": "DEEP"}]}).replace(
        '"DEEP"', "[" * 500 + "]" * 500
    ),
    "huge number": json.dumps({"time": NOW, "version": 10**400}),
    "too many digits": '{"time": ' + "1" * 5000 + "}",
    "NaN": '{"time": NaN, "version": 1}',
    "infinite": '{"time": 1e999, "version": 1}',
    "null": "null",
    "list": "[]",
    "empty": "",
    "not UTF-8": b"\xff\xfe\x00",
    "no version": json.dumps({"time": NOW}),
    "large": b" " * ((1 << 22) + 1),
    **{
        f"{name} = {value!r}": json.dumps({"time": NOW, "version": 1, name: value})
        for name, value in {
            **{"version": "three", "episodes": [1], "failures": {"x": "many"}, "servers": [{"state": 1}]},
            **{"slowest": [{"seconds": "long", "turns": []}], "ended": "no"},
        }.items()
    },
    "servers that are texts": json.dumps({"time": NOW, "version": 1, "servers": ["http://a:1"]}),
    "turns of numbers": json.dumps({"time": NOW, "version": 1, "slowest": [{"seconds": 1, "turns": [1]}]}),
}


@pytest.mark.parametrize("kind", [*ODD_STATUS, "folder", "pipe", "link to nothing"])
def test_an_odd_status_file_is_left_out_of_the_page_and_named(kind, tmp_path):
    write_steps(tmp_path, range(3))
    tell(tmp_path, 0)
    path = tmp_path / FOLDER / "rollout-1.json"
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link to nothing":
            path.symlink_to("gone")
        case _:
            content = ODD_STATUS[kind]
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "step": 3, "reward/mean": NaN}\n\xff\n' + b"[" * 50_000 + b"\n")
    os.mkfifo(tmp_path / "dead_letters.jsonl")
    state = Watch(tmp_path).state()
    assert state["state"] == "running" and state["steps"]["step"] == [1, 2, 3] and len(state["servers"]) == 2
    assert state["about"].endswith("; damaged and left out: rollout-1.json, 3 lines of metrics.jsonl")
    json.dumps(state, allow_nan=False)
