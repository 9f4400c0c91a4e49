"""Routing replay together with supports and penalties: one reply has routes, supports and adjustments.

The embedded server samples. The trainer has another router, so only the server's routes give its log-probabilities.
test_sglang_routing.py has the same with real SGLang.
"""

from dataclasses import replace

import pytest
import torch
from routed import perturbed
from test_gradients import assert_same_updates
from test_routing_replay import NOISE, of_all

from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig, GenerationConfig, RolloutConfig
from megatron_rl.ops import Cut
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.support import ADJUSTMENT, COLUMN, NO_TOKEN
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.route_form import route_form
from megatron_rl.workflows import RLVRWorkflow
from tests.kit.models import LAYOUTS, make_engine, make_model, share_of
from tests.kit.ranks import run_each
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.servers import NEVER_LATE

TEMPERATURE = 0.3
"""Low, as the tiny model's random logits are nearly equal."""
OPTIONS = {
    "cut": {"top_k": 20, "top_p": 0.8},
    "adjusted": {"top_k": 40, "repetition_penalty": 1.4, "logit_bias": {5: 1.0, 30: -2.0}},
    "computed": {"top_p": 0.6, "supports": "computed"},
}
EVERY_LAYOUT = ["1", "tp2_ep2", *(pytest.param(it, marks=pytest.mark.thorough) for it in ("ep2", "cp2_ep2", "pp2"))]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folder of a model with another router, and replies of the server by options."""
    folder, other, logs = (tmp_path_factory.mktemp(name) for name in ("sampled", "trained", "server"))
    model = make_model("qwen3_moe", folder, 4)
    perturbed(model, scale=NOISE).save_pretrained(other)
    form = route_form(read_architecture(folder), "experts_and_weights")
    config = RolloutConfig(backend="embedded", token_file=TOKEN_FILE, interruption="abort", **NEVER_LATE)
    batches = {}
    with Supervisor(config, folder, logs, routes=form) as supervisor:
        engine = RemoteSGLangEngine(config, seed=1, routes=form)
        engine.initialize(supervisor.urls)
        try:
            for name, options in OPTIONS.items():
                sampling = {"n_samples": 3, "max_new_tokens": 12, "ignore_eos": True, "temperature": TEMPERATURE}
                workflow = RLVRWorkflow(lambda **_: 0.0, GenerationConfig(**sampling, **options), tokenizer=None)
                prompts = [{"input_ids": ids} for ids in ([11, 20, 37, 5], [9], [80, 31, 7, 7])]
                batches[name] = engine.rollout_batch(prompts, workflow)
        finally:
            engine.destroy()
    return other, batches


def scores(folder, layout, replay, batch, options, drops=()):
    """The trainer's log-probabilities, the behaviour policy's, this rank's place, and an update."""
    engine = make_engine(folder, LAYOUTS[layout][1], routing_replay=replay, clip_grad=0.0, eps=1e-5)
    kept = {key: column for key, column in batch.tokens.items() if key not in drops}
    kept["advantages"] = torch.linspace(-1, 1, len(batch["input_ids"])) * batch["loss_mask"]
    own = share_of(TrajectoryBatch(kept, batch.sequences, batch.cu_seqlens, batch.versions), engine)
    behavior = own["logprobs"]
    if options.get("supports") == "computed":
        cut = Cut(top_p=options["top_p"], width=200)
        found = engine.eval().kept_tokens(own, cut, temperature=TEMPERATURE)
        tokens = own.tokens | {COLUMN: found.ids}
        own = TrajectoryBatch(tokens, own.sequences, own.cu_seqlens, own.versions)
        behavior = behavior - found.log_mass
    before = engine.eval().forward(own, temperature=TEMPERATURE)
    engine.train()
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig(kl_coefficient=0.0)), temperature=TEMPERATURE)
    update = [engine.train_batch(own, loss)], {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    return before, behavior, update, (engine.groups.data.rank, engine.groups.data.size)


def of_ranks(ranks, batch):
    behavior = [(one[1], one[-1]) for one in ranks]
    return of_all([(one[0], one[-1]) for one in ranks], batch), of_all(behavior, batch)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_logprobs_over_supports_are_the_servers_with_its_routes_and_not_without(layout, served):
    other, batches = served
    cases = {(name, "experts_and_weights"): (batches[name], ()) for name in OPTIONS}
    cases |= {(name, "off"): (batches[name], ("routes",)) for name in OPTIONS}
    cases["adjusted", "experts_and_weights", "unadjusted"] = batches["adjusted"], (ADJUSTMENT,)
    cases["cut", "experts_and_weights", "whole"] = batches["cut"], (COLUMN,)
    given = {key: (other, layout, key[1], batch, OPTIONS[key[0]], drops) for key, (batch, drops) in cases.items()}
    found = run_each(LAYOUTS[layout][0], scores, given)
    for key, ranks in found.items():
        batch = batches[key[0]]
        trained = batch["loss_mask"]
        ours, behavior = (column[trained] for column in of_ranks(ranks, batch))
        error = (ours - behavior).abs().max()
        if len(key) == 2 and key[1] != "off":
            assert error < 1e-5 / TEMPERATURE, key
            assert behavior.min() < -0.5 and (batch.tokens.get(COLUMN, trained) != NO_TOKEN).any()
        else:
            assert error > 1e-2, f"{key}: a column that changes nothing proves nothing"


@pytest.mark.parametrize("layout", [entry for entry in EVERY_LAYOUT if entry != "1"])
def test_an_update_with_routes_and_supports_does_not_depend_on_the_layout(layout, served):
    other, batches = served

    def run(where):
        cases = {name: (other, where, "experts_and_weights", batches[name], OPTIONS[name]) for name in OPTIONS}
        return run_each(LAYOUTS[where][0], scores, cases)

    alone, split = run("1"), run(layout)
    for name in OPTIONS:
        right = without_choices(alone[name][0][2])
        for one in split[name]:
            assert_same_updates(without_choices(one[2]), right)


def without_choices(update):
    """Leave out the share of changed choices, which is of computed rows."""
    (stats,), weights = update
    return [replace(stats, sums={key: sum_ for key, sum_ in stats.sums.items() if key != "changed_routes"})], weights
