"""SIGTERM and SIGUSR1: the run saves and stops, says so by its exit code, and goes on as if it had never stopped."""

import itertools
import os
import signal

import psutil
import pytest
from kills import SMALL

from megatron_rl.life import stop_signal
from megatron_rl.life.stop_signal import EXIT_INTERRUPTED, EXIT_STOPPED
from megatron_rl.run.rl_run import RLRun
from megatron_rl.run.rollouts import Rollouts
from megatron_rl.train import main
from tests.kit.forks import check_end, start_ranks
from tests.kit.runs import (
    COUNT,
    UNTAUGHT,
    evaluations_of,
    experiment,
    launched,
    losses,
    newest_checkpoint,
    rollout_servers,
    run_to_the_end,
    served_by,
    steps_of,
    wait_for_steps,
)
from tests.kit.waiting import LATE_S, wait_until

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def rollouts_are_left_soon():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_signal, "FINISH_ON_TERM_S", 0.5)
        yield


@pytest.fixture(scope="module")
def settings(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    settings = (*server, *UNTAUGHT, "rollout.reward_workers=1", f"run.grace_s={LATE_S}")
    settings += (*SMALL, f"run.steps={STEPS}", "run.checkpoint_every_steps=100")
    (folder / "whole").mkdir()
    run_to_the_end(folder / "whole", (f"run.folder={folder}/whole", *settings))
    return settings, losses(folder / "whole")


@pytest.mark.thorough  # test_interrupts.py and Slurm's job stop a launcher as well
def test_the_launcher_passes_the_signal_on_and_its_exit_code_says_resume(settings, tmp_path):
    settings, _ = settings
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    arguments = (COUNT, *settings, "--resume", "auto", "run.steps=100000", f"run.folder={folder}")
    with launched(output, *arguments, is_forked=False) as run:
        wait_for_steps(folder, 2, lambda: run.poll() is not None, output.read_text)
        run.send_signal(signal.SIGTERM)
        assert run.wait(LATE_S) == EXIT_STOPPED, output.read_text()
    done, said = len(steps_of(folder)), output.read_text()
    assert f"stopped after step {done} on SIGTERM; --resume auto continues the run" in said
    assert newest_checkpoint(folder) == done and "Traceback" not in said


def tells_one_rank(overrides):
    """A run whose second rank alone is told to stop, in its third step."""
    next_batch, calls = RLRun.next_batch, itertools.count(1)

    def batch_and_tell(self, step):
        if next(calls) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        return next_batch(self, step)

    RLRun.next_batch = batch_and_tell
    experiment(overrides)


def test_all_ranks_stop_together_where_one_alone_was_told(settings, tmp_path):
    settings, expected = settings
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    folder.mkdir()
    overrides = (f"run.folder={folder}", *settings)
    check_end(start_ranks(2, tells_one_rank, overrides, output), output, EXIT_STOPPED)
    assert "on another rank's stop signal" in output.read_text()
    assert newest_checkpoint(folder) == len(steps_of(folder)) == 3
    run_to_the_end(folder, overrides)
    rewards = [step["reward/mean"] for step in steps_of(folder)]
    assert rewards[:3] == [loss[1] for loss in expected[:3]], "the same replies, from two replicas as from one"


def tells_of_its_third_rollout(run, is_there):
    """The run, which makes that file when it begins to wait for the third step's replies."""

    def telling_run(overrides):
        next_batch, calls = RLRun.next_batch, itertools.count(1)

        def batch_and_tell(self, step):
            if next(calls) == 3:
                is_there.touch()
            return next_batch(self, step)

        RLRun.next_batch = batch_and_tell
        run(overrides)

    return telling_run


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.thorough), 2])
def test_a_rollout_that_takes_too_long_is_left_and_its_step_begins_again(staleness, settings, tmp_path, monkeypatch):
    settings, expected = settings
    folder, output, is_there = tmp_path / "run", tmp_path / "output.txt", tmp_path / "is_there"
    folder.mkdir()
    overrides = (f"run.folder={folder}", *settings, "run.import_from=[tests,third_step]")
    overrides += ("rollout.workflow=third_step:StuckInTheThirdStep", f"rollout.max_staleness={staleness}")
    (pid,) = start_ranks(1, tells_of_its_third_rollout(experiment, is_there), overrides, output)
    wait_until(is_there.exists, output.read_text)
    for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):  # as schedulers do
        process.send_signal(signal.SIGTERM)
    check_end([pid], output, EXIT_STOPPED)  # 1 where it is ended in the end
    assert newest_checkpoint(folder) == 2
    monkeypatch.setenv("TEST_NOT_STUCK", "1")
    run_to_the_end(folder, overrides)
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

    with rollout_servers(tmp_path / "servers") as server:
        overrides = (*settings[0], *served_by(server), f"run.folder={folder}")
        (pid,) = start_ranks(1, run, overrides, output)
        wait_until(publishes.exists, output.read_text)
    is_gone.touch()
    wait_until(asks.exists, output.read_text)
    os.kill(pid, signal.SIGTERM)
    check_end([pid], output, EXIT_STOPPED)
    assert newest_checkpoint(folder) == 3 and "stopped after step 3 on SIGTERM" in output.read_text()


