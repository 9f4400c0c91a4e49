"""The trainer computes log-probabilities over the tokens that a server reports, for each option that excludes tokens.

The same holds for options that change logits.

The servers are the embedded one and real SGLang.
"""

import asyncio

import pytest
import torch

from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.ops import Cut
from megatron_rl.servers.request_rules import adjusting_of
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.support import ADJUSTMENT, COLUMN, NO_TOKEN, check_complete
from megatron_rl.types import LLMRequest, Trajectory, TrajectoryBatch
from megatron_rl.workflows import RLVRWorkflow
from tests.kit.client_calls import post
from tests.kit.models import LAYOUTS, make_engine
from tests.kit.ranks import run_ranks
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.servers import NEVER_LATE, SGLANG_ARGUMENTS

TEMPERATURE = 0.3
"""Low, as the tiny model's random logits are nearly equal."""
CUTS = {
    "top-k": {"top_k": 20},
    "top-p": {"top_k": 64, "top_p": 0.5},
    "min-p": {"top_k": 64, "min_p": 0.3},
    "all": {"top_k": 64, "top_p": 0.6, "min_p": 0.2},
    "min_new_tokens": {"top_k": 20, "min_new_tokens": 12, "ignore_eos": False},
}
BIASED = {300: 1.0, 301: -2.0, 5: 0.5, **{token: 1.5 for token in range(40, 56)}}
BIAS = {"bias": {"top_k": 20, "logit_bias": BIASED}}
COUNTED = {
    "repetition": {"top_k": 20, "repetition_penalty": 1.7},
    "frequency": {"top_k": 20, "frequency_penalty": 0.4},
    "presence": {"top_k": 20, "presence_penalty": -0.6},
    "added": {
        "top_k": 30,
        "top_p": 0.9,
        "min_new_tokens": 12,
        "ignore_eos": False,
        "frequency_penalty": -0.3,
        "presence_penalty": 0.2,
        "logit_bias": BIASED,
    },  # fmt: skip
    "scaled": {"top_k": 30, "min_p": 0.05, "repetition_penalty": 0.7, "logit_bias": BIASED},
}
MIXED = {"mixed": COUNTED["added"] | COUNTED["scaled"]}
"""All options together."""
PROMPTS = [{"input_ids": [5, 17, 300 + i]} for i in range(3)]


def without_top_k(cases):
    """The cases that change logits, over the whole vocabulary."""
    cut = ("top_k", "top_p", "min_p", "min_new_tokens")
    changes = {name: {key: it for key, it in case.items() if key not in cut} for name, case in cases.items()}
    return {f"{name}, whole": case for name, case in changes.items() if set(case) - {"ignore_eos"}}


def scores(folder, batches):
    """The trainer's log-probabilities of each batch, and what they would be without its adjustments or its supports."""
    engine, found = make_engine(folder, LAYOUTS["1"][1]).eval(), {}
    for name, batch in batches.items():
        without = ADJUSTMENT if ADJUSTMENT in batch.tokens else COLUMN
        columns = {key: column for key, column in batch.tokens.items() if key != without}
        other = TrajectoryBatch(columns, batch.sequences, batch.cu_seqlens, batch.versions)
        found[name] = tuple(engine.forward(each, temperature=TEMPERATURE) for each in (batch, other))
    return found


def assert_sampled_as_trained(batches, found, options):
    for name, batch in batches.items():
        if "top_k" in options[name]:
            check_complete(batch[COLUMN], batch["input_ids"], batch["loss_mask"])
        trained, sizes = batch["loss_mask"], (batch[COLUMN] != NO_TOKEN).sum(1)
        ours, other = (column[trained] for column in found[name])
        behavior = batch["logprobs"][trained]
        assert sizes[trained].max() <= options[name].get("top_k", 400) and behavior.min() < -0.5
        # The two forward passes round logits differently, and the temperature divides that too.
        assert (ours - behavior).exp().sub(1).abs().max() < 1e-5 / TEMPERATURE, name
        assert (other - behavior).abs().max() > 0.01, f"{name}: an option that changes nothing proves nothing"


