"""The script of the first hour on GPUs, with stand-ins for its commands, and its looks at what runs have written."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.launch.local import arrange

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "first_hour.sh"

STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys
words = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps(words), file=calls)
if words[0].endswith("first_hour_check.py") and words[1] != "--packages":
    os.execv(sys.executable, [sys.executable, *words])
if "launch" in words:
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    folder = pathlib.Path(settings["run.folder"])
    folder.mkdir(parents=True, exist_ok=True)
    if folder.name == os.environ.get("FAILS"):
        sys.exit("a rank died")
    (folder / "model.safetensors").write_text("weights")
    row = {{"kind": "step", "time/step": 2.0, "publish/bytes": 8e9, "publish/duration_s": 0.5, "mismatch/mean": 0.002}}
    row["publish/verified_tensors"] = 3
    rows = [json.dumps(row | {{"step": step}}) for step in range(int(settings["run.steps"]))]
    (folder / "metrics.jsonl").write_text("\\n".join(rows))
print("done")
"""


@pytest.fixture
def first_hour(tmp_path):
    """Run the script where nvidia-smi and Python are stand-ins; return (status, output, calls of Python)."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"nvidia-smi": "#!/bin/sh\necho 'GPU 7: a stand-in'\n", "python": STAND_IN}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def run(**variables):
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": str(tools / "python")}
        environment |= {"CALLS": str(calls), "FIRST_HOUR_SLOWNESS": "10"} | variables
        done = subprocess.run(
            ["bash", str(SCRIPT), str(tmp_path / "hour")], env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout, list(map(json.loads, calls.read_text().splitlines()))

    return run


def test_every_step_is_run_and_the_archive_has_logs_without_weights(first_hour, tmp_path):
    status, said, calls = first_hour()
    lines = said.splitlines()
    assert status == 0 and len(lines) == 13, said
    assert all(re.match(r"[a-z-]+ +ok, \d+ s: .", line) for line in lines[:-1]), said
    assert "4 steps, the last in 2.0 s; published 8.00 GB in 0.50 s, 3 checksums of weights agree; 0.00200" in said
    rows = re.findall(r"^\| (\S+) \| ", (ROOT / "docs" / "first_hour.md").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in lines[:-1]] == [row for row in rows if row not in ("step", "---")]
    names = tarfile.open(tmp_path / "hour.tar.gz").getnames()
    assert "hour/01-machine.txt" in names and "hour/qwen/metrics.jsonl" in names
    assert not [name for name in names if name.endswith(".safetensors")]
    for words in calls:
        if "launch" in words:  # what the commands ask for is what configs take and 8 GPUs hold
            first = words.index("launch") + 1
            settings = [word for word in words[first + 1 :] if "=" in word]
            ranks = int(words[words.index("--ranks") + 1]) if "--ranks" in words else None
            config = load_config(ROOT / words[first], settings)
            arrange(config, [str(gpu) for gpu in range(8)], ranks)


def test_a_failure_skips_what_needs_the_step_and_nothing_else(first_hour):
    status, said, _ = first_hour(FAILS="sglang")
    assert status == 1
    assert re.search(r"^sglang +FAILED with status 1, see \S+-sglang.txt: a rank died$", said, re.MULTILINE), said
    outcomes = dict(line.split()[:2] for line in said.splitlines()[:-1])
    skipped = [name for name, outcome in outcomes.items() if outcome == "skipped:" or outcome == "skipped"]
    assert skipped == ["turns", "qwen", "resume", "qwen-turns"] and outcomes["plan"] == "ok,"


def test_single_steps_can_be_asked_for(first_hour):
    status, said, calls = first_hour(STEPS="plan machine")
    assert status == 0 and [line.split()[0] for line in said.splitlines()] == ["machine", "plan", "Logs"]
    assert len(calls) == 1


@pytest.fixture
def summary(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import first_hour_check

    yield first_hour_check.run_summary
    del sys.modules["first_hour_check"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"mismatch/mean": 0.001, "mismatch/mean_age_0": 0.06}, "differ by 0.0600 nats on average, more than 0.05"),
        (None, "has 0 of 1 steps; the log above says why"),
    ],
)
def test_a_run_that_is_not_as_it_should_be_is_said(row, message, summary, tmp_path):
    if row is not None:
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 0} | row))
    with pytest.raises(ValueError, match=message):
        summary(tmp_path, 1)
