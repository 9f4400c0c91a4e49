"""A recorded step taken again has the record's bits, and what is planted is named where it first shows."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl import cli
from megatron_rl.config import load_config
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.optimizer import CheckedOptimizer
from megatron_rl.replay.records import read_record, recorded_steps
from megatron_rl.replay.replay import ReplayedRun
from megatron_rl.replay.replay_file import unpack, write_replay_file
from megatron_rl.run import step_records
from megatron_rl.run.step_records import StepRecorder
from megatron_rl.telemetry.run_log import RunRecord
from megatron_rl.tools.report.parting import parting
from megatron_rl.train import rl_steps
from tests.kit.programs import fork_programs
from tests.kit.ranks import fork, run_ranks
from tests.kit.records import SMALL, MadeUpRun, make_records, take_again
from tests.kit.runs import COUNT, ROOT
from tests.kit.talkative_model import make_talkative_model

# Adam turns a gradient of rounding errors into a whole step, unless eps is larger; another layout has other errors.
REFERENCE = ("algo.kl_coefficient=0.1", "algo.kl_in=loss", "optimizer.distributed=true", "optimizer.eps=1e-4")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Three steps on one process, with a reference model, each recorded with its tensors."""
    return make_records(tmp_path_factory.mktemp("runs") / "recorded", *REFERENCE)


def test_steps_taken_again_in_their_layout_are_the_same_to_the_bit(recorded, tmp_path):
    assert recorded_steps(recorded) == [0, 1, 2]
    lines, difference = take_again(recorded, 2, to=tmp_path)
    assert difference == ""
    assert [line for line in lines if line.startswith("step")] == [f"step {n}: the same to the bit" for n in range(3)]
    about = "\n".join(lines)
    for kind in ("weights of the policy before", "scores of", "advantages of", "log-probs of", "loss and", "gradients"):
        assert kind in about
    assert "differ" not in about and "none" not in about
    record = read_record(recorded / "records" / "step-2")
    assert len(record.consumed) == 12 and record.facts["version"] == 2
    assert {int(number) for number in record.update} == {0, 1}


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "context"])
def test_another_layout_is_the_same_within_a_millionth(recorded, tmp_path, layout):
    lines, difference = take_again(recorded, 2, f"parallel.{layout}=2", to=tmp_path, ranks=2)
    assert difference == ""
    assert lines[1:4] == [f"step {n}: the same within 1e-06" for n in range(3)]
    assert any("gradients: 21 tensors" in line for line in lines)


def test_what_two_replicas_recorded_is_taken_again_by_one_process_and_by_two(tmp_path):
    sharded = ("optimizer.distributed=true", "optimizer.overlap=true", "optimizer.eps=1e-4")
    run = make_records(tmp_path / "run", *sharded, ranks=2)
    _, difference = take_again(run, 1, to=tmp_path / "one")
    assert difference == ""
    lines, difference = take_again(run, 1, to=tmp_path / "two", ranks=2, as_recorded=True)
    assert difference == "" and "step 1: the same to the bit" in lines


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        (("lora.rank=2", "optimizer.distributed=true"), 1),
        (("parallel.pipeline=2", "parallel.tensor=1", "batch.share_prompts=true"), 2),
    ],
    ids=["adapters", "stages"],
)
def test_other_kinds_of_training_are_recorded_and_taken_again_on_one_process(tmp_path, settings, ranks):
    if "lora.rank=2" in settings:
        settings += (f"model.path={make_talkative_model(tmp_path / 'model')}", "model.init=hf")
    run = make_records(tmp_path / "run", *settings, "optimizer.eps=1e-4", ranks=ranks)
    lines, difference = take_again(run, 1, to=tmp_path / "replay", tolerance=1e-6)
    assert difference == "" and any("gradients: " in line and "0 tensors" not in line for line in lines), lines


def test_a_record_that_cannot_be_written_costs_no_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "records").write_text("a file in the way")
    make_records(folder)
    assert recorded_steps(folder) == []


# -- records for alarms, which are held in memory ----------------------------------------------------------------------


