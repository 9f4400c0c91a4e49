"""Training on pairs of replies: each update is that of its definition in float64, whatever the layout and the split."""

import math
import os
import signal
from functools import cache
from pathlib import Path

import pytest
import torch
from gathered import as_hf_tensors, record_gradients, relative_error
from safetensors.torch import load_file
from test_fsdp_referee import OPTIONS, make_fsdp
from torch.nn.functional import softplus
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_rl.algo.catalogue import find_pair_loss
from megatron_rl.config import load_config
from megatron_rl.data.sft_rows import join_pairs
from megatron_rl.run.checks import check
from megatron_rl.run.preference_run import PairTraining, PreferenceRun, Reference, asked_together, check_preference
from megatron_rl.telemetry.run_log import read_run
from megatron_rl.train import train
from tests.kit.models import LAYOUTS, VOCAB, make_engine, make_model, make_value_model
from tests.kit.ranks import run_ranks
from tests.kit.waiting import LATE_S

pytestmark = pytest.mark.usefixtures("programs_are_forked")

TOLERANCE = 1e-5
CASES = {
    "dpo": {"beta": 0.5},
    "conservative dpo": {"beta": 0.5, "label_smoothing": 0.2},
    "ipo": {"beta": 0.2},
    "simpo": {"beta": 3.0, "margin": 0.5},
    "bradley_terry": {},
}
# Every pair in a microbatch of its own, of which two replicas have three and two; some together; all in one.
SPLITS = {"1": (1, 40, 1000), "tp2_sp": (40,), "tp2_pp2": (40,), "pp2_vpp2": (40,), "dp2": (1, 1000), "cp2": (40,)}


def entry_of(case):
    return find_pair_loss(case.split()[-1], CASES[case])


def pairs_of_batch():
    """Five pairs: prompts of 1 to 14 tokens, replies of 1 to 8; and what a reference would give their tokens."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count):
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    lengths = [(9, 3, 5), (1, 1, 4), (14, 8, 2), (4, 6, 6), (2, 7, 1)]
    batch = join_pairs([tuple(map(tokens, three)) for three in lengths])
    noise = torch.rand(len(batch["input_ids"]), generator=generator)
    near = -torch.tensor(float(VOCAB)).log()
    batch.tokens["ref_logprobs"] = (near + noise) * batch["loss_mask"]
    return batch


def engines(backend, folders, layout, cases):
    """Make the engine of each head, one after the other in one world; yield it with its cases."""
    groups = None
    for head in sorted({entry_of(case).entry.head for case in cases}):
        if backend == "fsdp":
            engine = make_fsdp(folders[head], groups=groups, head=head)
        else:
            engine = make_engine(folders[head], LAYOUTS[layout][1], groups=groups, head=head, **OPTIONS)
        groups = engine.groups
        yield engine, [case for case in cases if entry_of(case).entry.head == head]


def updates(backend, folders, layout, splits, cases):
    """Return (statistics, whole gradient) of one update from the folder's weights by (case, split)."""
    results = {}
    for engine, own_cases in engines(backend, folders, layout, cases):
        gradients = record_gradients(engine)
        for case in own_cases:
            for split in splits:
                engine.load(engine.config.model.path)
                engine.reset_optimizer(10)
                engine.config.tokens_per_microbatch = split
                stats = PairTraining(engine, engine.groups, entry_of(case)).update(pairs_of_batch())
                results[case, split] = stats, as_hf_tensors(engine, gradients[-1])
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function: layout -> folder by head. Only chunks of stages need more than two layers."""

    @cache
    def make(layers):
        found = {head: tmp_path_factory.mktemp(head) for head in ("policy", "value")}
        make_model("llama", found["policy"], layers)
        make_value_model("llama", found["value"], layers)
        return found

    return lambda layout: make(4 if layout == "pp2_vpp2" else 2)


def float64_update(case, folder, scratch):
    """Loss, share of pairs that the model has right, and gradients by HF name, from formulas of this test's own."""
    batch, args, losses, preferred = pairs_of_batch(), CASES[case], [], 0
    is_reward = case == "bradley_terry"
    kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    model = kind.from_pretrained(folder).double()
    bounds, values = batch.cu_seqlens.tolist(), []
    for a, b in zip(bounds, bounds[1:], strict=False):
        ids, mask = batch["input_ids"][a:b], batch["loss_mask"][a:b]
        if is_reward:
            values.append((model(ids[None]).logits[0, 0], None, None))
            continue
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0][mask[1:]]
        ratio = (logprobs - batch["ref_logprobs"][a:b][mask].double()).sum()
        values.append((logprobs.sum(), ratio, int(mask.sum())))
    for (win, win_ratio, win_tokens), (lose, lose_ratio, lose_tokens) in zip(values[::2], values[1::2], strict=True):
        beta = args.get("beta", 1.0)
        if is_reward:
            d = win - lose
            losses.append(softplus(-d))
        elif case == "simpo":
            d = beta * (win / win_tokens - lose / lose_tokens)
            losses.append(softplus(args["margin"] - d))
        elif case == "ipo":
            d = win_ratio - lose_ratio
            losses.append((d - 0.5 / beta) ** 2)
        else:
            d, wrong = beta * (win_ratio - lose_ratio), args.get("label_smoothing", 0.0)
            losses.append((1 - wrong) * softplus(-d) + wrong * softplus(d))
        preferred += float(d.detach()) > 0
    loss = sum(losses) / len(losses)
    loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(scratch)
    return loss.item(), preferred, load_file(scratch / "model.safetensors")


