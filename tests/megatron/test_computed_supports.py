"""Supports that the trainer computes, in every layout and packing, and what a run with them trains."""

from functools import cache

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.ops import Cut, VocabShard, kept_tokens
from megatron_rl.support import COLUMN, NO_TOKEN
from megatron_rl.train import train
from megatron_rl.types import TrajectoryBatch
from tests.kit.models import LAYOUTS, VOCAB, make_engine, make_groups, make_model, share_of
from tests.kit.ranks import run_each, run_ranks
from tests.kit.runs import steps_of
from tests.kit.waiting import LATE_S

TEMPERATURE = 0.2
"""Low, as the tiny model's random logits are nearly equal."""
CUT = Cut(top_p=0.6, min_p=0.02, width=20)
OTHERS = ("tp2_sp", "pp2", "pp2_vpp2", "dp2", "cp2", "cp2_tp2_pp2")
EVERY_LAYOUT = ["1", "tp2", *(pytest.param(layout, marks=pytest.mark.thorough) for layout in OTHERS)]
PACKINGS = {"several": {"tokens_per_microbatch": 40}, "shared prompts": {"share_prompts": True}}


def computed(folder, layout, options):
    """Return this rank's tokens of the batch, their supports, and their log-probabilities over these and over all."""
    engine = make_engine(folder, LAYOUTS[layout][1], **options).eval()
    batch = make_groups()
    own, data = share_of(batch, engine), engine.groups.data
    here = torch.isin(batch.sequence_ids, torch.arange(data.rank, len(batch), data.size))
    found = engine.kept_tokens(own, CUT, temperature=TEMPERATURE)
    over_all = engine.forward(own, temperature=TEMPERATURE)
    tokens = own.tokens | {COLUMN: found.ids}
    own = TrajectoryBatch(tokens, own.sequences, own.cu_seqlens, own.versions)
    return here, found, engine.forward(own, temperature=TEMPERATURE), over_all


def logits_of(folder):
    engine = make_engine(folder, LAYOUTS["1"][1]).eval()
    batch, found = make_groups(), []

    def note(logits, rows):
        found.append((rows["labels"], torch.Tensor(logits).clone()))
        return torch.zeros(len(logits))

    for number in range(len(batch)):
        engine.forward(batch.select([number]), note)
    labels, rows = (torch.cat(part) for part in zip(*found, strict=True))
    return rows[labels >= 0], labels[labels >= 0]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A function: layout -> by packing what each rank found. `right` are the supports of whole float64 logits."""

    @cache
    def folder_of(layers):
        folder = tmp_path_factory.mktemp(f"qwen3-{layers}")
        make_model("qwen3_tied_one_kv_head", folder, layers=layers)
        return folder

    @cache
    def run(layout):
        layers = 4 if "vpp" in layout else 2
        cases = {name: (folder_of(layers), layout, options) for name, options in PACKINGS.items()}
        return run_each(LAYOUTS[layout][0], computed, cases)

    @cache
    def right(layout):
        ((logits, labels),) = run_ranks(1, logits_of, folder_of(4 if "vpp" in layout else 2))
        return kept_tokens(logits[:, :VOCAB].double(), labels, CUT, VocabShard(0, VOCAB, VOCAB), TEMPERATURE)

    run.right = right
    return run


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_supports_are_those_of_whole_logits_and_ratios_of_an_unchanged_policy_are_one(layout, packing, ran):
    right, trained = ran.right(layout), make_groups()["loss_mask"].bool()
    sizes = (right.ids != NO_TOKEN).sum(1)
    assert right.is_outside.any() and (~right.is_outside).any() and sizes.min() == 0 and sizes.max() > 8
    expected = torch.full((len(trained), CUT.width), NO_TOKEN, dtype=torch.int32)
    expected[trained] = right.ids
    for here, found, over_support, over_all in ran(layout)[packing]:
        assert torch.equal(found.ids, expected[here])
        own = trained[here]
        assert torch.equal(found.is_outside[own], right.is_outside[here[trained]])
        torch.testing.assert_close(found.log_mass[own].double(), right.log_mass[here[trained]], rtol=0, atol=1e-4)
        assert found.log_mass[~own].eq(0).all() and found.ids[~own].eq(NO_TOKEN).all()
        # What a server reports is over all tokens; the trainer subtracts the support's share of it.
        torch.testing.assert_close(over_support[own], (over_all - found.log_mass)[own], rtol=0, atol=5e-6)


def train_on_cut_samples(arguments):
    train(load_config("configs/count_grpo.yaml", arguments))


@pytest.mark.thorough
def test_a_run_trains_replies_of_changed_logits_without_top_k(tiny_model, tmp_path):
    arguments = [f"model.path={tiny_model}", "model.init=hf", "warm_start.updates=0", "data.evaluation="]
    arguments += [f"run.folder={tmp_path}/run", "run.steps=2", "run.save_at_end=false", "batch.updates_per_step=2"]
    arguments += ["generation.max_new_tokens=16", "generation.temperature=0.2", "generation.frequency_penalty=0.3"]
    arguments += ["generation.logit_bias={5: 0.5, 7: -0.5}", "generation.repetition_penalty=1.2"]
    run_ranks(1, train_on_cut_samples, arguments, timeout_s=LATE_S)
    steps = steps_of(tmp_path / "run")
    assert all(step["mismatch/max"] < 1e-3 and "rollout/support_size" not in step for step in steps)


def test_a_run_trains_replies_of_top_p_alone(tiny_model, tmp_path):
    arguments = [f"model.path={tiny_model}", "model.init=hf", "warm_start.updates=0", "data.evaluation="]
    arguments += [f"run.folder={tmp_path}/run", "run.steps=2", "run.save_at_end=false", "batch.updates_per_step=2"]
    arguments += ["generation.max_new_tokens=16", "generation.temperature=0.2", "generation.top_p=0.6"]
    arguments += ["generation.supports=computed", "algo.kl_coefficient=0.1"]
    run_ranks(1, train_on_cut_samples, arguments, timeout_s=LATE_S)
    for step in steps_of(tmp_path / "run"):
        # Only tokens at the edge can be outside, and only by rounding.
        assert step["mismatch/outside_support"] < 0.02 and step["rollout/whole_supports"] == 0.0
        assert 1 < step["rollout/support_size"] < 400 and step["mismatch/max"] < 1e-3
