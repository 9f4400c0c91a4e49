"""A resumed run is the run that was never interrupted: losses, log and samples, in the same layout bit by bit."""

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.engine import manifest
from megatron_rl.train import train
from tests.kit.ranks import run_ranks
from tests.kit.runs import COUNT, ROOT, UNTAUGHT, evaluations_of, steps_of
from tests.kit.waiting import LATE_S

pytestmark = pytest.mark.slow

STEPS = 6
SAME_RUN = (
    *("run.steps=6", "run.checkpoint_every_steps=2", "run.keep_checkpoints=3", "optimizer.eps=1e-4"),
    *("batch.prompts_per_step=8", "generation.n_samples=4"),
    *("data.evaluation_args.count=16", "rollout.reward_workers=1"),
)
FROM_SERVERS = ("mismatch/", "rollout/")
"""What a server reports depends in its last bits on the requests that it happened to compute together, and what a
journal has is not generated again."""


def experiment(config, overrides, resume):
    os.chdir(ROOT)
    train(load_config(config, list(overrides)), resume=resume)


def run(folder, server, *overrides, config=COUNT, resume="", ranks=1):
    settings = (*server, f"run.folder={folder}", *overrides)
    run_ranks(ranks, experiment, config, settings, resume, timeout_s=LATE_S)


@pytest.fixture(scope="module")
def uninterrupted(server, tmp_path_factory):
    folder, overrides = tmp_path_factory.mktemp("runs") / "whole", (*UNTAUGHT, *SAME_RUN)
    run(folder, server, *overrides)
    return folder, overrides


