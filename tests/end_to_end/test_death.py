"""SIGKILL any process of a run. A killed server is restarted and the run goes on. Where anything else dies, the others
end, and one line says who died.
"""

import contextlib
import os
import re
import signal

import psutil
import pytest

from megatron_rl.life.process_exit import is_alive
from tests.kit.programs import STARTED, started_programs
from tests.kit.runs import COUNT, family, launched, logged, steps_of, wait_for_steps
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPTS, SAMPLES = 8, 4
SMALL = (f"batch.prompts_per_step={PROMPTS}", f"generation.n_samples={SAMPLES}", "data.evaluation=")
VICTIMS = {"servers": (1, 2), "rank 0": (2, 1), "rank 1": (2, 1), "rollout 0": (1, 1), "launcher": (2, 1)}
"""Who is killed, in a run of so many ranks and servers."""


@pytest.fixture
def start_run(tmp_path, monkeypatch):
    """start_run(ranks, setting, ...): the launcher of a run that has trained its first step."""
    monkeypatch.setenv(STARTED, str(tmp_path / "started.jsonl"))
    with contextlib.ExitStack() as at_end:

        def start(ranks, *overrides):
            folder, output = tmp_path / "run", tmp_path / "output.txt"
            settings = (*SMALL, "warm_start.updates=0", "run.steps=100000", f"run.folder={folder}", *overrides)
            launcher = at_end.enter_context(launched(output, "--ranks", str(ranks), COUNT, *settings))
            wait_for_steps(folder, 1, lambda: launcher.poll() is not None, output.read_text)
            return launcher

        yield start


def roles(folder):
    """Return the pids of the run's programs that are there, by role."""
    found = {}
    for pid, (rank, command) in started_programs(folder / "started.jsonl").items():
        module = command[command.index("-m") + 1].removeprefix("megatron_rl.")
        number = re.search(r"server-(\d+)", " ".join(command))
        role = {
            "launch": "launcher",
            "train": f"rank {rank}",
            "rollout": f"rollout {rank}",
            "tools.embedded_server.server": f"server {number and number[1]}",
        }[module]
        if psutil.pid_exists(pid):
            found[role] = pid
    return found


# `make test` kills a rank that is not the first, and the launcher above it. The same watch notices the others.
@pytest.mark.parametrize(
    "victim",
    [pytest.param(it, marks=() if it in ("rank 1", "launcher") else pytest.mark.thorough) for it in VICTIMS],
)
def test_the_others_end_and_one_line_says_who_died(start_run, victim, tmp_path):
    ranks, servers = VICTIMS[victim]
    layout = (f"parallel.tensor={ranks}", f"rollout.server_count={servers}")
    launcher = start_run(ranks, *layout, "rollout.server_restarts=0")
    pids, everyone = roles(tmp_path), family(launcher.pid)
    started = [f"rank {number}" for number in range(ranks)] + [f"server {number}" for number in range(servers)]
    assert pids.keys() == {"launcher", "rollout 0", *started}
    victims = [role for role in pids if role.startswith("server")] if victim == "servers" else [victim]
    for role in victims:
        os.kill(pids[role], signal.SIGKILL)
    wait_until(lambda: not alive(everyone), lambda: f"{alive(everyone)} outlive {victim}")
    output = (tmp_path / "output.txt").read_text()
    # A server whose call failed before its death was seen has the call's reason, not the signal.
    said = [line for line in output.splitlines() if "died" in line or "was killed" in line]
    for role in victims:
        assert len([line for line in said if str(pids[role]) in line]) == 1, output
    assert "Traceback" not in output, output


def alive(processes):
    return [process for process in processes if is_alive(process.pid)]


@pytest.mark.thorough  # tests/servers/test_faults.py kills them under a rollout
def test_training_goes_on_while_servers_are_killed_and_restarted(start_run, tmp_path):
    folder = tmp_path / "run"
    launcher = start_run(2)  # two rollout ranks, each with a client of its own
    printed = (tmp_path / "output.txt").read_text

    def restarts():
        # By SIGKILL, or where a call failed before that was seen: by its supervisor, for that reason.
        return len(re.findall(r"rollout server \d \(pid \d+\) was killed.*; restart \d", printed()))

    def wait_for(holds):
        """Wait for a step of which it holds, and return the number of the last step."""
        wait_until(lambda: any(map(holds, steps_of(folder))) or launcher.poll() is not None, printed)
        assert launcher.poll() is None, printed()
        return len(logged(folder)) - 1

    # One of two: the other one gives all replies until the first is back.
    os.kill(roles(tmp_path)["server 0"], signal.SIGKILL)
    lost = wait_for(lambda step: step["rollout/servers"] == 1)
    wait_for(lambda step: step["rollout/servers"] == 2 and step["step"] > lost)
    # Both: the ranks wait for one, and publish the weights of the step once more.
    pids = roles(tmp_path)
    for number in (0, 1):
        os.kill(pids[f"server {number}"], signal.SIGKILL)
    down = wait_for(lambda _: restarts() == 3)
    wait_for(lambda step: step["rollout/servers"] == 2 and step["step"] > down + 1)
    everyone = family(launcher.pid)
    launcher.terminate()
    wait_until(lambda: not alive(everyone), lambda: f"{alive(everyone)} are left")
    # No prompt was given up, and no version was skipped.
    steps = steps_of(folder)
    assert [step["rollout/episodes_failed"] for step in steps] == [0] * len(steps)
    assert [step["batch/trajectories"] for step in steps] == [PROMPTS * SAMPLES] * len(steps)
    assert [step["policy/version"] for step in steps] == [step["step"] + 1 for step in steps]
    assert restarts() == 3