class HeldRun(MadeUpRun):
    """A run whose records are held. It keeps what was written before and after the alarm."""

    def _start(self):
        super()._start()
        self.records = StepRecorder(self.config, self.groups, self.trained, self.timers, say=self._say_line)


def held(folder, most_bytes, last, steps):
    """Train to step `last`, of which the batch alone is recorded, as if an error ended the run in it."""
    os.chdir(ROOT)
    step_records.PENDING_BYTES = most_bytes
    (folder / "records" / f"step-{last}").mkdir(parents=True)
    (folder / "records" / f"step-{last}" / "computed.json").write_text("of a run that was killed")
    own = (f"run.folder={folder}", f"run.steps={steps}", "run.checkpoint_every_steps=2", "run.keep_checkpoints=1")
    options, lines = load_config(COUNT, [*SMALL, *own]), []
    with HeldRun(options, folder, first=0, last=last, checkpoint=None, tolerance=None, say=lines.append) as run:
        for step in rl_steps(run):
            if step == last:
                break
        before = recorded_steps(folder)
        run.next_batch(last)
        run.records.alarm()
        run.records.alarm()  # nothing more
    return before, recorded_steps(folder), lines


def test_records_for_an_alarm_are_those_that_are_written_at_once(tmp_path):
    before, after, lines = run_ranks(1, held, tmp_path / "held", 1 << 30, 2, 3)[0]
    assert before == [] and after == [0, 1, 2] and lines == []
    run = make_records(tmp_path / "run")
    for step in range(2):
        mine, theirs = (read_record(folder / "records" / f"step-{step}") for folder in (tmp_path / "held", run))
        for name in ("consumed", "trained"):
            columns, expected = getattr(mine, name).columns(), getattr(theirs, name).columns()
            assert columns.keys() == expected.keys()
            assert all(torch.equal(columns[key], expected[key]) for key in columns), (step, name)
        assert mine.computed["updates"] == theirs.computed["updates"] and mine.facts["version"] == step
    unfinished = read_record(tmp_path / "held" / "records" / "step-2")
    assert unfinished.computed is None and len(unfinished.consumed) == 12
    lines, difference = take_again(tmp_path / "held", 1, to=tmp_path / "replay")
    assert difference == "" and "step 1: the same to the bit" in lines


def test_records_beyond_a_bound_are_written_and_old_ones_are_removed(tmp_path):
    before, after, lines = run_ranks(1, held, tmp_path / "held", 1, 6, 9)[0]
    # Of the checkpoints of steps 2, 4 and 6, one is kept. The one before may still be the newest on the disk. The last
    # record stays in memory until the next one comes.
    assert before == [2, 3, 4] and after == [4, 5, 6] and lines == []


# -- planted differences ----------------------------------------------------------------------------------------------


def other_weight():
    """One weight is the next float32 when the step begins."""
    begin = ReplayedRun.begin

    def begin_changed(self):
        begin(self)
        weight = dict(self.engine.chunks[0].named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"]
        weight.data[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))

    ReplayedRun.begin = begin_changed


def other_gradient():
    """One tensor's gradient has another sign in the second update."""
    accumulate, calls = MegatronEngine._accumulate, []

    def accumulate_changed(self, *args, **options):
        found = accumulate(self, *args, **options)
        calls.append(1)
        if len(calls) == 2:
            dict(self.chunks[0].named_parameters())["decoder.layers.0.mlp.linear_fc2.weight"].main_grad[0] *= -1
        return found

    MegatronEngine._accumulate = accumulate_changed


def other_norm():
    norm = CheckedOptimizer.get_grad_norm

    def doubled(self):
        self._norm = 2 * norm(self)
        return self._norm

    CheckedOptimizer.get_grad_norm = doubled


def other_columns(name):
    """A column of a forward pass, or of the advantages, differs in the last token of the seventh trajectory."""

    def plant():
        advantages = ReplayedRun.compute_advantages

        def changed(self, batch):
            advantages(self, batch)
            batch.tokens[name][batch.cu_seqlens[7] - 1] += 0.25

        ReplayedRun.compute_advantages = changed

    return plant


