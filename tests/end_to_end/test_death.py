"""SIGKILL any process of a run. A killed server is restarted and the run goes on. Where anything else dies, the others
are gone within 30 s, and one line says who died.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.kit.runs import COUNT, ROOT, environment, steps_of

pytestmark = pytest.mark.slow

TOOK_AT_MOST_S = 30.0
PROMPTS, SAMPLES = 8, 4
SMALL = (f"batch.prompts_per_step={PROMPTS}", f"generation.n_samples={SAMPLES}", "data.evaluation=")
VICTIMS = {"servers": (1, 2), "rank 0": (2, 1), "rank 1": (2, 1), "rollout 0": (1, 1), "launcher": (2, 1)}
"""Who is killed, in a run of so many ranks and servers."""


@pytest.fixture
def start_run():
    """Starts runs, and kills what a failed test leaves of them."""
    started = []
    yield lambda *args: start(started, *args)
    for process in started:
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
            process.communicate()


def start(started, folder, ranks, *overrides):
    arguments = [COUNT, *SMALL, "warm_start.updates=0", "run.steps=100000", f"run.folder={folder}", *overrides]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.launch", "--ranks", str(ranks), *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started.append(process)
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
        if "megatron_rl.tools.embedded_server.server" in line:
            roles[f"server {line.partition('server-')[2].partition('.')[0]}"] = child
        elif "megatron_rl.rewards" in line:
            pass  # the rollout process's own
        elif "megatron_rl.rollout" in line:
            roles[f"rollout {child.environ()['RANK']}"] = child
        elif "megatron_rl.train" in line:
            roles[f"rank {child.environ()['RANK']}"] = child
    return roles, [roles["launcher"], *roles["launcher"].children(recursive=True)]


@pytest.mark.parametrize("victim", VICTIMS)
def test_the_others_end_and_one_line_says_who_died(start_run, victim, tmp_path):
    ranks, servers = VICTIMS[victim]
    layout = (f"parallel.tensor={ranks}", f"rollout.server_count={servers}")
    process = start_run(tmp_path / "run", ranks, *layout, "rollout.server_restarts=0")
    roles, everyone = family(process)
    started = [f"rank {number}" for number in range(ranks)] + [f"server {number}" for number in range(servers)]
    assert roles.keys() == {"launcher", "rollout 0", *started}
    victims = [role for role in roles if role.startswith("server")] if victim == "servers" else [victim]
    for role in victims:
        os.kill(roles[role].pid, signal.SIGKILL)
    started = time.monotonic()
    _, alive = psutil.wait_procs(everyone, timeout=TOOK_AT_MOST_S)
    assert not alive, f"{alive} outlived {victim} by {time.monotonic() - started:.0f} s"
    output = process.communicate(timeout=5)[0]
    # A server whose call failed before its death was seen has the call's reason, not the signal.
    said = [line for line in output.splitlines() if "died" in line or "was killed" in line]
    for role in victims:
        assert len([line for line in said if str(roles[role].pid) in line]) == 1, output
    assert "Traceback" not in output, output


def test_training_goes_on_while_servers_are_killed_and_restarted(start_run, tmp_path):
    folder = tmp_path / "run"
    process = start_run(folder, 2)  # two rollout ranks, each with a client of its own
    printed: list[str] = []

    def read():
        for line in process.stdout:
            printed.append(line)

    threading.Thread(target=read, daemon=True).start()

    def restarts():
        # By SIGKILL, or where a call failed before that was seen: by its supervisor, for that reason.
        return len(re.findall(r"rollout server \d \(pid \d+\) was killed.*; restart \d", "".join(printed)))

    def wait_for(holds):
        """Wait for a step of which it holds, and return the number of the last step."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert process.poll() is None, "".join(printed)
            if any(holds(step) for step in steps_of(folder)):
                return steps_of(folder)[-1]["step"]
            time.sleep(0.1)
        raise AssertionError("".join(printed))

    roles, everyone = family(process)
    try:
        # One of two: the other one gives all replies until the first is back.
        os.kill(roles["server 0"].pid, signal.SIGKILL)
        lost = wait_for(lambda step: step["rollout/servers"] == 1)
        wait_for(lambda step: step["rollout/servers"] == 2 and step["step"] > lost)
        # Both: the ranks wait for one, and publish the weights of the step once more.
        roles, everyone = family(process)
        for number in (0, 1):
            os.kill(roles[f"server {number}"].pid, signal.SIGKILL)
        down = wait_for(lambda _: restarts() == 3)
        wait_for(lambda step: step["rollout/servers"] == 2 and step["step"] > down + 1)
    finally:
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(everyone, timeout=TOOK_AT_MOST_S)
    assert not alive
    # No prompt was given up, and no version was skipped.
    steps = steps_of(folder)
    assert [step["rollout/episodes_failed"] for step in steps] == [0] * len(steps)
    assert [step["batch/trajectories"] for step in steps] == [PROMPTS * SAMPLES] * len(steps)
    assert [step["policy/version"] for step in steps] == [step["step"] + 1 for step in steps]
    assert restarts() == 3