@pytest.fixture(scope="module")
def expected(folders, tmp_path_factory):
    """A function: layout, case -> `float64_update` of that layout's model."""
    update = cache(lambda case, folder: float64_update(case, folder, tmp_path_factory.mktemp("gradients")))
    return lambda layout, case: update(case, folders(layout)[entry_of(case).entry.head])


def assert_as_defined(ranks, layout, expected):
    for (case, split), (stats, gradients) in ranks[0].items():
        loss, preferred, whole = expected(layout, case)
        assert all(other[case, split][0] == stats for other in ranks), "every rank reports the same step"
        assert stats.weight == 5 and stats.sums["preferred"] == preferred, case
        assert stats.loss == pytest.approx(loss, rel=TOLERANCE), case
        for name, gradient in whole.items():
            error = relative_error(gradients[name], gradient)
            assert error <= TOLERANCE, f"{case}, microbatches of {split}: {name} differs by {error:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    # `make test` has one process, and the axes that divide pairs among replicas and a sequence among ranks.
    [pytest.param(layout, marks=() if layout in ("1", "dp2", "cp2") else pytest.mark.thorough) for layout in SPLITS],
)
def test_update_is_that_of_the_definition_in_float64(layout, folders, expected):
    ranks = run_ranks(LAYOUTS[layout][0], updates, "megatron", folders(layout), layout, SPLITS[layout], CASES)
    assert_as_defined(ranks, layout, expected)
    assert 0 < sum(expected(layout, case)[1] for case in CASES) < 5 * len(CASES), (
        "some pairs are right and some are not"
    )


@pytest.mark.thorough  # test_supervised.py has FSDP
@pytest.mark.slow
def test_the_same_on_fsdp(folders, expected):
    assert_as_defined(run_ranks(2, updates, "fsdp", folders("dp2"), "dp2", (40,), CASES), "dp2", expected)


def trained(backend, folders, layout):
    """By case: two updates compared with the start as reference, then the loss of all pairs."""
    results = {}
    for engine, cases in engines(backend, folders, layout, CASES):
        for case in cases:
            engine.load(engine.config.model.path)
            engine.reset_optimizer(10)
            training = PairTraining(engine, engine.groups, entry_of(case))
            pairs = pairs_of_batch()
            if training.entry.needs_reference:
                pairs.tokens["ref_logprobs"] = training.ref_logprobs(pairs)
            results[case] = [*(training.update(pairs) for _ in range(2)), training.evaluate(pairs)]
    return results


