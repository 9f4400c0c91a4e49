"""The checkpoints of a run as a whole: all engines or nothing, the newest few, and nothing that is damaged goes."""

import json
import os
import shutil

import pytest

from megatron_rl import parallel
from megatron_rl.config import ParallelConfig
from megatron_rl.engine import manifest
from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.launch import file_lock
from megatron_rl.rollout import journal
from megatron_rl.run.run_checkpoints import RunCheckpoints, read_state, wait_for_earlier_processes
from tests.kit.ranks import run_ranks


class Engine:
    """Writes a file as its checkpoint, at once or when asked to wait; fails where it is told to."""

    def __init__(self, fails=()):
        self.fails, self.path, self.is_slow = list(fails), None, False

    def save_async(self, path, *, beside, in_background):
        assert self.path is None, "the one before is done"
        self.path = path

    def finish_saves(self, *, wait=True):
        if self.path is None:
            return True
        if self.is_slow and not wait:
            return False
        path, self.path = self.path, None
        if self.fails and self.fails.pop(0):
            raise CheckpointError("disk full")
        path.mkdir(parents=True)
        (path / "weights").write_text(f"of {path.parent.name}")
        manifest.write(path)
        return True


def start(folder, keep=2):
    return RunCheckpoints(folder, keep=keep, groups=parallel.start(ParallelConfig(), seed=1))


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith("."))


def write(checkpoints, step, engines):
    checkpoints.start(step, engines, {"version": step})
    checkpoints.finish(wait=True)


def one_engine_fails(folder):
    checkpoints = start(folder)
    policy, critic = Engine(fails=[False, True, False]), Engine()
    engines = {"policy": policy, "critic": critic}
    write(checkpoints, 1, engines)
    critic.is_slow = True
    checkpoints.start(2, engines, {})
    with pytest.raises(CheckpointError, match="disk full"):
        checkpoints.finish(wait=False)
    assert critic.path is None, "nothing is left in work"
    checkpoints.finish(wait=False)
    assert names(folder) == ["step-1"] and checkpoints.newest == 1
    write(checkpoints, 3, engines)
    return names(folder)


def test_a_checkpoint_appears_with_all_engines_or_not_at_all(tmp_path):
    assert run_ranks(1, one_engine_fails, tmp_path)[0] == ["step-1", "step-3"]
    assert read_state(tmp_path / "checkpoints" / "step-3") == {"step": 3, "version": 3}


def many(folder):
    checkpoints = start(folder)
    for step in (1, 2):
        write(checkpoints, step, {"policy": Engine()})
    (folder / "checkpoints" / "step-2" / "policy" / "weights").write_text("other")
    chosen = checkpoints.choose("auto")
    assert chosen.name == "step-1" and "policy/weights has 5 bytes" in checkpoints.passed_over[0]
    for step in (2, 3, 4):
        write(checkpoints, step, {"policy": Engine()})
    return names(folder)


def test_the_newest_stay_and_a_damaged_one_is_never_deleted(tmp_path):
    assert run_ranks(1, many, tmp_path)[0] == ["step-2.damaged", "step-3", "step-4"]


def choose(folder, resume):
    return str(start(folder).choose(resume))


def test_what_a_kill_between_two_renames_left_is_found(tmp_path):
    run_ranks(1, write_one, tmp_path)
    folder = tmp_path / "checkpoints"
    (folder / "step-1").rename(folder / ".step-1.old")
    shutil.copytree(folder / ".step-1.old", folder / ".step-2.abc.partial")
    assert run_ranks(1, choose, tmp_path, "auto") == [str(folder / "step-1")]


def write_one(folder):
    write(start(folder), 1, {"policy": Engine()})


def starts_beside_another(folder):
    groups = parallel.start(ParallelConfig(), seed=1)
    with pytest.raises(
        RuntimeError, match=r"journal: process 123 on .* still writes it; wait until that run has ended"
    ):
        wait_for_earlier_processes(folder, groups)


@pytest.mark.slow
def test_no_rank_resumes_a_run_that_another_process_goes_on_with(tmp_path):
    lock = journal.take_lock(tmp_path / "journal", 1)
    file_lock.sign(lock, 123)
    try:
        run_ranks(2, starts_beside_another, tmp_path)
    finally:
        os.close(lock)


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


DAMAGE = {
    "run.json cut short": (lambda step: cut(step / "run.json", 9), "run.json has 9 bytes, but"),
    "run.json gone": (lambda step: (step / "run.json").unlink(), "run.json is missing"),
    "a file gone": (lambda step: (step / "policy" / "weights").unlink(), "policy/weights is missing"),
    "an engine gone": (lambda step: shutil.rmtree(step / "policy"), "manifest.json is not readable"),
    "the manifest cut short": (lambda step: cut(step / "manifest.json", 30), "manifest.json is not readable"),
    "the manifest gone": (lambda step: (step / "manifest.json").unlink(), "manifest.json is not readable"),
    "an engine's manifest cut short": (lambda step: cut(step / "policy" / "manifest.json", 30), "manifest.json is not"),
    "a file that the manifest lacks": (
        lambda step: without(step / "manifest.json", "run.json"),
        "run.json is not in manifest.json",
    ),
}


def without(manifest_file, name):
    entries = json.loads(manifest_file.read_text())
    del entries["files"][name]
    manifest_file.write_text(json.dumps(entries))


def write_two(folder):
    checkpoints = start(folder)
    for step in (1, 2):
        write(checkpoints, step, {"policy": Engine()})


def choose_after_each(template, folder):
    chosen = {}
    groups = parallel.start(ParallelConfig(), seed=1)
    for name, (damage, _) in DAMAGE.items():
        run = folder / name
        shutil.copytree(template, run)
        damage(run / "checkpoints" / "step-2")
        checkpoints = RunCheckpoints(run, keep=2, groups=groups)
        files = sum(path.is_file() for path in run.rglob("*"))
        chosen[name] = (checkpoints.choose("auto").name, checkpoints.passed_over, names(run))
        assert files == sum(path.is_file() for path in run.rglob("*")), f"{name}: something was deleted"
    return chosen


def test_whatever_is_damaged_is_named_and_the_checkpoint_before_it_taken(tmp_path):
    run_ranks(1, write_two, tmp_path / "template")
    (chosen,) = run_ranks(1, choose_after_each, tmp_path / "template", tmp_path)
    for name, (_, fault) in DAMAGE.items():
        step, passed_over, left = chosen[name]
        assert step == "step-1" and left == ["step-1", "step-2.damaged"], name
        assert len(passed_over) == 1 and f"checkpoint step-2: {fault}" in passed_over[0], (name, passed_over)
