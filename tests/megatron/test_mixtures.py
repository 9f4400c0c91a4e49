"""The updates of mixtures of experts do not depend on the layout; test_models has their logits and weights."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import DISTRIBUTED, GENTLE, resume_and_save, uninterrupted
from test_gradients import assert_same_updates, two_updates, user_loss, user_weight
from test_models import hf_gradients

from megatron_rl.config import EngineConfig, ModelConfig, ParallelConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from tests.kit.models import LAYOUTS, MIXTURES, VARIANTS, make_batch, make_engine, make_groups, make_model, share_of
from tests.kit.ranks import run_each, run_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp(family) for family in MIXTURES}
    for family, folder in folders.items():
        make_model(family, folder, layers=2)
    return folders


# Qwen3-MoE's other layouts are rows of test_theorems. In tp2_sp experts have other replicas than the rest of the layer
# without expert parallelism; in cp2_tp2 latent rows are gathered over the context axis before the tensor axis.
UPDATED = [("qwen3_moe", "tp2_sp"), ("qwen3_moe", "pp2_ep2"), ("deepseek_v3", "cp2_tp2")]
UPDATED += [(f, layout) for f in MIXTURES if f != "qwen3_moe" for layout in ("cp2_ep2", "tp2_pp2_ep2")]
# Its experts' biases are no copies of each other on the tensor axis.
UPDATED += [("gpt_oss", "tp2_sp"), ("gpt_oss", "tp2_ep2")]
# Delta nets hand no state on between context ranks.
UPDATED = [
    (f, "tp2_ep2" if "linear_attention" in getattr(MIXTURES[f], "layer_types", ()) and layout == "cp2_ep2" else layout)
    for f, layout in UPDATED
]


def is_quick(family, layout):
    return layout not in ("pp2_ep2", "tp2_pp2_ep2") and family not in VARIANTS


@pytest.fixture(scope="module")
def updates(folders):
    """A function: family, layout -> what each rank of the layout finds."""

    @cache
    def run(layout, are_variants):
        own = [family for family in folders if (family in VARIANTS) == are_variants]
        families = [family for family in own if layout == "1" or (family, layout) in UPDATED]
        cases = {family: (folders[family], layout, make_batch(), "logprobs") for family in families}
        return run_each(LAYOUTS[layout][0], two_updates, cases)

    return lambda family, layout: run(layout, family in VARIANTS)[family]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family,layout",
    # Each family once on two ranks; on four, latent rows that two axes gather.
    [
        pytest.param(family, layout, marks=() if is_quick(family, layout) else pytest.mark.thorough)
        for family, layout in UPDATED
    ],
)
def test_update_does_not_depend_on_the_layout(family, layout, updates):
    (alone,), (first, *others) = updates(family, "1"), updates(family, layout)
    assert_same_updates(first, alone)
    for name, tensor in alone[1].items():
        assert (first[1][name] - tensor).norm() < 1e-5 * tensor.norm(), name
    for stats, _ in others:
        assert stats == first[0], "every rank reports the same step"


def router_gradients(folder, batch):
    engine = make_engine(folder, LAYOUTS["1"][1], clip_grad=0.0).train()
    stats = engine.train_batch(batch, user_loss, user_weight)
    return stats, [
        layer.mlp.router.weight.main_grad.clone()
        for layer in engine.chunks[0].decoder.layers
        if hasattr(layer.mlp, "router")
    ]


@pytest.fixture(scope="module")
def gradients(folders):
    return run_each(1, router_gradients, {family: (folder, make_batch()) for family, folder in folders.items()})


@pytest.mark.parametrize("family", MIXTURES)
def test_gradient_equals_float64_autograd(family, folders, gradients):
    stats, routers = gradients[family][0]
    model = hf_gradients(folders[family], make_batch(), stats)
    theirs = [getattr(layer.mlp, "router", getattr(layer.mlp, "gate", None)) for layer in model.model.layers]
    assert len(routers) > 0
    for ours, router in zip(routers, filter(None, theirs), strict=True):
        torch.testing.assert_close(ours.double(), router.weight.grad, rtol=0, atol=1e-6)
        assert ours.abs().max() > 1e-4


@pytest.fixture(scope="module")
def separate_prompts(folders):
    return run_ranks(1, two_updates, *of_groups(folders, "1", {"share_prompts": False}))[0]


def of_groups(folders, layout, options):
    return folders["deepseek_v3"], layout, make_groups(), "logprobs", 64, options


SELECTIVE = {"megatron": {"recompute_granularity": "selective"}}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "cp2_ep2", pytest.param("cp2_tp2", marks=pytest.mark.thorough)])
def test_shared_prompts_give_the_same_update_of_latent_attention(layout, folders, separate_prompts):
    cases = {part: of_groups(folders, layout, options) for part, options in [("kept", {}), ("formed", SELECTIVE)]}
    for ranks in run_each(LAYOUTS[layout][0], two_updates, cases).values():
        assert_same_updates(ranks[0], separate_prompts)


@pytest.mark.thorough  # test_checkpoint.py has experts that go elsewhere
def test_a_run_continues_with_experts_elsewhere(folders, tmp_path):
    folder, chain = folders["deepseek_v3"], [("tp2_ep2", GENTLE), ("pp2", DISTRIBUTED), ("ep2", DISTRIBUTED)]
    expected, source = run_ranks(1, uninterrupted, folder, len(chain))[0], None
    for number, (layout, options) in enumerate(chain):
        target = tmp_path / f"checkpoint{number}"
        arguments = (folder, layout, source, target, options, number == 1)
        _, saved = run_ranks(LAYOUTS[layout][0], resume_and_save, *arguments)[0]
        for name, tensor in expected[number].items():
            torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-6, msg=name)
        source = target


def bias_in_bfloat16(folder, target):
    model = ModelConfig(path=str(folder), dtype="bfloat16")
    engine = MegatronEngine(EngineConfig(model=model, parallel=LAYOUTS["ep2"][1]))
    engine.initialize()
    engine.train().train_batch(share_of(make_batch(), engine), user_loss, user_weight)
    engine.save(target)


@pytest.mark.slow
def test_router_bias_is_neither_rounded_nor_trained(folders, tmp_path):
    run_ranks(2, bias_in_bfloat16, folders["deepseek_v3"], tmp_path)
    before, after = (load_file(path / "model.safetensors") for path in (folders["deepseek_v3"], tmp_path))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(before[name], after[name]) and not torch.equal(before[name], before[name].bfloat16().float())
    gate = "model.layers.1.mlp.gate.weight"
    assert after[gate].dtype is torch.bfloat16 and not torch.equal(before[gate].bfloat16(), after[gate])


REFUSED = {
    "parallel.expert = 2: does not divide": ("odd", ParallelConfig(expert=2)),
    "parallel.expert = 2: llama has no experts": ("llama", ParallelConfig(expert=2)),
    "parallel.sequence = False: qwen3_moe under parallel.tensor > 1": (
        "qwen3_moe",
        ParallelConfig(tensor=2, sequence=False),
    ),
}


def refused(folder, parallel, message):
    with pytest.raises(ValueError, match=message):
        make_engine(folder, parallel)


def test_layout_that_does_not_fit_the_experts_is_refused(tmp_path):
    make_model("qwen3_moe", tmp_path / "odd", num_experts=3)
    for family in ("llama", "qwen3_moe"):
        make_model(family, tmp_path / family)
    run_each(2, refused, {m: (tmp_path / family, parallel, m) for m, (family, parallel) in REFUSED.items()})


def grouped_products(folder):
    with pytest.raises(ValueError, match="megatron.moe_grouped_gemm = True: needs model.transformer_impl=transformer_"):
        make_engine(folder, LAYOUTS["1"][1], megatron={"moe_grouped_gemm": True})


def test_grouped_products_are_refused_without_transformer_engine(folders):
    run_ranks(1, grouped_products, folders["qwen3_moe"])


def places_in_stream(folder, layout):
    """How far the ranks' streams of weights have come, by rank, whenever a rank has been given a place in its own."""
    engine, met = make_engine(folder, LAYOUTS[layout][1]), []
    export = engine.export()
    for number, (name, tensor) in enumerate(export.stream_in_step()):
        places = [None] * engine.groups.world_size
        torch.distributed.all_gather_object(places, (number, name), group=engine.groups.control)
        met.append(set(places) == {(number, export.specs[number].name)} and (tensor is None) != engine.groups.is_main)
    return len(met) == len(export.specs), all(met)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2_pp2_ep2", pytest.param("tp2_ep2_etp2", marks=pytest.mark.thorough)])
def test_ranks_can_meet_between_any_two_tensors_of_a_stream(layout, folders):
    cases = {family: (folders[family], layout) for family in ("qwen3_moe", "deepseek_v3")}
    for ranks in run_each(LAYOUTS[layout][0], places_in_stream, cases).values():
        assert ranks == [(True, True)] * 4
