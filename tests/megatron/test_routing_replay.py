"""Routing replay (R3): the servers' experts and weights, in every layout, with recomputation and shared prompts.

The server here is transformers, which tells its routes; test_sglang_routing.py has real SGLang.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from routed import RoutedModel, perturbed, with_routes
from test_gradients import assert_same_updates

from megatron_rl import routes
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.route_form import route_form
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_groups, make_model, share_of
from tests.kit.ranks import run_each, run_ranks

FAMILIES = ("qwen3_moe", "deepseek_v3")
QUICK = ("1", pytest.param("cp2_ep2", marks=pytest.mark.slow))
OF_EXPERTS = ("ep2", "tp2_ep2", "tp2_ep2_etp2", "tp2_etp2", "pp2_ep2", "tp2_pp2_ep2", "tp2_pp2_dp2_ep2")
OTHERS = ("tp2_sp", "pp2", "pp2_vpp2", "dp2", "cp2", "cp2_tp2", "cp2_tp2_pp2", "pp2_vpp2_dp2", *OF_EXPERTS)
# Each axis, and stages of several chunks; experts over context ranks, of which each has rows of its own.
EVERY_LAYOUT = [*QUICK, *(pytest.param(layout, marks=pytest.mark.thorough) for layout in OTHERS)]
REPLAYS = ("experts", "experts_and_weights")
NOISE = 0.5
"""Of the router's weights, as a share of their standard deviation: a quarter of the choices are others."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """By family and layers: the server's model, the trainer's with another router, and the folders of both."""

    @cache
    def make(family, layers):
        folder, other = tmp_path_factory.mktemp(family), tmp_path_factory.mktemp(f"{family}-perturbed")
        model = make_model(family, folder, layers)
        trained = perturbed(model, scale=NOISE, bias=0.1)
        trained.save_pretrained(other)
        return RoutedModel(model, folder), RoutedModel(trained, other), folder, other

    return make


def layers_of(layout):
    """Two mixtures in each family, and layers for each stage and chunk."""
    return 4 if LAYOUTS[layout][1].pipeline > 1 else 3


def batch_of(server, replay, batch=None):
    batch = make_batch() if batch is None else batch
    return with_routes(batch, server.routes(batch), replay)


def logprobs_and_update(folder, layout, replay, batch, options):
    engine = make_engine(folder, LAYOUTS[layout][1], routing_replay=replay, clip_grad=0.0, **options)
    own = share_of(batch, engine)
    before = engine.eval().forward(own)
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig(kl_coefficient=0.0)))
    engine.train()
    stats = [engine.train_batch(own, loss)]  # one: its own routes are others afterwards
    weights = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    return before, (stats, weights), (engine.groups.data.rank, engine.groups.data.size)


@pytest.fixture(scope="module")
def ran(served):
    """A function: layout, layers -> by (family, weights, replay) what each rank found."""

    @cache
    def run(layout, layers):
        cases = {}
        for family in FAMILIES:
            server, _, same, other = served(family, layers)
            for which, folder in (("same", same), ("perturbed", other)):
                for replay in ("off", *REPLAYS):
                    if which == "perturbed" or replay != "experts_and_weights":
                        batch = batch_of(server, "experts" if replay == "off" else replay)
                        cases[family, which, replay] = folder, layout, replay, batch, {}
        return run_each(LAYOUTS[layout][0], logprobs_and_update, cases)

    return run


def logprobs_alone(folder, layout, replay, batch):
    engine = make_engine(folder, LAYOUTS[layout][1], routing_replay=replay)
    return engine.eval().forward(share_of(batch, engine)), (engine.groups.data.rank, engine.groups.data.size)


def of_all(ranks, batch):
    """Return `[N]` of the batch, of what the data-parallel ranks found for their shares."""
    result = torch.zeros(len(batch["input_ids"]))
    for before, *_, (rank, size) in ranks:
        tokens = torch.isin(batch.sequence_ids, torch.arange(rank, len(batch), size))
        result[tokens] = before
    return result


@pytest.mark.slow
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_servers_with_replay_and_not_without(family, layout, served, ran):
    server, trainer, _, _ = served(family, layers_of(layout))
    batch, found = batch_of(server, "experts_and_weights"), ran(layout, layers_of(layout))
    sampled = server.logprobs(batch).detach()
    with_weights = of_all(found[family, "perturbed", "experts_and_weights"], batch)
    torch.testing.assert_close(with_weights, sampled, rtol=0, atol=1e-5)
    for replay, least in (("off", 1e-2), ("experts", 1e-3)):  # with the server's experts, and weights of its own
        assert (of_all(found[family, "perturbed", replay], batch) - sampled).abs().max() > least, replay
    experts = batch_of(server, "experts")
    reference = trainer.logprobs(experts, experts["routes"]).detach()
    torch.testing.assert_close(of_all(found[family, "perturbed", "experts"], batch), reference, rtol=0, atol=1e-5)


