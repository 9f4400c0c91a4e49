"""Routing replay with real SGLang: the trainer's log-probabilities are the server's, though their routers differ."""

import asyncio
from functools import cached_property

import pytest
import torch
from routed import RoutedModel, perturbed, with_routes
from test_routing_replay import EVERY_LAYOUT, FAMILIES, NOISE, logprobs_alone, of_all

from megatron_rl import routes
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.types import LLMRequest, Trajectory, TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.route_form import route_form
from tests.kit.models import LAYOUTS, YARN, make_model
from tests.kit.ranks import run_each
from tests.kit.reference import interrupt
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.servers import NEVER_LATE, SGLANG_ARGUMENTS
from tests.kit.tokenizers import make_tokenizer

# Each family starts a server. The layouts' replay of a family's routes is in test_routing_replay.py without one.
pytestmark = [pytest.mark.slow, pytest.mark.thorough]
# What SGLang reads of a released model's config.json and transformers leaves out, and what it can on a CPU: Qwen3-MoE
# with mixtures alone, DeepSeek-V3 with the rotation of the released one.
OWN = {
    "qwen3_moe": {"mlp_only_layers": []},
    "deepseek_v3": {
        "rope_parameters": YARN | {"mscale_all_dim": 0.9},
        "rms_norm_eps": 1e-6,  # SGLang takes it for the norms of the latents, too, which have 1e-6 in transformers
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}
SIZES = {"vocab_size": 512, "max_position_embeddings": 512}
PROMPTS, SAMPLES, NEW = ([11, 200, 37, 5], [9], [80, 301, 7, 7, 42, 3]), 3, 12


class Served:
    """A family's model in transformers and in SGLang, a client of the latter, and a folder with another router."""

    def __init__(self, family, folder, other, server_folder):
        self.other, self.model = other, make_model(family, folder, **SIZES, **OWN[family])
        make_tokenizer().save_pretrained(folder)
        perturbed(self.model, scale=NOISE, bias=0.1).save_pretrained(other)
        self.routed = RoutedModel(self.model, folder)
        form = route_form(read_architecture(folder), "experts_and_weights")
        options = {"backend": "sglang", "server_args": SGLANG_ARGUMENTS, "token_file": TOKEN_FILE}
        config = RolloutConfig(interruption="abort", **options, **NEVER_LATE)
        self.supervisor = Supervisor(config, folder, server_folder, routes=form)
        self.engine = RemoteSGLangEngine(config, seed=1, routes=form)

    def __enter__(self):
        self.supervisor.start()
        self.engine.initialize(self.supervisor.urls)
        return self

    def __exit__(self, *_):
        self.engine.destroy()
        self.supervisor.stop()

    def ask(self, prompts, new, **options):
        gconfig = GenerationConfig(max_new_tokens=new, ignore_eos=True, **options)

        async def all_of_them():
            requests = [LLMRequest(rid=f"r{n}", input_ids=ids, gconfig=gconfig) for n, ids in enumerate(prompts)]
            return await asyncio.gather(*(self.engine.agenerate(request) for request in requests))

        return asyncio.run(all_of_them())

    @cached_property
    def batch(self):
        return self.sampled()

    def sampled(self, **options):
        """Groups of replies to common prompts, which the trainer computes once."""
        replies = self.ask([ids for ids in PROMPTS for _ in range(SAMPLES)], NEW, **options)
        groups = [replies[first : first + SAMPLES] for first in range(0, len(replies), SAMPLES)]
        return TrajectoryBatch.from_trajectories([[Trajectory.from_reply(reply, 1.0) for reply in g] for g in groups])


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, needs_sglang, tmp_path_factory):
    """One family's after the other: the tests of one come together, and each server takes memory and a core."""
    folders = [tmp_path_factory.mktemp(f"{request.param}-{name}") for name in ("sampled", "trained", "server")]
    with Served(request.param, *folders) as one:
        yield one


def test_routes_of_the_server_are_those_of_the_model(served):
    batch = served.batch
    expected = served.routed.routes(batch)
    assert torch.equal(routes.experts_of(batch["routes"]), routes.experts_of(expected))  # slots in their order, too
    found, right = routes.weights_of(batch["routes"]), routes.weights_of(expected)
    torch.testing.assert_close(found, right, rtol=0, atol=2e-5)
    torch.testing.assert_close(batch["logprobs"], served.routed.logprobs(batch).detach(), rtol=0, atol=1e-5)


def test_an_interrupted_reply_has_the_routes_of_all_its_parts(served):
    def pause_and_resume():
        served.engine.pause()
        served.engine.resume()

    reply = interrupt(served.engine, served.supervisor.urls[0], [5, 6, 7, 8], 100, pause_and_resume)
    assert reply.interruptions, "it was not interrupted"
    batch = TrajectoryBatch.from_trajectories([[Trajectory.from_reply(reply, 1.0)]])
    assert torch.equal(routes.experts_of(batch["routes"]), routes.experts_of(served.routed.routes(batch)))


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_logprobs_are_the_servers_with_replay_and_not_without(layout, served):
    batch, cases = served.batch, {}
    for replay in ("off", "experts", "experts_and_weights"):
        cases[replay] = served.other, layout, replay, with_routes(batch, batch["routes"], replay)
    found = run_each(LAYOUTS[layout][0], logprobs_alone, cases)
    sampled = batch["logprobs"]
    error = {replay: (of_all(ranks, batch) - sampled).abs().max() for replay, ranks in found.items()}
    assert error["experts_and_weights"] < 1e-5
    assert error["off"] > 1e-2 and error["experts"] > 1e-3, "the routers are not different enough to show anything"


@pytest.mark.parametrize("layout", ["1", "tp2_ep2"])
def test_logprobs_over_the_supports_that_the_server_tells_are_its_own_with_its_routes(layout, served):
    batch = served.sampled(top_k=20, top_p=0.9, logit_bias={5: 1.0})
    form, other = "experts_and_weights", {key: it for key, it in batch.tokens.items() if key != "support"}
    whole = TrajectoryBatch(other, batch.sequences, batch.cu_seqlens, batch.versions)
    cases = {name: (served.other, layout, form, each) for name, each in (("support", batch), ("whole", whole))}
    found = run_each(LAYOUTS[layout][0], logprobs_alone, cases)
    trained = batch["loss_mask"]
    error = {name: (of_all(ranks, batch) - batch["logprobs"])[trained].abs().max() for name, ranks in found.items()}
    assert error["support"] < 1e-5 and error["whole"] > 1e-2
