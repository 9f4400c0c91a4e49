"""SIGTERM and SIGUSR1: the run saves and stops, says so by its exit code, and goes on as if it had never stopped."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from kills import SMALL, losses, newest_checkpoint, one_server, run_to_the_end, served_by, start_ranks
from training_runs import COUNT, ROOT, environment, steps_of

from megatron_rl.config import load_config
from megatron_rl.launch.notice import EXIT_STOPPED
from megatron_rl.train import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with one_server(folder / "servers") as server:
        settings = (*served_by(server), f"warm_start.folder={folder}/warm", "warm_start.updates=15")
        settings += (*SMALL, "run.checkpoint_every_steps=100")
        (folder / "whole").mkdir()
        run_to_the_end(folder / "whole", (f"run.folder={folder}/whole", *settings))
        yield settings, losses(folder / "whole")


def wait_until_logged(folder, steps, alive):
    deadline = time.monotonic() + 150
    while not (folder / "metrics.jsonl").exists() or len(steps_of(folder)) < steps:
        assert alive() and time.monotonic() < deadline
        time.sleep(0.02)


def test_the_launcher_passes_the_signal_on_and_its_exit_code_says_resume(settings, tmp_path):
    settings, _ = settings
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "megatron_rl.launch", "--ranks", "2", COUNT, *settings, "--resume", "auto"]
    command += ["parallel.tensor=2", f"run.folder={folder}"]
    run = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until_logged(folder, 2, lambda: run.poll() is None)
    run.send_signal(signal.SIGTERM)
    output = run.communicate(timeout=60)[0].decode()
    assert run.returncode == EXIT_STOPPED, output
    done = len(steps_of(folder))
    assert f"stopped after step {done} on SIGTERM; --resume auto continues the run" in output
    assert newest_checkpoint(folder) == done < 12 and "Traceback" not in output


def experiment(overrides):
    os.chdir(ROOT)
    if not train(load_config(COUNT, list(overrides)), resume="auto"):
        sys.exit(EXIT_STOPPED)


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_all_ranks_stop_together_where_one_alone_was_told(settings, tmp_path):
    settings, expected = settings
    folder = tmp_path / "run"
    folder.mkdir()
    overrides = (f"run.folder={folder}", *settings)
    pids = start_ranks(2, experiment, overrides, tmp_path / "output.txt")
    wait_until_logged(folder, 2, lambda: True)
    os.kill(pids[1], signal.SIGUSR1)
    assert [ended(pid) for pid in pids] == [EXIT_STOPPED] * 2, (tmp_path / "output.txt").read_text()
    assert "on another rank's notice" in (tmp_path / "output.txt").read_text()
    assert newest_checkpoint(folder) == len(steps_of(folder)) < 12
    run_to_the_end(folder, overrides)
    rewards = [step["reward/mean"] for step in steps_of(folder)]
    assert rewards[:3] == [loss[1] for loss in expected[:3]], "the same replies, from two replicas as from one"


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_rollout_that_takes_too_long_is_left_and_its_step_begins_again(staleness, settings, tmp_path):
    settings, expected = settings
    folder = tmp_path / "run"
    folder.mkdir()
    overrides = (f"run.folder={folder}", *settings, "run.import_from=[third_step]")
    overrides += ("rollout.workflow=third_step:StuckInTheThirdStep",)
    overrides += (f"rollout.max_staleness={staleness}", "run.grace_s=8")
    (pid,) = start_ranks(1, experiment, overrides, tmp_path / "output.txt")
    wait_until_logged(folder, 2, lambda: True)
    time.sleep(0.5)
    for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):  # as schedulers do
        process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    assert ended(pid) == EXIT_STOPPED, (tmp_path / "output.txt").read_text()
    assert time.monotonic() - told < 8
    assert newest_checkpoint(folder) == 2
    os.environ["TEST_NOT_STUCK"] = "1"
    try:
        run_to_the_end(folder, overrides)
    finally:
        del os.environ["TEST_NOT_STUCK"]
    if staleness == 0:
        assert losses(folder) == expected
