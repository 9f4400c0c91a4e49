"""SIGTERM and SIGUSR1: the run saves and stops, says so by its exit code, and goes on as if it had never stopped."""

import itertools
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from kills import SMALL, losses, newest_checkpoint, one_server, run_to_the_end, served_by, start_ranks

from megatron_rl.config import load_config
from megatron_rl.launch.stop_signal import EXIT_INTERRUPTED, EXIT_STOPPED
from megatron_rl.run.rollouts import Rollouts
from megatron_rl.train import main, train
from tests.kit.runs import COUNT, ROOT, environment, evaluations_of, steps_of

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with one_server(folder / "servers") as server:
        settings = (*served_by(server), f"warm_start.folder={folder}/warm", "warm_start.updates=15")
        settings += (*SMALL, f"run.steps={STEPS}", "run.checkpoint_every_steps=100")
        (folder / "whole").mkdir()
        run_to_the_end(folder / "whole", (f"run.folder={folder}/whole", *settings))
        yield settings, losses(folder / "whole")


def wait_until(happened):
    deadline = time.monotonic() + 150
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_logged(folder, steps, alive):
    def is_logged():
        assert alive()
        return (folder / "metrics.jsonl").exists() and len(steps_of(folder)) >= steps

    wait_until(is_logged)


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
    assert newest_checkpoint(folder) == done < STEPS and "Traceback" not in output


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
    assert "on another rank's stop signal" in (tmp_path / "output.txt").read_text()
    assert newest_checkpoint(folder) == len(steps_of(folder)) < STEPS
    run_to_the_end(folder, overrides)
    rewards = [step["reward/mean"] for step in steps_of(folder)]
    assert rewards[:3] == [loss[1] for loss in expected[:3]], "the same replies, from two replicas as from one"


def tells_of_its_third_rollout(run, is_there):
    """The run, which makes that file when it begins to wait for the third step's replies."""

    def telling_run(overrides):
        batch, calls = Rollouts.batch, itertools.count(1)

        def batch_and_tell(self):
            if next(calls) == 3:
                is_there.touch()
            return batch(self)

        Rollouts.batch = batch_and_tell
        run(overrides)

    return telling_run


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_rollout_that_takes_too_long_is_left_and_its_step_begins_again(staleness, settings, tmp_path):
    settings, expected = settings
    folder, is_there = tmp_path / "run", tmp_path / "is_there"
    folder.mkdir()
    overrides = (f"run.folder={folder}", *settings, "run.import_from=[third_step]")
    overrides += ("rollout.workflow=third_step:StuckInTheThirdStep",)
    overrides += (f"rollout.max_staleness={staleness}", "run.grace_s=30")
    (pid,) = start_ranks(1, tells_of_its_third_rollout(experiment, is_there), overrides, tmp_path / "output.txt")
    wait_until(is_there.exists)
    for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):  # as schedulers do
        process.send_signal(signal.SIGTERM)
    assert ended(pid) == EXIT_STOPPED, (tmp_path / "output.txt").read_text()  # 1 where it is ended in the end
    assert newest_checkpoint(folder) == 2
    os.environ["TEST_NOT_STUCK"] = "1"
    try:
        run_to_the_end(folder, overrides)
    finally:
        del os.environ["TEST_NOT_STUCK"]
    if staleness == 0:
        assert losses(folder) == expected


def test_a_run_whose_servers_ended_before_it_was_told_saves_instead_of_waiting_for_them(settings, tmp_path):
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    publishes, is_gone, asks = (tmp_path / name for name in ("publishes", "is_gone", "asks"))
    folder.mkdir()

    def run(overrides):
        publish, calls = Rollouts.publish, []

        def publish_without_servers(self):
            calls.append(1)
            if len(calls) == 4:  # behind the third step; the first is the start's
                publishes.touch()
                wait_until(is_gone.exists)
                select = self.process.select_servers
                self.process.select_servers = lambda: (asks.touch(), select())
            publish(self)

        Rollouts.publish = publish_without_servers
        experiment(overrides)

    with one_server(tmp_path / "servers") as server:
        overrides = (*settings[0], *served_by(server), f"run.folder={folder}", "run.grace_s=30")
        (pid,) = start_ranks(1, run, overrides, output)
        wait_until(publishes.exists)
    is_gone.touch()
    wait_until(asks.exists)
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == EXIT_STOPPED, output.read_text()
    assert newest_checkpoint(folder) == 3 and "stopped after step 3 on SIGTERM" in output.read_text()