@pytest.mark.thorough
def test_training_on_fsdp_is_that_on_megatron(folders):
    ours, megatrons = (
        run_ranks(*world, folders("1"), "1")[0] for world in ((2, trained, "fsdp"), (1, trained, "megatron"))
    )
    for case, expected in megatrons.items():
        for found, one in zip(ours[case], expected, strict=True):
            assert found.loss == pytest.approx(one.loss, rel=TOLERANCE) and found.weight == one.weight == 5
            assert found.sums == pytest.approx(one.sums, rel=1e-4, abs=1e-3)
            assert found.grad_norm == pytest.approx(one.grad_norm, rel=TOLERANCE)
        assert ours[case][2].loss < ours[case][0].loss
    assert ours["dpo"][0].loss == pytest.approx(math.log(2), rel=TOLERANCE), "a policy at its reference"


def test_reference_gives_every_pair_its_own_numbers_in_any_company():
    batch = pairs_of_batch()
    reference = Reference()
    reference.keep([40, 7, 13, 2, 9], batch, batch["ref_logprobs"])
    bounds = batch.cu_seqlens.tolist()
    again = batch.select([4, 5, 2, 3, 4, 5])  # 13, 7, 13
    assert "ref_logprobs" in again.tokens
    expected = again.tokens.pop("ref_logprobs")
    reference.add_to(again, [13, 7, 13])
    assert torch.equal(again["ref_logprobs"], expected) and len(expected) == again.cu_seqlens[-1] < bounds[-1] * 3


ROOT = Path(__file__).parents[2]
SMALL = ("batch.prompts_per_step=6", "batch.tokens_per_microbatch=60", "data.evaluation_args.count=7")