def assert_ratios_are_one(engine, model, cases, tokens=16):
    """Sample with each case's options, and compare the trainer's log-probabilities. Return the batches."""
    batches = {}
    for name, options in cases.items():
        options = {"ignore_eos": True} | options
        config = GenerationConfig(n_samples=3, max_new_tokens=tokens, temperature=TEMPERATURE, **options)
        batches[name] = engine.rollout_batch(PROMPTS, RLVRWorkflow(lambda **_: 0.0, config, tokenizer=None))
        assert (ADJUSTMENT in batches[name]) == (config.adjustment_size > 0)
    (found,) = run_ranks(1, scores, model, batches)
    assert_sampled_as_trained(batches, found, cases)
    return batches


@pytest.mark.parametrize("server", ["embedded_servers", "real_sglang"])
def test_ratios_of_an_unchanged_policy_are_one_for_every_cut(server, connect, tiny_model, request):
    engine = connect(request.getfixturevalue(server), seed=3)
    cases = CUTS | BIAS | (COUNTED | MIXED if server == "embedded_servers" else {})
    cases |= without_top_k(cases)
    batches = assert_ratios_are_one(engine, tiny_model, cases)
    for name in ("top-p", "min-p"):
        sizes = (batches[name][COLUMN] != NO_TOKEN).sum(1)[batches[name]["loss_mask"]]
        assert 0 < sizes.min() < CUTS[name]["top_k"] / 2, "cut by more than top-k"


UNTOLD = {
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.5},
    "min-p": {"min_p": 0.3},
    "both": {"top_k": 200, "top_p": 0.6},
}


def computed_scores(folder, batches, cuts):
    """The trainer's log-probabilities of each batch over supports that it computes, and the behaviour policy's."""
    engine, found = make_engine(folder, LAYOUTS["1"][1]).eval(), {}
    for name, batch in batches.items():
        kept = engine.kept_tokens(batch, cuts[name], temperature=TEMPERATURE)
        tokens = batch.tokens | {COLUMN: kept.ids}
        other = TrajectoryBatch(tokens, batch.sequences, batch.cu_seqlens, batch.versions)
        found[name] = kept, engine.forward(other, temperature=TEMPERATURE), batch["logprobs"] - kept.log_mass
    return found


@pytest.mark.parametrize("server", ["embedded_servers", "real_sglang"])
def test_ratios_of_an_unchanged_policy_are_one_over_supports_that_the_trainer_computes(
    server, connect, tiny_model, request
):
    engine, batches, cuts = connect(request.getfixturevalue(server), seed=3), {}, {}
    for name, options in UNTOLD.items():
        sampling = {"max_new_tokens": 16, "temperature": TEMPERATURE, "ignore_eos": True, "supports": "computed"}
        config = GenerationConfig(n_samples=3, **sampling, **options)
        batches[name] = engine.rollout_batch(PROMPTS, RLVRWorkflow(lambda **_: 0.0, config, tokenizer=None))
        assert COLUMN not in batches[name].tokens, "asked for no report"
        cuts[name] = Cut(**options, width=512)
    (found,) = run_ranks(1, computed_scores, tiny_model, batches, cuts)
    for name, (kept, ours, behavior) in found.items():
        trained = batches[name]["loss_mask"]
        sizes = (kept.ids != NO_TOKEN).sum(1)[trained]
        assert 0 < sizes.min() and sizes.max() < 300, name
        # Only a token at the edge can be outside, and only by rounding.
        assert kept.is_outside.sum() <= 2, name
        assert (ours - behavior)[trained].exp().sub(1).abs().max() < 1e-5 / TEMPERATURE, name
        assert kept.log_mass[trained].max() < 0, "an option that excludes nothing proves nothing"