def cut_after(step, whole, target):
    """A copy of a run's folder as it was when its process died some time after checkpoint `step`."""
    shutil.copytree(whole, target)
    for path in (target / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return target


def log_of(folder):
    """The log without times, and the samples."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {k: v for k, v in line.items() if not (k.startswith(("time/", *FROM_SERVERS)) or k.endswith("_s"))}
        for line in lines
    ]
    return kept, (folder / "samples.jsonl").read_text()


def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(uninterrupted, server, tmp_path):
    whole, overrides = uninterrupted
    folder = cut_after(2, whole, tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "step", "step": 6, "torn')
    run(folder, server, *overrides, resume="auto")
    assert log_of(folder) == log_of(whole)
    assert [step["step"] for step in steps_of(folder)] == list(range(STEPS))
    ages = [line["elapsed_s"] for line in steps_of(folder)]
    assert ages == sorted(ages)
    assert (folder / "final" / "model.safetensors").read_bytes() == (whole / "final" / "model.safetensors").read_bytes()


def test_a_run_resumes_in_another_layout(uninterrupted, server, tmp_path):
    whole, overrides = uninterrupted
    folder = cut_after(4, whole, tmp_path / "run")
    run(folder, server, *overrides, "parallel.tensor=2", resume="auto", ranks=2)
    for ours, expected in zip(steps_of(folder), steps_of(whole), strict=True):
        assert ours["reward/mean"] == expected["reward/mean"]
        for key in ("policy/loss", "policy/grad_norm"):
            assert ours[key] == pytest.approx(expected[key], abs=1e-5, rel=1e-5)
    assert evaluations_of(folder)[-1]["accuracy"] == evaluations_of(whole)[-1]["accuracy"]


@pytest.mark.thorough  # test_curriculum.py resumes rates by themselves
@pytest.mark.parametrize("resumed_on", [2, 1])
def test_prompts_sampled_by_their_rates_are_resumed_too(server, tmp_path, resumed_on):
    overrides = ("warm_start.updates=15", f"warm_start.folder={tmp_path}/warm", *SAME_RUN, "data.train_args.count=24")
    overrides += ("data.sampling=variance", "data.least_chance=0.05")
    run(tmp_path / "whole", server, *overrides, ranks=2)
    folder = cut_after(4, tmp_path / "whole", tmp_path / "run")
    run(folder, server, *overrides, resume="auto", ranks=resumed_on)
    expected = steps_of(tmp_path / "whole")
    assert expected[-1]["rollout/passed_over"] > 0 and expected[-1]["data/rated_prompts"] > 8
    if resumed_on == 2:  # else the ranks' shares of a step differ
        assert log_of(folder) == log_of(tmp_path / "whole")
    state = json.loads((tmp_path / "whole" / "checkpoints" / "step-4" / "run.json").read_text())
    assert len(state["rates"]["rates"]) == expected[3]["data/rated_prompts"]


@pytest.mark.thorough  # test_reuse_buffer.py resumes one by itself
def test_the_reuse_buffer_is_resumed_too_and_fresh_groups_are_as_young_as_without(server, tmp_path):
    overrides = ("warm_start.updates=15", f"warm_start.folder={tmp_path}/warm", *SAME_RUN, "correction.weight=clamp")
    overrides += ("reuse.groups_per_step=3", "reuse.max_age_steps=4", "reward_shaping.running=mean_std")
    run(tmp_path / "whole", server, *overrides, ranks=2)
    folder = cut_after(4, tmp_path / "whole", tmp_path / "run")
    run(folder, server, *overrides, resume="auto", ranks=2)
    for ours, expected in zip(steps_of(folder), steps_of(tmp_path / "whole"), strict=True):
        for key in ("reward/mean", "reuse/trajectories", "reuse/reward", "reuse/staleness", "batch/trained_tokens"):
            assert ours.get(key) == expected.get(key), key
        for key in ("policy/loss", "policy/grad_norm"):  # the servers' log-probs, and so their last bits, are in it
            assert ours[key] == pytest.approx(expected[key], abs=1e-5, rel=1e-5)
    first, *_, last = steps_of(tmp_path / "whole")
    assert first["reuse/trajectories"] == 0 and last["reuse/trajectories"] == 12 and last["reuse/staleness"] >= 1
    assert last["batch/trajectories"] == first["batch/trajectories"] == 32
    assert {step["rollout/staleness_max"] for step in steps_of(tmp_path / "whole")} == {0}
    assert last["mismatch/max"] < 1e-3, "the older policies' tokens have no part in it"


@pytest.mark.thorough
def test_critic_reference_and_warm_start_are_resumed_too(server, tmp_path):
    # The warm start is kept nowhere but in the run itself.
    overrides = ("warm_start.folder=", "warm_start.updates=5", "run.steps=4", "run.checkpoint_every_steps=2")
    overrides += ("batch.prompts_per_step=8", "generation.n_samples=4")
    overrides += ("algo.kl_coefficient=0.1", "critic.warmup_steps=1", "algo.kl_estimator=k3", "run.save_at_end=false")
    # And what adapts: the penalty's weight, the rewards' moments, the entropy bonus.
    overrides += ("algo.kl_in=reward", "algo.kl_target=0.001", "algo.kl_horizon=100", "reward_shaping.running=mean_std")
    overrides += ("algo.entropy_target=0.2", "algo.entropy_coefficient=0.01")
    run(tmp_path / "whole", server, *overrides, config="configs/count_ppo_critic.yaml")
    folder = cut_after(2, tmp_path / "whole", tmp_path / "run")
    run(folder, server, *overrides, config="configs/count_ppo_critic.yaml", resume="auto")
    assert log_of(folder) == log_of(tmp_path / "whole")
    last = steps_of(folder)[-1]
    assert last["reward/kl"] > 0 and last["reward/kl_coefficient"] != 0.1 and last["policy/entropy_coefficient"] != 0.01


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(uninterrupted, server, tmp_path, capfd):
    whole, overrides = uninterrupted
    folder = cut_after(4, whole, tmp_path / "run")
    flip_a_bit(folder / "checkpoints" / "step-4" / "policy" / "__0_0.distcp")
    run(folder, server, *overrides, resume="auto")
    said = capfd.readouterr().out
    assert "step-4: the content of policy/__0_0.distcp is not what was written" in said
    assert f"resumed after step 2 from {folder}/checkpoints/step-2" in said
    assert log_of(folder) == log_of(whole)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        *("step-2", "step-4", "step-4.damaged", "step-6"),
    ]


@pytest.mark.thorough
def test_a_full_disk_is_named_and_the_run_goes_on_and_can_be_resumed_from_before(
    uninterrupted, server, tmp_path, capfd
):
    whole, overrides = uninterrupted
    folder = tmp_path / "run"
    full = ("run.save_at_end=false", "run.save_every_steps=4", "run.import_from=[tests,third_step]")
    full += ("rollout.workflow=third_step:DiskFullFromTheThirdStepOn",)
    run(folder, server, *overrides, *full)
    warnings = [line for line in capfd.readouterr().out.splitlines() if "WARNING" in line]
    for what, parts in {
        "checkpoints/.step-4.": ("a writer failed", "GB are free"),
        "checkpoints/.step-6.": ("a writer failed", "GB are free"),
        f"weights {folder}/step-4": (),
    }.items():
        (warning,) = (line for line in warnings if what in line)
        for part in (*parts, "that the disk has space", "Training goes on"):
            assert part in warning, warning
    assert not list(folder.glob("*step-4*")), "nothing half is left"
    names = sorted(path.name for path in (folder / "checkpoints").glob("[!.]*"))
    assert names == ["step-2"] and log_of(folder) == log_of(whole)
    run(folder, server, *overrides, resume="auto")
    assert "resumed after step 2" in capfd.readouterr().out
    assert log_of(folder) == log_of(whole)


def test_a_run_whose_journal_fills_the_disk_stops_and_resumes_from_its_checkpoint(
    uninterrupted, server, tmp_path, capfd, monkeypatch
):
    whole, overrides = uninterrupted
    folder = tmp_path / "run"
    overrides += ("run.import_from=[tests,third_step]", "rollout.workflow=third_step:JournalFullFromTheFifthStepOn")
    with pytest.raises(AssertionError, match="rollout journal .*only 100 of .* make room on the disk and resume"):
        run(folder, server, *overrides)
    journals = {path: path.read_bytes() for path in (folder / "journal").glob("*.journal")}
    monkeypatch.setenv("TEST_DISK_HAS_ROOM", "1")
    run(folder, server, *overrides, resume="auto")
    said = capfd.readouterr().out
    assert (
        "resumed after step 2" in said and ".journal ends in the middle of a record, 100 bytes of it are left" in said
    )
    assert log_of(folder) == log_of(whole)
    assert all(path.read_bytes() == data for path, data in journals.items() if path.exists())


def refused(folder, server, overrides, resume, error, *parts):
    with pytest.raises(AssertionError) as raised:
        run(folder, server, *overrides, resume=resume)
    for part in (error, *parts):
        assert part in str(raised.value), part


def test_a_run_without_any_good_checkpoint_stops_and_deletes_nothing(uninterrupted, server, tmp_path):
    whole, overrides = uninterrupted
    folder = cut_after(4, whole, tmp_path / "run")
    (folder / "checkpoints" / "step-2" / "run.json").write_text("{}")
    (folder / "checkpoints" / "step-4" / manifest.NAME).write_text("{")
    parts = ("every checkpoint", "step-4: manifest.json is not readable", "step-2: run.json has 2 bytes")
    for _ in range(2):  # nor does the second attempt take what is left for a fresh start
        refused(folder, server, overrides, "auto", "RuntimeError", *parts)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-2", "step-4"}
    assert len(steps_of(folder)) == STEPS, "the log is as it was"


def test_wrong_requests_are_refused_with_the_way_out(uninterrupted, server, tmp_path):
    whole, overrides = uninterrupted
    refused(whole, server, overrides, "", "ValueError", f"run.folder = '{whole}'", "--resume auto continues it")
    refused(tmp_path, server, overrides, str(tmp_path / "none"), "ValueError", "no run.json", "step-N, or auto")
    changed = (*overrides, "run.seed=2")
    refused(cut_after(4, whole, tmp_path / "run"), server, changed, "auto", "ValueError", "run.seed = 2", "has 1")
    changed = (*overrides, "optimizer.lr=1e-3")
    refused(tmp_path / "run", server, changed, "auto", "ValueError", "optimizer.lr = 0.001", "has 0.0005")


def test_a_run_goes_on_from_a_named_checkpoint_and_for_longer(uninterrupted, server, tmp_path):
    whole, overrides = uninterrupted
    shutil.copytree(whole, tmp_path / "run")
    folder = tmp_path / "run"
    run(folder, server, *overrides, "run.steps=8", resume=f"{folder}/checkpoints/step-4")
    assert [step["step"] for step in steps_of(folder)] == list(range(8))
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"step-4", "step-6", "step-6.superseded", "step-8"}
    assert [s["policy/loss"] for s in steps_of(folder)[:STEPS]] == [s["policy/loss"] for s in steps_of(whole)]
