"""SIGKILL at random points: nothing is lost, nothing is trained twice. `make soak` does the same for longer."""

import os
import time
from collections import Counter

import psutil
import pytest
from kills import (
    ASYNCHRONOUS,
    JOURNAL,
    MODES,
    SMALL,
    TENSOR,
    do_the_books,
    end_without,
    partial_checkpoints,
    soak,
)

from megatron_rl.engine import checkpoint
from megatron_rl.rollout.journal import read_file
from tests.kit.forks import killed, start_ranks
from tests.kit.runs import UNTAUGHT, experiment, logged, losses, newest_checkpoint, run_to_the_end, steps_of
from tests.kit.waiting import LATE_S, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "modes, points", [(("synchronous",), 2), pytest.param(tuple(MODES), 6, marks=pytest.mark.thorough)]
)
def test_runs_that_are_killed_again_and_again_end_as_if_nobody_had(modes, points, tmp_path):
    results = list(soak(tmp_path, points=points, seed=4, modes=modes))
    kills = [place for result in results for place in result.kills]
    assert len(kills) == points and {"in a checkpoint", "in a step"} <= set(kills)
    assert {result.mode for result in results} == set(modes)
    for result in results:
        assert result.is_good, result
        assert result.is_same == (True if MODES[result.mode].has_same_losses else None), result


@pytest.mark.thorough
def test_an_asynchronous_run_of_two_replicas_is_killed_and_goes_on_with_one(server, tmp_path):
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    folder.mkdir()
    overrides = (f"run.folder={folder}", *server, *UNTAUGHT, *SMALL)
    overrides += (*ASYNCHRONOUS, "run.checkpoint_every_steps=3")
    pids = start_ranks(2, experiment, (*overrides, "run.steps=100000"), output)
    wait_until(lambda: newest_checkpoint(folder) >= 6, output.read_text)
    for pid in pids:
        killed(pid)
    done = newest_checkpoint(folder)
    run_to_the_end(folder, (*overrides, f"run.steps={done + 6}"))
    assert f"resumed after step {done}" in (folder / "output.txt").read_text()
    assert len(steps_of(folder)) == done + 6 and do_the_books(folder, steps=done + 6) == (0, 0)
    assert steps_of(folder)[-1]["rollout/restored_groups"] > 0, "what both had sampled was not sampled again"


def writes_slowly_on_the_second_rank(overrides):
    write = checkpoint._write_and_sum

    def write_late(*args):
        if os.environ["RANK"] == "1" and any("step-4" in str(arg) for arg in args):
            time.sleep(LATE_S)
        write(*args)

    checkpoint._write_and_sum = write_late
    experiment(overrides)


@pytest.mark.thorough
def test_a_checkpoint_that_one_rank_of_two_had_written_when_the_other_was_killed_is_none(server, tmp_path):
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    folder.mkdir()
    overrides = (f"run.folder={folder}", *server, *UNTAUGHT, *SMALL, *TENSOR)
    pids = start_ranks(2, writes_slowly_on_the_second_rank, overrides, output)
    parts = lambda: {path.name for path in folder.glob("checkpoints/.step-4.*/.policy.partial/.sums-*")}  # noqa: E731
    wait_until(lambda: parts() and len(logged(folder)) >= 5, output.read_text)
    assert parts() == {".sums-0"}
    for writer in psutil.Process(pids[1]).children(recursive=True):
        writer.kill()
    end_without(pids, pids[1], output)
    before = losses(folder)
    run_to_the_end(folder, overrides, ranks=2)
    assert "resumed after step 2" in (folder / "output.txt").read_text()
    assert len(before) >= 5 and losses(folder)[: len(before)] == before, "the steps that were repeated are the same"
    assert not partial_checkpoints(folder) and do_the_books(folder) == (0, 0)


def test_replies_whose_rewards_never_came_are_not_generated_again(server, tmp_path, monkeypatch):
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    folder.mkdir()
    overrides = (f"run.folder={folder}", *server, *UNTAUGHT, *SMALL)
    overrides += (*ASYNCHRONOUS, "run.checkpoint_every_steps=1", "rollout.journal_replies=true")
    overrides += ("run.import_from=[tests,third_step]", "rollout.workflow=third_step:RewardsHangFromTheThirdStepOn")
    (pid,) = start_ranks(1, experiment, overrides, output)
    replies = lambda: dict(Counter(e["key"] for e in events(folder) if e["event"] == "replied"))  # noqa: E731
    # Of the third step's prompts and those that are sampled ahead, all four replies each.
    wait_until(lambda: list(replies().values()).count(4) >= 24 and newest_checkpoint(folder) >= 1, output.read_text)
    end_without([pid], pid, output)
    monkeypatch.setenv("TEST_NOT_STUCK", "1")
    run_to_the_end(folder, (*overrides, "run.checkpoint_every_steps=6"))
    last = steps_of(folder)[-1]
    assert len(steps_of(folder)) == 12 and do_the_books(folder) == (0, 0)
    assert last["rollout/restored_replies"] >= 4 * 8, "those of the third step at least"


def events(folder):
    return [record.event for path in sorted((folder / JOURNAL).glob("*.journal")) for record in read_file(path)[0]]