HELD_OUT = 8


@pytest.fixture
def stuck_in_an_evaluation(settings, tmp_path, monkeypatch):
    """Settings of a run with evaluations, and the file that says that one is stuck."""
    overrides = (f"run.folder={tmp_path}/run", *settings[0], "run.import_from=[third_step]", "run.grace_s=30")
    overrides += ("rollout.workflow=third_step:StuckInAnEvaluation", "run.evaluate_every_steps=2")
    overrides += ("data.evaluation=megatron_rl.data.tasks:count_ones", f"data.evaluation_args.count={HELD_OUT}")
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("TEST_STUCK_FILE", str(tmp_path / "is_stuck"))
    return overrides, tmp_path / "is_stuck"


def test_an_evaluation_that_a_notice_cuts_short_is_begun_again_by_the_next_life(
    stuck_in_an_evaluation, tmp_path, monkeypatch
):
    overrides, is_stuck = stuck_in_an_evaluation
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    monkeypatch.setenv("TEST_STUCK_FROM", str(HELD_OUT + 3))  # in the second one
    overrides += ("warm_start.check_every_updates=100",)  # and not in the warm start's own
    (pid,) = start_ranks(1, experiment, overrides, output)
    wait_until(is_stuck.exists)
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == EXIT_STOPPED, output.read_text()
    assert newest_checkpoint(folder) == 2 and "Traceback" not in output.read_text()
    assert [evaluation["step"] for evaluation in evaluations_of(folder)] == [0]
    monkeypatch.delenv("TEST_STUCK_FROM")
    run_to_the_end(folder, overrides)
    assert [evaluation["step"] for evaluation in evaluations_of(folder)] == list(range(0, STEPS + 1, 2))


def test_a_notice_while_the_warm_start_samples_ends_the_run_behind_it(stuck_in_an_evaluation, tmp_path, monkeypatch):
    overrides, is_stuck = stuck_in_an_evaluation
    output = tmp_path / "output.txt"
    monkeypatch.setenv("TEST_STUCK_FROM", "3")
    overrides += ("warm_start.folder=", "warm_start.updates=4", "warm_start.check_every_updates=2")
    (pid,) = start_ranks(1, experiment, overrides, output)
    wait_until(is_stuck.exists)
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == EXIT_STOPPED, output.read_text()
    assert "warm start: 4 supervised updates" in output.read_text() and "Traceback" not in output.read_text()


def test_ctrl_c_in_a_rollout_without_checkpoints_leaves_it_and_ends_the_run_with_its_report(settings, tmp_path):
    folder, output, is_there = tmp_path / "run", tmp_path / "output.txt", tmp_path / "is_there"
    folder.mkdir()
    overrides = (*settings[0], "run.import_from=[third_step]", f"run.folder={folder}", "run.grace_s=1")
    overrides += ("rollout.workflow=third_step:StuckInTheThirdStep", "run.checkpoint_every_steps=0")
    run = tells_of_its_third_rollout(lambda settings: main([COUNT, *settings]), is_there)
    (pid,) = start_ranks(1, run, overrides, output)
    wait_until(is_there.exists)
    for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):  # as a terminal does
        process.send_signal(signal.SIGINT)
    assert ended(pid) == EXIT_INTERRUPTED, output.read_text()
    text = " ".join(output.read_text().split())
    assert "stopped after step 2 on SIGINT; nothing of it can be resumed" in text and "Traceback" not in text, text
    assert (folder / "report.html").exists() and len(steps_of(folder)) == 2