def run_of(config, *settings):
    """Run a shipped config on this rank, from random weights; return what it logged."""
    random = (f"model.path={ROOT}/configs/models/count_tiny", "model.init=random")
    loaded = load_config(ROOT / "configs" / f"{config}.yaml", [*random, *SMALL, *settings])
    assert train(loaded, resume="auto" if loaded.run.checkpoint_every_steps else "")
    return read_run(loaded.run.folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "other"),
    [("count_dpo", "dp2"), ("count_reward_model", "tp2_sp")],
)
def test_run_is_the_same_on_two_ranks(config, other, tmp_path):
    runs = {}
    for ranks, layout in ((1, "1"), (2, other)):
        axes = f"parallel.tensor={LAYOUTS[layout][1].tensor}"
        folder = tmp_path / layout
        runs[layout] = run_ranks(ranks, run_of, config, "run.steps=3", axes, f"run.folder={folder}")[0]
        assert (folder / "report.html").is_file()
    one = runs["1"]
    # The first update finds the policy at its reference, and a value head at zero.
    assert one.steps[0]["preference/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert one.steps[0]["preference/margin"] == pytest.approx(0.0, abs=1e-5)
    assert one.steps[2]["preference/margin"] > 1e-4
    weights = load_file(tmp_path / "1" / "final" / "model.safetensors")
    assert ("score.weight" in weights) == (config == "count_reward_model")
    for ours, alone in zip(runs[other].steps, one.steps, strict=True):
        for name in ("loss", "margin", "grad_norm"):
            assert ours[f"preference/{name}"] == pytest.approx(alone[f"preference/{name}"], rel=1e-3, abs=1e-5)
    for ours, alone in zip(runs[other].evaluations, one.evaluations, strict=True):
        assert ours["pairs"] == 7 and ours["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    found = load_file(tmp_path / other / "final" / "model.safetensors")
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["preference.loss=''", "generation.n_samples=2"], "preference.loss = '': names no loss of pairs; set dpo"),
        (["batch.updates_per_step=2"], "batch.updates_per_step = 2: must be 1 with preference.loss"),
        (
            ["warm_start.updates=5"],
            "warm_start.updates = 5: must be 0 with preference.loss; run megatron-rl sft be",
        ),
        (["preference.loss_args.beta=0"], "preference.loss_args.beta = 0: must be above 0"),
        (["data.train=megatron_rl.data.tasks:count_ones"], "data.train, pair 1: chosen = None: must be the text"),
        (["model.init=hf"], "no .*safetensors there"),
        (["parallel.tensor=3"], "parallel.tensor = 3"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_loaded(settings, message):
    model = (f"model.path={ROOT}/configs/models/count_tiny", "model.init=random")
    with pytest.raises(ValueError, match=message):
        check_preference(load_config(ROOT / "configs" / "count_dpo.yaml", [*model, *settings]))


@pytest.mark.parametrize(
    ("config", "setting"), [("count_dpo", "preference.loss = 'dpo'"), ("count_sft", "supervised.answer = 'answer'")]
)
def test_rl_refuses_a_run_on_data(config, setting):
    with pytest.raises(ValueError, match=f"{setting}: .* start it by megatron-rl launch"):
        check(load_config(ROOT / "configs" / f"{config}.yaml"))


def test_reference_is_asked_about_a_pair_in_the_same_company_whichever_step_a_run_goes_on_from():
    steps = [[3, 1], [4, 1], [5, 9], [2, 6], [5, 3], [7, 7]]
    whole = list(asked_together(steps.__getitem__, 6, 0))
    assert whole == [[1, 3], [4], [5, 9], [2, 6], [7]]
    for first in range(6):
        asked = list(asked_together(steps.__getitem__, 6, first))
        assert all(company in whole for company in asked)
        assert {n for numbers in steps[first:] for n in numbers} <= {n for company in asked for n in company}
    assert list(asked_together(steps.__getitem__, 6, 4)) == [[1, 3], [5, 9], [7]], "and about no other"


def told_before_it_begins(folder):
    """Whether the run begins, and how many phases it went through."""
    random = (f"model.path={ROOT}/configs/models/count_tiny", "model.init=random", "run.checkpoint_every_steps=1")
    config = load_config(ROOT / "configs" / "count_dpo.yaml", [*random, *SMALL, f"run.folder={folder}"])
    with PreferenceRun(config) as run:
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.stop_signal.came(within_s=LATE_S)
        return run.begin(), run.timers.snapshot()


def test_notice_is_not_kept_waiting_by_the_reference_of_all_pairs(tmp_path):
    ((begins, seconds),) = run_ranks(1, told_before_it_begins, tmp_path / "run")
    assert not begins and "time/evaluate" not in seconds
    assert list((tmp_path / "run" / "checkpoints").glob("*")) == []


@pytest.mark.thorough
def test_resumed_run_compares_with_the_reference_of_its_start(tmp_path):
    keep = ("run.checkpoint_every_steps=2", "optimizer.lr=5e-3")
    whole = run_ranks(1, run_of, "count_dpo", "run.steps=4", f"run.folder={tmp_path}/whole", *keep)[0]
    run_ranks(1, run_of, "count_dpo", "run.steps=2", f"run.folder={tmp_path}/parts", *keep)
    resumed = run_ranks(1, run_of, "count_dpo", "run.steps=4", f"run.folder={tmp_path}/parts", *keep)[0]
    assert [line["step"] for line in resumed.steps] == [0, 1, 2, 3]
    for ours, expected in zip(resumed.steps, whole.steps, strict=True):
        assert ours["preference/loss"] == pytest.approx(expected["preference/loss"], rel=1e-5)
    assert abs(whole.steps[2]["preference/margin"]) > 1e-3, "the policy had left its reference"
