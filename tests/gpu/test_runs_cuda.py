"""Whole runs on one GPU, by the launcher: trainer and embedded server take turns on it or are on it together."""

import os
import subprocess
import sys

import pytest

from tests.kit.runs import COUNT, ROOT, mean, rollout_servers, served_by, steps_of
from tests.kit.waiting import LATE_S

pytestmark = pytest.mark.gpu

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
BY_TURNS = ("rollout.backend=embedded", "rollout.server_count=1", "rollout.colocated=true", "rollout.publication=ipc")
SHORT = ("run.steps=6", "run.evaluate_every_steps=3", "run.checkpoint_every_steps=3")


def run(folder, config, *overrides):
    """Return the lines of a run's steps. AssertionError shows the output of one that failed."""
    command = [sys.executable, "-m", "megatron_rl.launch", config, f"run.folder={folder}", *SHORT, *overrides]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=LATE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = steps_of(folder)
    assert len(steps) == 6
    return steps


RUNS = {
    "float32": ((), 1e-5),
    "bfloat16": (("model.dtype=bfloat16",), 0.03),
    "with a reference, offloaded": (("algo.kl_coefficient=0.1", "run.offload=true"), 1e-5),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_by_turns_trains_on_what_it_sampled(name, tmp_path):
    overrides, mismatch = RUNS[name]
    steps = run(tmp_path / "run", COUNT, *BY_TURNS, f"warm_start.folder={tmp_path}/warm", *overrides)
    assert mean(step["reward/mean"] for step in steps) > 0.1
    assert max(step["mismatch/mean"] for step in steps) < mismatch, "sampler and trainer agree"
    assert all(step["policy/grad_norm"] > 0 for step in steps)


def test_a_critic_learns_beside_the_policy(tmp_path):
    given = (*BY_TURNS, f"warm_start.folder={tmp_path}/warm", "critic.warmup_steps=2")
    steps = run(tmp_path / "run", "configs/count_ppo_critic.yaml", *given)
    assert steps[-1]["critic/loss"] < steps[0]["critic/loss"]


@pytest.mark.parametrize("publication", ["ipc", "disk", "delta"])
def test_a_run_ahead_of_its_servers_publishes_while_they_sample(publication, tmp_path):
    (tmp_path / "servers").mkdir()
    with rollout_servers(tmp_path / "servers", 2) as servers:
        overrides = ("rollout.max_staleness=1", f"rollout.publication={publication}", "correction.weight=mask")
        warm = f"warm_start.folder={tmp_path}/warm"
        steps = run(tmp_path / "run", COUNT, *served_by(servers), warm, *overrides)
    assert max(step["rollout/staleness_max"] for step in steps) <= 1
    assert max(step["mismatch/mean_age_0"] for step in steps if "mismatch/mean_age_0" in step) < 1e-5


def test_rows_then_pairs_then_adapters_by_reinforcement(tmp_path):
    run(tmp_path / "sft", "configs/count_sft.yaml")
    taught = f"model.path={tmp_path}/sft/final"
    run(tmp_path / "dpo", "configs/count_dpo.yaml", taught)
    run(tmp_path / "rewards", "configs/count_reward_model.yaml")
    adapters = ("model.init=hf", "warm_start.updates=0", "lora.rank=4", "lora.alpha=8")
    steps = run(tmp_path / "adapters", COUNT, *BY_TURNS, taught, *adapters)
    assert max(step["mismatch/mean"] for step in steps) < 1e-5
