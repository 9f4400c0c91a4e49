"""Training on answers or pairs is stopped, watched and resumed as RL is, in a folder of its own."""

import functools
import os
import signal
import time

import pytest

from megatron_rl.launch import file_lock
from megatron_rl.life.stop_signal import EXIT_STOPPED
from megatron_rl.run.preference_run import PreferenceRun
from megatron_rl.run.row_training import SupervisedRun
from megatron_rl.train import main
from tests.kit.forks import check_end, exit_codes, has_ended, killed, start_ranks
from tests.kit.runs import COUNT_MODEL, ROOT, newest_checkpoint, steps_of, wait_for_steps
from tests.kit.waiting import LATE_S, SLOWNESS, wait_until

pytestmark = pytest.mark.slow

STEPS = 16
# 37 rows, 6 a step: the first epoch ends with a row that is new alone, and rows come again after the notice.
SMALL = (
    *(f"model.path={COUNT_MODEL}", "model.init=random", "optimizer.lr=5e-3"),
    *("data.train_args.count=37", "data.evaluation_args.count=5", "batch.prompts_per_step=6"),
    *("batch.tokens_per_microbatch=60", f"run.steps={STEPS}", "run.checkpoint_every_steps=1000"),
    f"run.grace_s={LATE_S}",
)


def pairs(overrides):
    os.chdir(ROOT)
    main(["configs/count_dpo.yaml", *overrides, "--resume", "auto"])


def answers(overrides):
    os.chdir(ROOT)
    main(["configs/count_sft.yaml", *overrides, "--resume", "auto"])


def start(folder, run, *more, ranks=2):
    """That many replicas, by their pids; they write to a file beside their folder."""
    return start_ranks(ranks, run, (f"run.folder={folder}", *SMALL, *more), folder.with_suffix(".txt"))


def weights(folder):
    return (folder / "final" / "model.safetensors").read_bytes()


def before_each_update(run, act):
    """The run, whose ranks call `act` with it and the step."""

    def patched_run(overrides):
        for kind in (SupervisedRun, PreferenceRun):
            update = kind.update

            def patched(self, step, update=update):
                act(self, step)
                update(self, step)

            kind.update = patched
        run(overrides)

    return patched_run


def tell_one_rank(run, step):
    if step == 8 and run.groups.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert run.stop_signal.came(within_s=LATE_S)


@pytest.mark.thorough  # test_interrupts.py stops training on answers, test_stopping.py that of a policy
@pytest.mark.parametrize(("run", "loss"), [(pairs, "preference/loss"), (answers, "supervised/loss")])
def test_run_that_a_notice_stops_ends_with_the_bits_of_one_that_none_came_to(run, loss, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    check_end(start(whole, run), whole.with_suffix(".txt"))
    output = parts.with_suffix(".txt")
    check_end(start(parts, before_each_update(run, tell_one_rank)), output, EXIT_STOPPED)
    assert newest_checkpoint(parts) == len(steps_of(parts)) == 9 and not (parts / "final").exists()
    assert "stopped after step 9 on another rank's stop signal; --resume auto" in output.read_text()
    check_end(start(parts, run), output)
    assert "resumed after step 9" in output.read_text()
    losses = [[step[loss] for step in steps_of(folder)] for folder in (parts, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert weights(parts) == weights(whole)


def stands_still_from(is_late):
    """Return a step whose second rank stops the third time and creates `is_late`. Phases have a limit from then on."""

    def stand_still(run, step):
        if step == 2 and run.groups.rank == 1:
            with run.timers("update"):
                is_late.touch()
                time.sleep(LATE_S)
        if step == 2:
            wait_until(is_late.exists)
            run.hang_watch.limit_s = 3.0 * SLOWNESS  # for this rank to enter the collective that the other does not

    return stand_still


@pytest.mark.thorough
def test_rank_that_stands_still_is_named_and_ends_the_run(tmp_path):
    folder = tmp_path / "run"
    first, late = start(folder, before_each_update(pairs, stands_still_from(tmp_path / "is_late")))
    try:
        check_end([first], folder.with_suffix(".txt"), 1)
    finally:
        killed(late)
    text = " ".join(folder.with_suffix(".txt").read_text().split())
    assert "in phase 'update' for" in text and "rank 1 did not enter collective" in text, text
    assert len(steps_of(folder)) == 2 and "in stand_still" in (folder / "hang" / "rank-1.txt").read_text()


def test_second_run_in_a_folder_is_refused_until_the_first_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(file_lock, "take", functools.partial(file_lock.take, patience_s=0.1))
    folder = tmp_path / "run"
    (first,) = start(folder, answers, "run.steps=100000", ranks=1)
    try:
        wait_for_steps(folder, 1, lambda: has_ended(first), folder.with_suffix(".txt").read_text)
        # Two ranks: the one that has no part in the lock ends as well, and neither has touched what is there.
        assert exit_codes(start(folder, pairs, "run.steps=1")) == [1, 1]
        text = folder.with_suffix(".txt").read_text()
        assert f"run.folder = '{folder}': process {first} on" in text and "or name another folder" in text, text
        assert not has_ended(first) and not list(folder.glob("previous-*"))
    finally:
        killed(first)
    assert exit_codes(start(folder, answers, "run.steps=1", ranks=1)) == [0]
