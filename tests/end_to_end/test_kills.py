"""SIGKILL at random points: nothing is lost, nothing is trained twice. `make soak` does the same for longer."""

import os
import signal
import time

import pytest
from kills import ASYNCHRONOUS, MODES, SMALL, do_the_books, experiment, one_server, run_to_the_end, soak, start_ranks
from training_runs import steps_of

pytestmark = pytest.mark.slow


def test_runs_that_are_killed_again_and_again_end_as_if_nobody_had(tmp_path):
    results = list(soak(tmp_path, points=8, seed=4))
    kills = [place for result in results for place in result.kills]
    assert len(kills) == 8 and {"in a checkpoint", "in a step"} <= set(kills)
    assert {result.mode for result in results} == set(MODES)
    for result in results:
        assert result.is_good, result
    assert {result.is_same for result in results} == {True, None}, "of synchronous runs the losses are compared too"


def test_an_asynchronous_run_of_two_replicas_is_killed_and_goes_on_with_one(tmp_path):
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    folder.mkdir()
    with one_server(tmp_path / "servers") as server:
        overrides = (f"run.folder={folder}", f"rollout.servers=[{server.urls[0]}]", "warm_start.updates=0", *SMALL)
        overrides += (*ASYNCHRONOUS, "run.checkpoint_every_steps=3")
        pids = start_ranks(2, experiment, overrides, output)
        deadline = time.monotonic() + 60
        while not (folder / "checkpoints" / "step-6").exists():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.005)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        run_to_the_end(folder, overrides)
        assert "resumed after step 6" in (folder / "output.txt").read_text()
    assert len(steps_of(folder)) == 12 and do_the_books(folder) == (0, 0)
    assert steps_of(folder)[-1]["rollout/replayed_groups"] > 0, "what both had sampled was not sampled again"
