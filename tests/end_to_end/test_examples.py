"""Each example runs as its README says, on a tiny model and for a step or two.

`make test` has the one that is a program and one that is a config and a service; the agent's and the debate's
workflows are trained in test_trained_workflows.py, and answers in test_data_runs.py.
"""

import json
import os
import re
import runpy
import sys
import threading
from http.server import ThreadingHTTPServer

import pytest

from megatron_rl.train import main
from tests.kit.forks import check_end
from tests.kit.ranks import fork, run_ranks
from tests.kit.runs import ROOT, steps_of
from tests.kit.talkative_model import make_talkative_model
from tests.kit.waiting import LATE_S

pytestmark = pytest.mark.slow

QUERY = '<tool_call>{"name": "search", "arguments": {"query": "Arden"}}</tool_call>'
SMALL = (
    *("generation.n_samples=2", "generation.max_new_tokens=8", "batch.prompts_per_step=2", "run.steps=1"),
    *("rollout.reward_workers=1", "rollout.backend=embedded", "data.evaluation=", "data.evaluation_args={}"),
    "run.save_at_end=false",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Nearly every second token of its vocabulary is a query, so that it does look things up.
    return make_talkative_model(tmp_path_factory.mktemp("model"), words=[QUERY, *(f"{QUERY} {n}" for n in range(90))])


def run_script(name, *arguments, folder):
    """Run it in a process that need not import anything; return what it printed."""

    def script(words):
        os.chdir(folder)
        path = ROOT / "examples" / name
        sys.argv, sys.path[:0] = words, [str(path.parent)]
        runpy.run_path(str(path), run_name="__main__")

    output = folder / "output.txt"
    check_end([fork(script, [name, *map(str, arguments)], output)], output)
    return output.read_text()


def launched(config, *overrides):
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    main([f"examples/{config}/config.yaml", *overrides])


def train(name, model, folder, *overrides):
    settings = (f"model.path={model}", f"run.folder={folder}", *SMALL, *overrides)
    run_ranks(1, launched, name, *settings, timeout_s=LATE_S)
    return steps_of(folder)


def test_own_task_trains_in_one_process_without_a_launcher(model, tmp_path):
    printed = run_script("own_task/train.py", model, folder=tmp_path)
    assert re.findall(r"held-out reward (before|after): [0-9.]+", printed) == ["before", "after"]
    assert len(re.findall(r"step \d: reward", printed)) == 8
    assert (tmp_path / "runs/own_task/final/model.safetensors").is_file()


@pytest.mark.thorough
def test_agent_is_trained_on_both_of_its_replies(model, tmp_path):
    (step,) = train("agent", model, tmp_path / "run")
    assert step["batch/trained_tokens"] > 2 * 2 * 8, "2 prompts x 2 samples have more than one reply of 8 tokens"


@pytest.mark.thorough
def test_debate_trains_each_agents_dialogue(model, tmp_path):
    (step,) = train("debate", model, tmp_path / "run")
    assert step["batch/trained_tokens"] > 2 * 2 * 2 * 8, "each of two agents has more than one reply of 8 tokens"


@pytest.mark.thorough  # tools train in test_trained_workflows.py
def test_search_tool_is_asked_by_the_policy(model, tmp_path):
    sys.path.insert(0, str(ROOT))
    from examples.search_tool.service import Answers

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tools = {"megatron_rl.workflows.tools:Search": {"url": f"http://127.0.0.1:{server.server_port}/", "top": 2}}
    arguments = json.dumps({"tools": tools, "max_tokens": 500, "max_turns": 3})
    (step,) = train("search_tool", model, tmp_path / "run", f"rollout.workflow_args={arguments}")
    server.shutdown()
    assert step["batch/trained_tokens"] > 2 * 2 * 8, "some dialogues go on after a search"


@pytest.mark.thorough
def test_distillation_trains_a_student_on_its_teachers_replies(model, tmp_path):
    rows = tmp_path / "replies.jsonl"
    printed = run_script("distillation/teacher.py", model, rows, folder=tmp_path)
    written = len(rows.read_text().splitlines())
    assert f"{written} replies of the teacher" in printed and 12 <= written <= 16, "by chance a reply is empty"
    settings = (f"model.path={model}", f"data.train={rows}", f"run.folder={tmp_path}/run", "run.steps=2")
    run_ranks(1, main, [str(ROOT / "examples/distillation/config.yaml"), *settings], timeout_s=LATE_S)
    assert len(steps_of(tmp_path / "run")) == 2
