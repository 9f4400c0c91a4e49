"""Two runs, or two evaluations, in one folder: the second one is refused before it has written or started anything."""

import functools
import os
import signal
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.launch import file_lock
from megatron_rl.tools import evaluate_command
from megatron_rl.tools.evaluate_command import evaluate
from megatron_rl.train import train
from tests.kit.forks import killed
from tests.kit.ranks import fork, run_ranks
from tests.kit.runs import COUNT, COUNT_MODEL, ROOT
from tests.kit.waiting import LATE_S, wait_until

MODEL = f"model.path={COUNT_MODEL}"


@pytest.fixture
def owner_of(monkeypatch, tmp_path_factory):
    """Has another process keep a folder by a lock of that name, and returns its pid."""
    monkeypatch.setattr(file_lock, "take", functools.partial(file_lock.take, patience_s=0.1))
    has_it, started = tmp_path_factory.mktemp("owner") / "has_it", []

    def keep(folder, name):
        file_lock.keep_folder(folder, name, "a run")
        has_it.touch()
        signal.pause()

    def start(folder, name):
        started.append(fork(lambda args: keep(*args), (folder, name), has_it.with_name("output.txt")))
        wait_until(has_it.exists)
        return started[-1]

    yield start
    for pid in started:
        killed(pid)


def starts(folder):
    os.chdir(ROOT)
    with pytest.raises(ValueError) as refusal:
        train(load_config(COUNT, [f"run.folder={folder}"]))
    return str(refusal.value)


def names(folder: Path):
    return sorted(path.name for path in folder.iterdir())


def test_a_second_run_of_rl_without_checkpoints_is_refused_by_all_its_ranks_with_the_first_ones_name(
    tmp_path, owner_of
):
    pid = owner_of(tmp_path, "run.lock")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step"}\n')
    for refusal in run_ranks(2, starts, tmp_path, timeout_s=LATE_S):
        assert refusal.startswith(f"run.folder = '{tmp_path}': process {pid} on "), refusal
        assert "(since 20" in refusal and "wait until it has ended, kill it, or name another" in refusal
    assert names(tmp_path) == ["metrics.jsonl", "run.lock"], "nothing was written, renamed or started"


def test_a_second_evaluation_in_a_folder_is_refused_with_the_first_ones_name(tmp_path, owner_of):
    pid = owner_of(tmp_path, "eval.lock")
    overrides = [MODEL, f"run.folder={tmp_path}", "model.init=hf"]
    with pytest.raises(ValueError, match=rf"run.folder = .*: process {pid} on .* belongs to an evaluation"):
        evaluate(ROOT / COUNT, overrides)
    assert names(tmp_path) == ["eval.lock"]


def test_an_evaluation_that_fails_frees_its_folder(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no server starts")

    monkeypatch.setattr(evaluate_command, "Supervisor", fails)
    with pytest.raises(RuntimeError, match="no server starts"):
        evaluate(ROOT / COUNT, [MODEL, f"run.folder={tmp_path}", "model.init=hf"])
    run_ranks(1, functools.partial(file_lock.take, by_process=True), tmp_path / "eval.lock")  # in another process
