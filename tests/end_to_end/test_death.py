"""SIGKILL any process of a run: the others are gone within 30 s, and one line says who died."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from training_runs import COUNT, ROOT, environment

pytestmark = pytest.mark.slow

TOOK_AT_MOST_S = 30.0


def start_run(folder, ranks):
    arguments = [COUNT, "warm_start.updates=0", "run.steps=100000", f"run.folder={folder}", f"parallel.tensor={ranks}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.launch", "--ranks", str(ranks), *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"step"' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.2)
    return process


def family(process):
    """Return the run's processes by role."""
    roles = {"launcher": psutil.Process(process.pid)}
    for child in roles["launcher"].children(recursive=True):
        line = " ".join(child.cmdline())
        if "megatron_rl.serving.server" in line:
            roles.setdefault("server", child)
        elif "megatron_rl.train" in line:
            roles[f"rank {child.environ()['RANK']}"] = child
    return roles, [roles["launcher"], *roles["launcher"].children(recursive=True)]


@pytest.mark.parametrize("victim", ["server", "rank 0", "rank 1", "launcher"])
def test_the_others_end_and_one_line_says_who_died(victim, tmp_path):
    process = start_run(tmp_path / "run", ranks=2)
    roles, everyone = family(process)
    assert {"server", "rank 0", "rank 1"} <= roles.keys()
    os.kill(roles[victim].pid, signal.SIGKILL)
    started = time.monotonic()
    _, alive = psutil.wait_procs(everyone, timeout=TOOK_AT_MOST_S)
    assert not alive, f"{alive} outlived {victim} by {time.monotonic() - started:.0f} s"
    output = process.communicate(timeout=5)[0]
    said = [line for line in output.splitlines() if "died" in line or "was killed by" in line]
    pid = str(roles[victim].pid)
    assert any(pid in line for line in said), output
    assert len([line for line in said if pid in line]) == 1, output
    assert "Traceback" not in output, output
