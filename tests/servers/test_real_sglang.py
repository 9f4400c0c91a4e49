"""The same client against real SGLang on the CPU: what the embedded server only imitates is true there too."""

import asyncio

import pytest

from megatron_rl.config import GenerationConfig
from megatron_rl.rollout.workflows import ReMaxWorkflow
from megatron_rl.types import LLMRequest
from tests.servers.reference import interrupt, publish, reference_greedy, reference_logprobs, weight_group
from tests.servers.tiny_model import make_tokenizer

PROMPT = [11, 200, 37, 5]
LONG = 450
"""Tokens of a reply that lasts a second or more."""


@pytest.fixture
def engine(real_sglang, connect):
    return connect(real_sglang, seed=1)


def request(**gconfig):
    return LLMRequest(rid="r", input_ids=PROMPT, gconfig=GenerationConfig(ignore_eos=True, **gconfig))


def test_greedy_reply_equals_transformers(engine, tiny_model):
    reply = asyncio.run(engine.agenerate(request(max_new_tokens=16, greedy=True)))
    assert reply.output_tokens == reference_greedy(tiny_model, PROMPT, 16)
    assert reply.output_logprobs == pytest.approx(reference_logprobs(tiny_model, PROMPT, reply.output_tokens), abs=1e-4)
    assert reply.stop_reason == "length"


def test_sampled_logprobs_are_those_at_the_temperature(engine, tiny_model):
    reply = asyncio.run(engine.agenerate(request(max_new_tokens=16, temperature=0.7, top_p=0.9)))
    expected = reference_logprobs(tiny_model, PROMPT, reply.output_tokens, temperature=0.7)
    assert reply.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_seeded_workflow_runs_although_the_server_ignores_seeds(engine):
    workflow = ReMaxWorkflow(lambda **_: 1.0, GenerationConfig(n_samples=3, max_new_tokens=8), make_tokenizer())
    data = [{"messages": [{"role": "user", "content": text}]} for text in ("fox", "dog")]
    batch = engine.rollout_batch(data, workflow)
    assert batch["group"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["greedy_reward"].tolist() == [1.0] * 6
    assert engine.metrics()["rollout/request_retries"] == 0


def test_vocabulary_is_known_so_that_no_bad_id_can_kill_the_server(engine):
    with pytest.raises(ValueError, match="hold 512.*vocabulary of 512"):
        asyncio.run(engine.agenerate(LLMRequest(rid="r", input_ids=[512])))


def test_aborted_reply_is_continued(engine, real_sglang, tiny_model):
    abort = lambda: engine._command_all("/abort_request", {"abort_all": True})  # noqa: E731
    reply = interrupt(engine, real_sglang, PROMPT, LONG, abort)
    assert (reply.output_len, reply.stop_reason, reply.interruptions) == (LONG, "length", 1)
    expected = reference_logprobs(tiny_model, PROMPT, reply.output_tokens)
    assert reply.output_logprobs == pytest.approx(expected, abs=1e-3)


def test_update_over_gloo_goes_through_a_running_reply(engine, real_sglang, tiny_model, other_tiny_model):
    engine.update_weights(tiny_model, 4)
    with weight_group(engine) as group:
        reply = interrupt(
            engine, real_sglang, PROMPT, LONG, lambda: publish(engine, group, other_tiny_model, version=5)
        )
    before = reply.output_versions.count(4)
    assert 0 < before < LONG
    assert reply.output_versions == [4] * before + [5] * (LONG - before)
    old = reference_logprobs(tiny_model, PROMPT, reply.output_tokens)
    new = reference_logprobs(other_tiny_model, PROMPT, reply.output_tokens)
    assert reply.output_logprobs == pytest.approx(old[:before] + new[before:], abs=1e-3)

    after = asyncio.run(engine.agenerate(request(max_new_tokens=8, greedy=True)))
    assert after.output_tokens == reference_greedy(other_tiny_model, PROMPT, 8)
    assert (after.output_versions, engine.get_version()) == ([5] * 8, 5)
    engine.update_weights(tiny_model, 6)
    again = asyncio.run(engine.agenerate(request(max_new_tokens=8, greedy=True)))
    assert (again.output_tokens, again.output_versions) == (reference_greedy(tiny_model, PROMPT, 8), [6] * 8)