@pytest.mark.thorough
def test_real_sglang_without_overlap_counts_the_tokens_of_a_reply_as_the_trainer_does(
    needs_sglang, connect, tiny_model, tmp_path
):
    arguments = [*SGLANG_ARGUMENTS, "--disable-overlap-schedule"]
    config = RolloutConfig(backend="sglang", server_args=arguments, token_file=TOKEN_FILE, **NEVER_LATE)
    with Supervisor(config, tiny_model, tmp_path) as supervisor:
        engine = connect(supervisor.urls, seed=3, interruption="abort")
        assert_ratios_are_one(engine, tiny_model, COUNTED | BIAS | without_top_k(COUNTED | BIAS), tokens=60)


def test_penalties_are_refused_if_sglang_counts_late(real_sglang, connect):
    ask = {"rid": "r", "input_ids": [5], "gconfig": GenerationConfig(top_k=20, frequency_penalty=0.5)}
    with pytest.raises(ValueError, match="generation.frequency_penalty = 0.5: .* with --disable-overlap-schedule"):
        asyncio.run(connect([real_sglang], interruption="abort").agenerate(LLMRequest(**ask)))


@pytest.mark.parametrize(
    ("info", "options", "interruption", "words"),
    [
        ({}, {}, "abort", "overlapped scheduler and its speculative decoding count .* with --disable-overlap-schedule"),
        ({"speculative_algorithm": "EAGLE"}, {}, "abort", "speculative decoding .* without --speculative-algorithm"),
        ({"disable_overlap_schedule": True}, {"frequency_penalty": 0.1}, "abort", "differently in each process"),
        ({"disable_overlap_schedule": True}, {}, "retract", "interruption = retract, SGLang forgets .*=abort"),
    ],
)
def test_servers_and_modes_in_which_penalties_are_unknown_are_refused_by_name(
    info, options, interruption, words, scripted, connect
):
    server = scripted(version="0.5.23", info=info | {"disable_overlap_schedule": bool(info)})
    engine = connect([server.url], interruption=interruption)
    gconfig = GenerationConfig(top_k=20, repetition_penalty=1.1, **options)
    with pytest.raises(ValueError, match=f"generation.repetition_penalty = 1.1: {server.url}: .*{words}"):
        asyncio.run(engine.agenerate(LLMRequest(rid="r", input_ids=[5], gconfig=gconfig)))
    assert not server.asked["/generate"]
    # Evaluations are not trained, and biases depend on no count.
    for allowed in ({"repetition_penalty": 1.1}, {"logit_bias": {5: 1.0}}):
        asyncio.run(engine.agenerate(LLMRequest(rid="r", input_ids=[5], gconfig=GenerationConfig(**allowed))))
    sent = [body["sampling_params"] for path, body in server.calls if path == "/generate"]
    assert [sent[0]["repetition_penalty"], sent[1]["logit_bias"]] == [1.1, {"5": 1.0}]


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


def test_penalties_of_a_reply_that_is_continued_count_the_tokens_of_the_part_that_a_server_generates(
    embedded_servers, connect, tiny_model
):
    engine = connect(embedded_servers[:1], seed=1, part_tokens=5)
    ask = {"input_ids": [5, 17]} | {
        "gconfig": GenerationConfig(
            ignore_eos=True, top_k=256, temperature=TEMPERATURE, repetition_penalty=1.8, frequency_penalty=-0.5
        ).new(max_new_tokens=24)
    }
    first = LLMRequest(rid="r", **ask)
    first.gconfig = first.gconfig.new(max_new_tokens=12)
    begun = asyncio.run(engine.agenerate(first))
    adjusting = adjusting_of(first.gconfig)
    assert torch.equal(begun.adjustment, adjusting.adjustments(begun.support, begun.sampled.ids)), "not in parts of 5"
    reply = asyncio.run(engine.agenerate(LLMRequest(rid="r", begun=begun, **ask)))
    assert reply.output_len == 24
    rest = adjusting.adjustments(reply.support[12:], reply.sampled.ids[12:])
    assert torch.equal(reply.adjustment[12:], rest) and reply.adjustment[12].eq(0).all()
    batch = TrajectoryBatch.from_trajectories([[Trajectory.from_reply(reply, 0.0)]])
    (found,) = run_ranks(1, scores, tiny_model, {"continued": batch})
    assert_sampled_as_trained({"continued": batch}, found, {"continued": {"top_k": 256}})


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