HELD_OUT = 8


@pytest.fixture
def stuck_in_an_evaluation(settings, tmp_path, monkeypatch):
    """Settings of a run with evaluations, and the file that says that one is stuck."""
    overrides = (f"run.folder={tmp_path}/run", *settings[0], "run.import_from=[tests,third_step]")
    overrides += ("rollout.workflow=third_step:StuckInAnEvaluation", "run.evaluate_every_steps=2")
    overrides += ("data.evaluation=megatron_rl.data.tasks:count_ones", f"data.evaluation_args.count={HELD_OUT}")
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("TEST_STUCK_FILE", str(tmp_path / "is_stuck"))
    return overrides, tmp_path / "is_stuck"


@pytest.mark.thorough
def test_an_evaluation_that_a_notice_cuts_short_is_begun_again_by_the_next_life(
    stuck_in_an_evaluation, tmp_path, monkeypatch
):
    overrides, is_stuck = stuck_in_an_evaluation
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    monkeypatch.setenv("TEST_STUCK_FROM", str(HELD_OUT + 3))  # in the second one
    overrides += ("warm_start.check_every_updates=100",)  # and not in the warm start's own
    (pid,) = start_ranks(1, experiment, overrides, output)
    wait_until(is_stuck.exists, output.read_text)
    os.kill(pid, signal.SIGTERM)
    check_end([pid], output, EXIT_STOPPED)
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
    wait_until(is_stuck.exists, output.read_text)
    os.kill(pid, signal.SIGTERM)
    check_end([pid], output, EXIT_STOPPED)
    assert "warm start: 4 supervised updates" in output.read_text() and "Traceback" not in output.read_text()


@pytest.mark.thorough  # test_interrupts.py has Ctrl-C without checkpoints
def test_ctrl_c_in_a_rollout_without_checkpoints_leaves_it_and_ends_the_run_with_its_report(settings, tmp_path):
    folder, output, is_there = tmp_path / "run", tmp_path / "output.txt", tmp_path / "is_there"
    folder.mkdir()
    overrides = (*settings[0], "run.import_from=[tests,third_step]", f"run.folder={folder}")
    overrides += ("rollout.workflow=third_step:StuckInTheThirdStep", "run.checkpoint_every_steps=0")
    run = tells_of_its_third_rollout(lambda settings: main([COUNT, *settings]), is_there)
    (pid,) = start_ranks(1, run, overrides, output)
    wait_until(is_there.exists, output.read_text)
    for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):  # as a terminal does
        process.send_signal(signal.SIGINT)
    check_end([pid], output, EXIT_INTERRUPTED)
    text = " ".join(output.read_text().split())
    assert "stopped after step 2 on SIGINT; nothing of it can be resumed" in text and "Traceback" not in text, text
    assert (folder / "report.html").exists() and len(steps_of(folder)) == 2