PLANTED = {
    "weights": (other_weight, (), "weights of the policy before the step", "model.layers.1.mlp.down_proj.weight, "),
    "rewards": (
        None,
        ("reward_shaping.clip=0.1",),
        "scores of trajectories",
        "trajectory 0 (group 0, prompt 0), 0.29388845 in the record and 0.1 in",
    ),
    "advantages": (other_columns("advantages"), (), "advantages of tokens", "of trajectory 6 (group 2, prompt 2), "),
    "temperature": (
        None,
        ("generation.temperature=1.5",),
        "update 0 of the policy: log-probs of tokens",
        "token 5 of ",
    ),
    "loss": (None, ("algo.entropy_coefficient=0.1",), "update 0 of the policy: loss and its sums", "loss, "),
    "gradient": (other_gradient, (), "update 1 of the policy: gradients", "model.layers.0.mlp.down_proj.weight, "),
    "norm": (other_norm, (), "update 0 of the policy: gradient norm, learning rate, applied", "grad_norm, "),
    "learning rate": (
        *(None, ("optimizer.lr=0.002", "optimizer.min_lr=0")),
        *("update 0 of the policy: gradient norm, learning rate, applied", "lr, "),
    ),
    "optimizer": (
        None,
        ("optimizer.beta1=0.5",),
        "update 0 of the policy: weights after it",
        "model.embed_tokens.weight, ",
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_the_first_value_that_differs_is_named(recorded, tmp_path, case):
    plant, overrides, kind, place = PLANTED[case]
    lines, difference = take_again(recorded, 0, *overrides, to=tmp_path, tolerance=0.0, plant=plant or (lambda: None))
    assert difference.startswith(f"{kind}: ") and place in difference
    assert any(line.startswith("step 0: DIFFERS. ") for line in lines)


def test_a_token_that_was_changed_in_the_record_shows_in_its_own_reply(recorded, tmp_path):
    run = shutil.copytree(recorded, tmp_path / "run")
    path = run / "records" / "step-0" / "consumed-0.safetensors"
    columns = load_file(path)
    token = int(columns["cu_seqlens"][4]) + 6  # the second token of a reply
    columns["tokens.input_ids"][token] = (columns["tokens.input_ids"][token] + 1) % 6
    save_file(columns, path)
    _, difference = take_again(run, 0, to=tmp_path / "replay")
    assert ": log-probs of tokens: " in difference and "the first: token 6 of trajectory 4" in difference
    runs = tuple(RunRecord(steps=[{"step": 0}], evaluations=[], samples={}, config="") for _ in range(2))
    place = parting(runs, (recorded, run))
    assert place.step == 0 and place.where.startswith(
        "prompt 1, trajectory 1 of it: the tokens part at token 6, after ["
    )
    assert "both say" not in place.where, "neither folder has a config that leads to a tokenizer"
    for folder in (recorded, run):
        (folder / "config.yaml").write_text(f"model: {{path: {ROOT / 'configs/models/count_tiny'}}}")
    lines = parting(runs, (recorded, run)).where.splitlines()
    before, sides = lines[-2], lines[-1].split("|")
    assert before.startswith("  both say '") and before.endswith("', and then")
    assert len(sides) == 2 and sides[0].strip() != sides[1].strip() and len(sides[0]) == 59


# -- a part, and a file -----------------------------------------------------------------------------------------------


def test_chosen_groups_of_a_step_are_compared_alone_and_what_is_left_out_is_said(recorded, tmp_path):
    lines, difference = take_again(recorded, 0, to=tmp_path, groups=[1, 3])
    update = read_record(recorded / "records" / "step-0").update.view(4, 3)[[1, 3]]
    count = int((update == 0).sum())
    assert difference == "" and f"in part: log-probs of {count} of 12 trajectories. Left out are" in lines[1]
    assert f"{6 - count} trajectories of these that a later update trains" in lines[1]
    _, difference = take_again(recorded, 0, "generation.temperature=2", to=tmp_path, groups=[1, 3])
    assert "(group 1, prompt 1)" in difference
    with pytest.raises(AssertionError, match="--groups: the step has no group 4; it has 0 to 3"):
        take_again(recorded, 0, to=tmp_path, groups=[4])
    with pytest.raises(AssertionError, match="--groups 1: computes nothing but log-probs, and the state before step 1"):
        take_again(recorded, 1, to=tmp_path, groups=[1])


def command(*words, output):
    """Run megatron-rl in a forked process; its exit code and what it has printed."""
    status = os.waitpid(fork(cli.main, [str(word) for word in words], output), 0)[1]
    return os.waitstatus_to_exitcode(status), output.read_text()


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_step_becomes_one_file_that_is_replayed_elsewhere(recorded, tmp_path, ending):
    file, folder = tmp_path / f"step.tar.{ending}", tmp_path / "elsewhere"
    code, said = command("replay", recorded, "--step", 1, "--export", file, output=tmp_path / "export.txt")
    assert code == 0 and "MB, complete" in said and file.stat().st_size < 200_000
    code, said = command("replay", file, "--step", 1, "--folder", folder, output=tmp_path / "replay.txt")
    assert code == 0 and "step 1: the same to the bit" in said, said
    words = ("--folder", folder, "optimizer.lr=0.5")
    code, said = command("replay", file, "--step", 1, *words, output=tmp_path / "other.txt")
    assert code == 1 and "step 0: DIFFERS. update 0 of the policy: gradient norm, learning rate, applied" in said, said


def test_the_command_starts_the_ranks_of_a_layout_and_says_what_they_find(recorded, tmp_path, monkeypatch):
    fork_programs(monkeypatch)
    words = ("replay", recorded, "--step", 0, "--layout", "tensor=2", "--folder", tmp_path / "replay")
    code, said = command(*words, output=tmp_path / "same.txt")
    assert code == 0 and "2 ranks" in said and "step 0: the same within 1e-06" in said, said
    code, said = command(*words, "optimizer.lr=0.5", output=tmp_path / "other.txt")
    assert code == 1 and said.count("step 0: DIFFERS. ") == 1, said


def test_a_file_of_another_kind_or_name_is_refused(recorded, tmp_path):
    with pytest.raises(ValueError, match="'step.zip': must end in .tar.gz or .tar.zst"):
        write_replay_file(recorded, 1, tmp_path / "step.zip", with_weights=False)
    (tmp_path / "x.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="cannot be unpacked .*; give a run's folder or a file of --export"):
        unpack(tmp_path / "x.tar.gz", tmp_path / "unpacked")


# -- what cannot be replayed ------------------------------------------------------------------------------------------


def test_a_step_without_record_or_way_there_is_refused_with_the_way_out(recorded, tmp_path):
    with pytest.raises(AssertionError, match="--step 7: .* has no record of it, but of 0, 1, 2; record steps with"):
        take_again(recorded, 7, to=tmp_path)
    run = shutil.copytree(recorded, tmp_path / "run")
    shutil.rmtree(run / "records" / "step-1")
    with pytest.raises(AssertionError, match="the last state before it is that of step 0, and steps 1 to 1 have no"):
        take_again(run, 2, to=tmp_path)


def test_a_step_in_which_the_run_ended_is_taken_without_comparison(recorded, tmp_path):
    run = shutil.copytree(recorded, tmp_path / "run")
    (run / "records" / "step-1" / "computed.json").unlink()
    lines, difference = take_again(run, 1, to=tmp_path / "replay")
    assert difference == "" and "step 1: taken; the run ended within it" in lines[-1]


def test_a_record_says_what_made_it(recorded):
    facts = json.loads((recorded / "records" / "step-0" / "record.json").read_text())
    assert facts["made_by"].startswith("# megatron_rl ") and "torch" in facts["arithmetic"]["machine"]
    assert facts["arithmetic"]["layout"]["tensor"] == 1 and "kl_coefficient: 0.1" in facts["config"]
