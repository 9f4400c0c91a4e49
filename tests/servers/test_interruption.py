"""New weights meet a reply under way: every mode and cache policy, exact to the key that each token attended to."""

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.servers.client import CacheAge
from megatron_rl.servers.reply_check import ReplyPart
from megatron_rl.types import SampledTokens
from tests.kit.reference import (
    interrupt,
    reference_logprobs,
    reference_logprobs_on_old_keys,
    wait_for,
)

PROMPT = [11, 200, 37, 5]
COUNT = 250


@pytest.fixture
def interrupted(embedded_servers, connect, tiny_model, other_tiny_model):
    """Return (reply, tokens before the update, the engine's metrics) of a reply that an update meets."""
    url = embedded_servers[0]

    def interrupted(**policy):
        engine = connect(url, **policy)
        engine.update_weights(tiny_model, 10)
        engine.metrics()
        reply = interrupt(engine, url, PROMPT, COUNT, lambda: engine.update_weights(other_tiny_model, 11))
        metrics = engine.metrics()
        connect(url).update_weights(tiny_model, 12)
        before = reply.output_versions.count(10)
        assert 0 < before < COUNT
        assert reply.output_versions == [10] * before + [11] * (COUNT - before)
        assert (reply.output_len, reply.stop_reason) == (COUNT, "length")
        return reply, before, metrics

    return interrupted


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_keys_are_computed_anew_after_an_abort_or_a_retraction(interrupted, tiny_model, other_tiny_model, mode):
    reply, before, metrics = interrupted(interruption=mode)
    old = reference_logprobs(tiny_model, PROMPT, reply.output_tokens)
    new = reference_logprobs(other_tiny_model, PROMPT, reply.output_tokens)
    assert reply.output_logprobs == pytest.approx(old[:before] + new[before:], abs=1e-3)
    assert reply.interruptions == (mode == "abort")
    assert (metrics["rollout/stale_cache_tokens"], metrics["rollout/cache_age"]) == (0, 0)


def test_tokens_after_a_pause_in_place_attend_to_keys_of_the_old_weights(interrupted, tiny_model, other_tiny_model):
    reply, before, metrics = interrupted(interruption="in_place", max_cache_age=2)
    expected = reference_logprobs_on_old_keys(tiny_model, other_tiny_model, PROMPT, reply.output_tokens, before)
    assert reply.output_logprobs == pytest.approx(expected, abs=1e-3)
    # Without the old keys they would be others, so the metric counts something.
    new = reference_logprobs(other_tiny_model, PROMPT, reply.output_tokens)
    assert max(abs(a - b) for a, b in zip(reply.output_logprobs[before:], new[before:], strict=True)) > 0.05
    assert metrics["rollout/stale_cache_tokens"] == COUNT - before
    assert (metrics["rollout/cache_age"], reply.interruptions) == (2, 0)


def pauses_of(server):
    """Return (mode, whether it was flushed) of each pause."""
    pauses = []
    for endpoint, body in server.calls:
        if endpoint == "/pause_generation":
            pauses.append([body["mode"], False])
        elif endpoint == "/flush_cache":
            pauses[-1][1] = True
    return [tuple(pause) for pause in pauses]


@pytest.mark.parametrize(
    "mode, flushing_mode, max_cache_age", [("abort", "abort", 1), ("retract", "retract", 2), ("in_place", "retract", 2)]
)
def test_no_cache_outlives_more_publications_than_allowed(scripted, connect, mode, flushing_mode, max_cache_age):
    server = scripted()
    engine = connect(server.url, interruption=mode, max_cache_age=max_cache_age)
    for version in range(1, 8):
        engine.update_weights("/some/folder", version)
        assert engine.metrics()["rollout/cache_age"] <= max_cache_age
    cycle = [(mode, False)] * max_cache_age + [(flushing_mode, True)]
    assert pauses_of(server) == (cycle * 7)[:7]


def test_flushing_policy_flushes_at_every_publication(scripted, connect):
    server = scripted()
    engine = connect(server.url)
    for version in range(1, 4):
        engine.update_weights("/some/folder", version)
    assert pauses_of(server) == [("retract", True)] * 3


@pytest.mark.parametrize("interruption", ["abort", "retract", "in_place"])
def test_no_update_ever_asks_for_a_flush_inside_it(scripted, connect, interruption):
    # SGLang before 0.5.22 dies of that while requests are paused in place.
    server = scripted()
    engine = connect(server.url, interruption=interruption, max_cache_age=1)
    engine.update_weights("/some/folder", 1)
    engine.pause()
    engine.begin_weight_update(2)
    wait_for(engine.load_bucket(names=["w"], dtypes=["float32"], shapes=[[2]], group="g", version=2))
    engine.end_weight_update(2)
    engine.resume()
    bodies = [body for endpoint, body in server.calls if endpoint.startswith("/update_weights")]
    assert [body["flush_cache"] for body in bodies] == [False, False]


def part(*spans, cached_tokens=0):
    count = sum(tokens for _, tokens in spans)
    return ReplyPart(
        sampled=SampledTokens.of([0] * count, [0.0] * count, [0] * count),
        stop_reason="stop",
        text="",
        cached_tokens=cached_tokens,
        spans=list(spans),
    )


def test_stale_tokens_are_counted_by_the_publications_that_kept_the_cache():
    cache = CacheAge()
    cache.publish("1", flushed=True)
    cache.publish("2", flushed=False)
    cache.publish("3", flushed=False)
    assert cache.age == 2
    # One that began under 1 and went on through both.
    assert cache.stale_tokens(part(("1", 5), ("2", 7), ("3", 11), cached_tokens=4)) == 7 + 11
    # One that found a prefix under 3, which version 1 may have computed, and one that found none.
    assert cache.stale_tokens(part(("3", 5), cached_tokens=4)) == 5
    assert cache.stale_tokens(part(("3", 5))) == 0
    cache.publish("4", flushed=True)
    # Its keys were recomputed at the flush.
    assert cache.stale_tokens(part(("3", 5), ("4", 6))) == 0
    assert cache.stale_tokens(part(("4", 6), cached_tokens=4)) == 0


def test_servers_that_report_no_spans_count_every_token_while_the_cache_is_old():
    cache = CacheAge()
    spanless = part(("1", 5))
    spanless.spans = []
    assert cache.stale_tokens(spanless) == 0
    cache.publish("2", flushed=False)
    assert cache.stale_tokens(spanless) == 5


def test_in_place_without_an_old_cache_is_refused():
    with pytest.raises(ValueError, match="rollout.max_cache_age = 0: .*in_place, which keeps the cache"):
        RolloutConfig(interruption="in_place")
