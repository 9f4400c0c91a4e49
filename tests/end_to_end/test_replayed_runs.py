"""Steps of real runs are recorded and taken again."""

import os
import random
import shutil
import time

import pytest

from megatron_rl.config import load_config
from megatron_rl.replay.records import recorded_steps
from megatron_rl.run.rl_run import RLRun
from megatron_rl.run.run_checkpoints import FOLDER as CHECKPOINTS
from megatron_rl.train import train
from tests.kit.forks import check_end, killed, start_ranks
from tests.kit.ranks import run_ranks
from tests.kit.records import take_again
from tests.kit.runs import COUNT, ROOT, UNTAUGHT, logged
from tests.kit.runs import experiment as resumed_experiment
from tests.kit.waiting import LATE_S, wait_until

pytestmark = pytest.mark.slow

STEPS = (
    *("run.steps=6", "run.checkpoint_every_steps=2", "run.keep_checkpoints=1", "run.save_at_end=false"),
    *("batch.prompts_per_step=4", "generation.n_samples=4", "data.evaluation=", "rollout.reward_workers=1"),
    *("batch.updates_per_step=2", "run.threads_per_rank=1"),
)


def odd(prompt, completions, prompt_ids, completion_ids, answer, **data):
    """The reward of `parity_reward:even`, mistaken."""
    return float(sum(completion_ids) % 2)


def experiment(overrides):
    os.chdir(ROOT)
    train(load_config(COUNT, list(overrides)))


def run(folder, server, *overrides, ranks=1):
    settings = (*server, f"run.folder={folder}", *UNTAUGHT, *STEPS, *overrides)
    run_ranks(ranks, experiment, settings, timeout_s=LATE_S)
    return folder


def test_a_step_of_a_run_is_taken_again_from_the_checkpoint_before_it(server, tmp_path):
    folder = run(tmp_path / "run", server, "telemetry.record_steps=[1,3]")
    assert recorded_steps(folder) == [0, 1, 2, 3]
    kept = {path.name for path in (folder / CHECKPOINTS).iterdir()}
    assert kept == {"step-2", "step-6"}, "the checkpoint before step 3 is kept, and run.keep_checkpoints=1 more"
    lines, difference = take_again(folder, 3, to=tmp_path / "replay", rewards=True)
    assert difference == "" and lines[0].startswith("from the checkpoint of step 2, ")
    assert lines[1] == "step 3: rewards of trajectories, computed again: 16 values, equal to the bit"
    assert [line for line in lines[2:] if line.startswith("step")] == [f"step {n}: the same to the bit" for n in (2, 3)]
    other = "rollout.reward=tests.end_to_end.test_replayed_runs:odd"
    _, difference = take_again(folder, 3, other, to=tmp_path / "replay", rewards=True)
    assert difference.startswith("rewards of trajectories, computed again: 16 of 16 values differ; the first: ")
    shutil.rmtree(folder / CHECKPOINTS)
    lines, difference = take_again(folder, 3, to=tmp_path / "replay")
    assert difference == "" and lines[0].startswith("from the run's start, ")


def alarming_experiment(overrides):
    """A run that an alarm ends after its sixth step."""
    check = RLRun.check_updates

    def checked(self, model, updates, **options):
        check(self, model, updates, **options)
        if self.engine.get_version() == 6:
            raise RuntimeError("planted alarm")

    RLRun.check_updates = checked
    experiment(overrides)


def test_for_an_alarm_the_steps_since_the_oldest_kept_checkpoint_are_recorded(server, tmp_path):
    folder = run(tmp_path / "quiet", server)
    assert not (folder / "records").exists(), "by default records stay in memory until there is an alarm"
    folder = tmp_path / "run"
    settings = (*server, f"run.folder={folder}", *UNTAUGHT, *STEPS, "run.keep_checkpoints=2", "run.steps=8")
    with pytest.raises(AssertionError, match="planted alarm"):
        run_ranks(1, alarming_experiment, settings, timeout_s=LATE_S)
    assert recorded_steps(folder) == [0, 1, 2, 3, 4, 5]  # checkpoints 2 and 4 are kept, and 0 for one that is written
    lines, difference = take_again(folder, 5, to=tmp_path / "replay")
    assert difference == "" and "step 5: the same to the bit" in lines
    assert not any("gradients" in line for line in lines)


@pytest.mark.thorough  # the parts are above, and in tests/megatron/test_replay.py
def test_a_killed_asynchronous_run_on_four_ranks_is_replayed_step_by_step_on_one_process(server, tmp_path):
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    settings = (*server, f"run.folder={folder}", *UNTAUGHT, *STEPS, "run.keep_checkpoints=10", "optimizer.eps=1e-4")
    settings += ("rollout.max_staleness=2", "correction.weight=clamp", "telemetry.record_steps=every 1")
    pids = start_ranks(4, resumed_experiment, settings, output)
    moment = random.Random(time.time_ns()).uniform(1.0, 5.0)
    wait_until(lambda: len(logged(folder)) >= int(moment), output.read_text)
    time.sleep(moment % 1.0)
    for pid in pids:
        killed(pid)
    check_end(start_ranks(4, resumed_experiment, settings, output), output)
    assert recorded_steps(folder) == list(range(6)), f"killed at {moment}"
    for step in range(6):
        lines, difference = take_again(folder, step, to=tmp_path / "replay")
        assert difference == "" and f"step {step}: the same within 1e-06" in lines, (moment, lines)
