"""The trainer computes log-probabilities over the tokens that a server reports, for each option that excludes tokens.

The servers are the embedded one and real SGLang.
"""

import asyncio

import pytest

from megatron_rl.config import GenerationConfig
from megatron_rl.support import COLUMN, NO_TOKEN, check_complete
from megatron_rl.types import LLMRequest, Trajectory, TrajectoryBatch
from megatron_rl.workflows import RLVRWorkflow
from tests.kit.client_calls import post
from tests.kit.models import LAYOUTS, make_engine
from tests.kit.ranks import run_ranks

TEMPERATURE = 0.3
"""Low, as the tiny model's random logits are nearly equal."""
CUTS = {
    "top-k": {"top_k": 20},
    "top-p": {"top_k": 64, "top_p": 0.5},
    "min-p": {"top_k": 64, "min_p": 0.3},
    "all": {"top_k": 64, "top_p": 0.6, "min_p": 0.2},
    "min_new_tokens": {"top_k": 20, "min_new_tokens": 12, "ignore_eos": False},
}
PROMPTS = [{"input_ids": [5, 17, 300 + i]} for i in range(3)]


def scores(folder, batches):
    """The trainer's log-probabilities of each batch over its supports, and over the whole vocabulary."""
    engine, found = make_engine(folder, LAYOUTS["1"][1]).eval(), {}
    for name, batch in batches.items():
        cut = engine.forward(batch, temperature=TEMPERATURE)
        columns = {key: column for key, column in batch.tokens.items() if key != COLUMN}
        whole = TrajectoryBatch(columns, batch.sequences, batch.cu_seqlens, batch.versions)
        found[name] = cut, engine.forward(whole, temperature=TEMPERATURE)
    return found


def assert_sampled_as_trained(batches, found, options):
    for name, batch in batches.items():
        check_complete(batch[COLUMN], batch["input_ids"], batch["loss_mask"])
        trained, sizes = batch["loss_mask"], (batch[COLUMN] != NO_TOKEN).sum(1)
        ours, whole = (column[trained] for column in found[name])
        behavior = batch["logprobs"][trained]
        assert sizes[trained].max() <= options[name]["top_k"] and behavior.min() < -0.5
        # The two forward passes round logits differently, and the temperature divides that too.
        assert (ours - behavior).exp().sub(1).abs().max() < 1e-5 / TEMPERATURE, name
        assert (whole - behavior).abs().max() > 0.01, f"{name}: a cut that changes nothing proves nothing"


@pytest.mark.parametrize("server", ["embedded_servers", "real_sglang"])
def test_ratios_of_an_unchanged_policy_are_one_for_every_cut(server, connect, tiny_model, request):
    engine, batches = connect(request.getfixturevalue(server), seed=3), {}
    for name, options in CUTS.items():
        options = {"ignore_eos": True} | options
        config = GenerationConfig(n_samples=3, max_new_tokens=16, temperature=TEMPERATURE, **options)
        batches[name] = engine.rollout_batch(PROMPTS, RLVRWorkflow(lambda **_: 0.0, config, tokenizer=None))
    (found,) = run_ranks(1, scores, tiny_model, batches)
    assert_sampled_as_trained(batches, found, CUTS)
    for name in ("top-p", "min-p"):
        sizes = (batches[name][COLUMN] != NO_TOKEN).sum(1)[batches[name]["loss_mask"]]
        assert 0 < sizes.min() < CUTS[name]["top_k"] / 2, "cut by more than top-k"


def test_a_greedy_reply_has_one_token_to_choose_from(embedded_servers, connect):
    engine = connect(embedded_servers[:1])
    gconfig = GenerationConfig(max_new_tokens=6, ignore_eos=True, top_k=20, greedy=True)
    reply = asyncio.run(engine.agenerate(LLMRequest(rid="r", input_ids=[5, 17], gconfig=gconfig)))
    assert reply.support[:, 0].tolist() == reply.output_tokens and reply.support[:, 1:].eq(NO_TOKEN).all()
    assert reply.output_logprobs == [0.0] * 6


def test_a_reply_that_is_continued_keeps_the_supports_of_all_its_parts(embedded_servers, connect):
    engine = connect(embedded_servers[:1], seed=1, part_tokens=5)
    gconfig = GenerationConfig(max_new_tokens=12, ignore_eos=True, top_k=20)
    reply = asyncio.run(engine.agenerate(LLMRequest(rid="r", input_ids=[5, 17], gconfig=gconfig)))
    assert reply.output_len == 12 and reply.support.shape == (12, 40)
    assert reply.support[:, 0].tolist() == reply.output_tokens


def test_a_reply_under_a_grammar_is_trained_with_the_tokens_that_the_grammar_allowed(real_sglang, connect, tiny_model):
    engine = connect(real_sglang, seed=1)
    gconfig = GenerationConfig(max_new_tokens=8, temperature=TEMPERATURE, top_k=64)
    ask = {"gconfig": gconfig, "grammar": {"regex": "[a-f]{8}"}}
    replies = [asyncio.run(engine.agenerate(LLMRequest(rid=f"r{i}", input_ids=[11, 200, 37], **ask))) for i in range(4)]
    batch = TrajectoryBatch.from_trajectories([[Trajectory.from_reply(reply, 0.0) for reply in replies]])
    (found,) = run_ranks(1, scores, tiny_model, {"grammar": batch})
    assert_sampled_as_trained({"grammar": batch}, found, {"grammar": {"top_k": 20}})


def test_the_embedded_server_names_a_top_k_that_it_cannot_tell(embedded_servers):
    body = {"input_ids": [5], "return_sampling_mask": True, "sampling_params": {"top_p": 0.5}}
    answer = post(embedded_servers[0], "/generate", body)
    assert answer.status_code == 400 and "return_sampling_mask: sampling_params.top_k = -1: must be in [1, 4096]" in (
        answer.text
    )