def without_share(update):
    """Leave out the share of changed choices, which is of computed rows."""
    (stats,), weights = update
    sums = {key: value for key, value in stats.sums.items() if key != "changed_routes"}
    return [replace(stats, sums=sums)], weights


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_trainers_own_experts_changes_no_update(family, layout, ran):
    found = ran(layout, layers_of(layout))
    for replayed, plain in zip(found[family, "same", "experts"], found[family, "same", "off"], strict=True):
        assert replayed[1][0][0].sums["changed_routes"] == 0.0
        assert_same_updates(without_share(replayed[1]), plain[1])


@pytest.mark.parametrize("layout", [entry for entry in EVERY_LAYOUT if entry != "1"])
@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_with_others_experts_does_not_depend_on_the_layout(family, replay, layout, ran):
    (alone,) = ran("1", layers_of(layout))[family, "perturbed", replay]
    ((stats,), _) = alone[1]
    assert 0.05 < stats.mean("changed_routes") < 0.5, "of choices, counted by each rank for its own rows and layers"
    assert_same_updates(ran(layout, layers_of(layout))[family, "perturbed", replay][0][1], alone[1])


RECOMPUTED = {
    "whole layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "mixtures": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family,layout",
    [
        pytest.param("deepseek_v3", "1", marks=pytest.mark.thorough),
        ("qwen3_moe", "pp2_vpp2"),  # where many microbatches are under way at once
        pytest.param("qwen3_moe", "1", marks=pytest.mark.thorough),
        pytest.param("deepseek_v3", "pp2_vpp2", marks=pytest.mark.thorough),
    ],
)
def test_recomputed_layers_replay_the_routes_of_their_own_microbatch(family, layout, served):
    server, _, _, other = served(family, layers_of(layout))
    batch = batch_of(server, "experts_and_weights")
    found = {"plain": (other, layout, "experts_and_weights", batch, {"tokens_per_microbatch": 14})}
    for name, megatron in RECOMPUTED.items():
        found[name] = (*found["plain"][:-1], {"tokens_per_microbatch": 14, "megatron": megatron})
    plain, *others = run_each(LAYOUTS[layout][0], logprobs_and_update, found).values()
    for recomputed in others:
        assert_same_updates(recomputed[0][1], plain[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", pytest.param("tp2_sp", marks=pytest.mark.thorough), "cp2_ep2"])
def test_a_shared_prompt_is_computed_once_along_its_servers_experts(layout, served):
    server, _, _, other = served("qwen3_moe", layers_of(layout))
    batch = batch_of(server, "experts_and_weights", make_groups())
    slots, starts = batch.tokens["routes"], batch.cu_seqlens.tolist()
    slots[starts[1] + 4] = slots[starts[1] + 4].flip(-1)  # of one reply the server has read a token in another way
    cases = {
        shared: (other, layout, "experts_and_weights", batch, {"share_prompts": shared}) for shared in (True, False)
    }
    found = run_each(LAYOUTS[layout][0], logprobs_and_update, cases)
    assert_same_updates(without_share(found[True][0][1]), without_share(found[False][0][1]))
    sampled = server.logprobs(batch).detach()
    torch.testing.assert_close(of_all(found[True], batch), sampled, rtol=0, atol=1e-5)


def refused(folder, layout, batch):
    engine = make_engine(folder, LAYOUTS[layout][1], routing_replay="experts").train()
    before = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig(kl_coefficient=0.0)))
    good = batch.tokens["routes"]
    for rows in (1, -1):
        rolled = torch.roll(good, rows, 0)
        batch.tokens["routes"] = torch.where(rolled < 0, good[0], rolled)  # an expert is not there twice
        with pytest.raises(RuntimeError, match="the servers' map of routes is shifted: .*nothing was trained on it"):
            engine.train_batch(share_of(batch, engine), loss)
    batch.tokens["routes"] = good.index_fill(0, torch.tensor([2]), routes.NO_ROUTE)
    with pytest.raises(ValueError, match="1 rows have no route that trained tokens depend on"):
        engine.forward(share_of(batch, engine))
    del batch.tokens["routes"]
    with pytest.raises(ValueError, match="the trajectories have no column 'routes'"):
        engine.train_batch(share_of(batch, engine), loss)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.hf_tensors())


@pytest.mark.slow
# On stages without the first mixture, too.
@pytest.mark.parametrize("layout", [pytest.param("1", marks=pytest.mark.thorough), "pp2"])
def test_a_shifted_missing_or_truncated_map_is_refused_by_name_and_never_trained_on(layout, served):
    server, _, folder, _ = served("qwen3_moe", layers_of(layout))
    run_ranks(LAYOUTS[layout][0], refused, folder, layout, batch_of(server, "experts", make_batch(lengths=(60,) * 8)))


def test_a_model_without_experts_has_nothing_to_replay(tmp_path):
    make_model("qwen3", tmp_path)
    with pytest.raises(ValueError, match="algo.routing_replay = 'experts': qwen3 has no experts; leave it out"):
        route_form(read_architecture(tmp_path), "experts")
