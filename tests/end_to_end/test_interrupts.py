"""Ctrl-C: the first one saves and says how to go on, the second one ends the run at once."""

import os
import re
import shlex
import signal
import time

import pytest
from test_data_stops import SMALL, STEPS, answers, before_each_update

from megatron_rl.launch import local
from megatron_rl.launch.rank import resume_command
from megatron_rl.life import stop_signal
from megatron_rl.life.stop_signal import EXIT_INTERRUPTED
from megatron_rl.train import main
from tests.kit.forks import check_end, start_ranks
from tests.kit.runs import ROOT, launched, logged, newest_checkpoint, steps_of, wait_for_steps
from tests.kit.waiting import LATE_S

pytestmark = pytest.mark.slow

CONFIG = "configs/count_sft.yaml"


@pytest.fixture
def same_ctrl_c(monkeypatch):
    """However late its second signal comes, a Ctrl-C that a launcher passes on is one."""
    for module in (local, stop_signal):
        monkeypatch.setattr(module, "SAME_CTRL_C_S", LATE_S)


def fresh_answers(overrides):
    os.chdir(ROOT)
    main([CONFIG, *overrides])


def start(folder, run, *more, ranks=1):
    return start_ranks(ranks, run, (f"run.folder={folder}", *SMALL, *more), folder.with_suffix(".txt"))


def ctrl_c_on_one_rank(run, step):
    if step == 8 and run.groups.rank == run.groups.world_size - 1:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same one, which a launcher passes on
        assert run.stop_signal.came(within_s=LATE_S)


def test_the_first_ctrl_c_saves_all_ranks_behind_the_step_and_the_run_goes_on_where_it_was(tmp_path, same_ctrl_c):
    folder = tmp_path / "run"
    output = folder.with_suffix(".txt")
    check_end(start(folder, before_each_update(answers, ctrl_c_on_one_rank), ranks=2), output, EXIT_INTERRUPTED)
    text = output.read_text()
    assert newest_checkpoint(folder) == len(steps_of(folder)) == 9 and (folder / "report.html").exists()
    stopped = "stopped after step 9 on another rank's stop signal; --resume auto continues the run"
    assert stopped in " ".join(text.split())
    assert re.search(r"model: [\d,]+ parameters on this rank, 2 ranks, float32\n", text)
    command = shlex.split(text.partition("To continue: ")[2].splitlines()[0])
    assert command[:4] == ["python", "-m", "megatron_rl.train", CONFIG] and command[-2:] == ["--resume", "auto"]
    assert f"run.folder={folder}" in command and command.count("--resume") == 1 and "Traceback" not in text
    check_end(start(folder, answers, ranks=2), output)
    assert len(steps_of(folder)) == STEPS


def test_ctrl_c_without_checkpoints_ends_behind_the_step_with_a_report_and_says_how_to_get_them(tmp_path, same_ctrl_c):
    folder = tmp_path / "run"
    run = before_each_update(fresh_answers, ctrl_c_on_one_rank)
    check_end(start(folder, run, "run.checkpoint_every_steps=0"), folder.with_suffix(".txt"), EXIT_INTERRUPTED)
    text = " ".join(folder.with_suffix(".txt").read_text().split())
    assert "Ctrl-C: the run stops behind its step" in text and "Ctrl-C again ends it at once" in text
    assert "stopped after step 9 on SIGINT; nothing of it can be resumed; with run.checkpoint_every_steps=10" in text
    assert len(steps_of(folder)) == 9 and (folder / "report.html").exists() and "To continue" not in text


def ctrl_c_twice(run, step):
    os.kill(os.getpid(), signal.SIGINT)
    assert run.stop_signal.came(within_s=LATE_S)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(LATE_S)


def test_the_second_ctrl_c_ends_the_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(stop_signal, "SAME_CTRL_C_S", 0.0)
    folder = tmp_path / "run"
    output = folder.with_suffix(".txt")
    check_end(start(folder, before_each_update(answers, ctrl_c_twice)), output, EXIT_INTERRUPTED)
    assert "Ctrl-C once more: ended at once" in output.read_text() and not logged(folder)


def test_ctrl_c_in_a_terminal_reaches_launcher_and_ranks_and_is_one(tmp_path, same_ctrl_c):
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    words = [CONFIG, *SMALL, "run.steps=100000", f"run.folder={folder}", "--resume", "auto"]
    with launched(output, *words) as run:
        wait_for_steps(folder, 1, lambda: run.poll() is not None, output.read_text)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(LATE_S) == EXIT_INTERRUPTED, output.read_text()
    said = output.read_text()
    assert newest_checkpoint(folder) == len(steps_of(folder)) and (folder / "report.html").exists()
    assert f"To continue: {resume_command(['megatron-rl', 'launch'], words)}\n" in said and "Traceback" not in said
