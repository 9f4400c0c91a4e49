"""Training on pairs is stopped, watched and resumed as RL is."""

import os
import signal
import time

import pytest
from kills import exit_codes, newest_checkpoint, start_ranks
from training_runs import ROOT, steps_of

from megatron_rl.experiment.pair_training import PairRun
from megatron_rl.launch.notice import EXIT_STOPPED
from megatron_rl.preferences import main

pytestmark = pytest.mark.slow

STEPS = 16
# 37 pairs, 6 a step: the first epoch ends with a pair that is new alone, and pairs come again after the notice.
SMALL = (
    *(f"model.path={ROOT}/configs/models/count_tiny", "model.init=random", "optimizer.lr=5e-3"),
    *("data.train_args.count=37", "data.evaluation_args.count=5", "batch.prompts_per_step=6"),
    *("batch.tokens_per_microbatch=60", f"run.steps={STEPS}", "run.checkpoint_every_steps=1000"),
)


def experiment(overrides):
    os.chdir(ROOT)
    main(["configs/count_dpo.yaml", *overrides, "--resume", "auto"])


def start(folder, *more, run=experiment):
    """Two replicas, by their pids; they write to output.txt beside their folder."""
    return start_ranks(2, run, (f"run.folder={folder}", *SMALL, *more), folder.with_suffix(".txt"))


def weights(folder):
    return (folder / "final" / "model.safetensors").read_bytes()


def before_each_update(act):
    """A run whose ranks call `act` with the run and the step."""
    update = PairRun.update

    def patched(self, step):
        act(self, step)
        update(self, step)

    def run(overrides):
        PairRun.update = patched
        experiment(overrides)

    return run


def tell_one_rank(run, step):
    if step == 8 and run.groups.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert run.notice.came(within_s=60)


def test_run_that_a_notice_stops_ends_with_the_bits_of_one_that_none_came_to(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert exit_codes(start(whole)) == [0, 0], whole.with_suffix(".txt").read_text()
    output = parts.with_suffix(".txt")
    assert exit_codes(start(parts, run=before_each_update(tell_one_rank))) == [EXIT_STOPPED] * 2, output.read_text()
    assert newest_checkpoint(parts) == len(steps_of(parts)) == 9 and not (parts / "final").exists()
    assert "stopped after step 9 on another rank's notice; --resume auto" in output.read_text()
    assert exit_codes(start(parts)) == [0, 0], output.read_text()
    assert "resumed after step 9" in output.read_text()
    losses = [[step["preference/loss"] for step in steps_of(folder)] for folder in (parts, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert weights(parts) == weights(whole)


def stand_still(run, step):
    if step == 2:
        run.hang_watch.limit_s = 4.0  # not before: on a busy machine the first phases last as long
        if run.groups.rank == 1:
            with run.timers("update"):
                time.sleep(60)


def test_rank_that_stands_still_is_named_and_ends_the_run(tmp_path):
    folder = tmp_path / "run"
    first, late = start(folder, run=before_each_update(stand_still))
    try:
        assert exit_codes([first]) == [1]
    finally:
        os.kill(late, signal.SIGKILL)
        exit_codes([late])
    text = " ".join(folder.with_suffix(".txt").read_text().split())
    assert "in phase 'update' for" in text and "rank 1 did not enter collective" in text, text
    assert len(steps_of(folder)) == 2 and "in stand_still" in (folder / "hang" / "rank-1.txt").read_text()
