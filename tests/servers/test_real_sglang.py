"""The same client against real SGLang on the CPU: what the embedded server only imitates is true there too."""

import asyncio
import os
import signal
import time

import aiohttp
import psutil
import pytest
import requests

from megatron_rl.config import GenerationConfig
from megatron_rl.servers import pool
from megatron_rl.telemetry.trace import RankTrace, Recording, chrome_trace
from megatron_rl.types import LLMRequest
from megatron_rl.weights.publish import DiskPublisher
from megatron_rl.workflows import ReMaxWorkflow
from tests.chrome_trace import parse_trace
from tests.kit.client_calls import PROMPT, abort_all, lose, pid_of, wait_until_serving
from tests.kit.in_process import specs_of
from tests.kit.reference import (
    interrupt,
    publish,
    reference_greedy,
    reference_logprobs,
    reference_logprobs_on_old_keys,
    weight_group,
)
from tests.kit.run_tokens import AUTHORIZED, TOKEN
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S, wait_until
from tests.servers.test_supervisor import shown_to_others

LONG = 450
"""Tokens of a reply that lasts a second or more."""


@pytest.fixture
def engine(real_sglang, connect):
    return connect(real_sglang, seed=1)


def request(prompt=PROMPT, **gconfig):
    return LLMRequest(rid="r", input_ids=prompt, gconfig=GenerationConfig(ignore_eos=True, **gconfig))


def ask(engine, prompt, **gconfig):
    return asyncio.run(engine.agenerate(request(prompt, **gconfig)))


async def versions_said(url):
    async with aiohttp.ClientSession(headers=AUTHORIZED) as session:
        said = {}
        for endpoint in ("/server_info", "/model_info"):
            async with session.get(url + endpoint) as answer:
                said[endpoint] = (await answer.json())["weight_version"]
        return said


def test_a_trace_shows_its_requests_within_the_clients_calls(engine, real_sglang):
    engine.service.client.spans.record()
    begun = time.monotonic()
    ask(engine, PROMPT, max_new_tokens=64)
    engine.pause()
    engine.resume()
    recording = Recording(
        pid=1, wall_minus_monotonic_s=time.time() - time.monotonic(), spans=engine.service.client.spans.take()
    )
    rank = RankTrace(rank=0, host="n", boot="b", pid=1, clock_s=begun, phases=[], rollout=recording)
    trace = parse_trace(chrome_trace(0, [rank]))
    (call,) = [one for one in trace.of("rollouts", "replies") if one.name == "generate"]
    (made,) = [one for one in trace.of(f"server {real_sglang}", "requests") if one.parent is None]
    assert call.begin <= made.begin <= made.end <= call.end and made.name == call.args["rid"]
    assert made.end > made.begin
    assert trace.of(f"server {real_sglang}", "paused") and [kind for kind, _, _ in trace.arrows] == ["call"]


def test_token_is_asked_for_and_shown_to_nobody(real_supervisor, real_sglang):
    (server,) = real_supervisor._servers
    for endpoint in ("/generate", "/pause_generation", "/update_weights_from_disk", "/abort_request"):
        assert requests.post(real_sglang + endpoint, json={}, timeout=LATE_S).status_code == 401
    assert requests.get(f"{real_sglang}/server_info", timeout=LATE_S).status_code == 401
    assert TOKEN not in shown_to_others(server.process.pid)
    said = server.log.read_text()  # SGLang logs all its arguments
    assert "'api_key': '***'" in said and TOKEN not in said
    listening = [c.laddr for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"]
    assert f"http://127.0.0.1:{listening[0].port}" == real_sglang and {a.ip for a in listening} == {"127.0.0.1"}


def test_greedy_reply_equals_transformers(engine, tiny_model):
    reply = asyncio.run(engine.agenerate(request(max_new_tokens=16, greedy=True)))
    assert reply.output_tokens == reference_greedy(tiny_model, PROMPT, 16)
    assert reply.output_logprobs == pytest.approx(reference_logprobs(tiny_model, PROMPT, reply.output_tokens), abs=1e-4)
    assert reply.stop_reason == "length"


def test_sampled_logprobs_are_those_at_the_temperature(engine, tiny_model):
    reply = asyncio.run(engine.agenerate(request(max_new_tokens=16, temperature=0.7, top_p=0.9)))
    expected = reference_logprobs(tiny_model, PROMPT, reply.output_tokens, temperature=0.7)
    assert reply.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_streamed_reply_is_the_one_that_is_not_streamed(engine):
    streamed, whole = request(max_new_tokens=24, greedy=True), request(max_new_tokens=24, greedy=True)
    told = []
    streamed.on_tokens = told.append
    ours, theirs = (asyncio.run(engine.agenerate(one)) for one in (streamed, whole))
    assert ours.output_tokens == theirs.output_tokens == told[-1] and len(told) > 1
    assert ours.output_logprobs == pytest.approx(theirs.output_logprobs, abs=1e-4)


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


@pytest.mark.thorough  # one that the server itself aborts, as its weights are half new, is below
def test_aborted_reply_is_continued(engine, real_sglang, tiny_model):
    engine.update_weights(tiny_model, 1)
    reply = interrupt(engine, real_sglang, PROMPT, LONG, lambda: abort_all(engine))
    assert (reply.output_len, reply.stop_reason, reply.interruptions) == (LONG, "length", 1)
    expected = reference_logprobs(tiny_model, PROMPT, reply.output_tokens)
    assert reply.output_logprobs == pytest.approx(expected, abs=1e-3)


# The default; an abort is above, a cache that is kept below.
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({"interruption": "abort"}, marks=pytest.mark.thorough),
        {"interruption": "retract"},
        pytest.param({"interruption": "in_place", "max_cache_age": 9}, marks=pytest.mark.thorough),
    ],
)
def test_update_over_gloo_goes_through_a_running_reply(connect, real_sglang, tiny_model, other_tiny_model, policy):
    mode = policy["interruption"]
    connect(real_sglang).update_weights(tiny_model, 4)  # flushes what other tests left
    engine = connect(real_sglang, **policy)
    engine.set_version(4)
    with weight_group(engine) as group:
        reply = interrupt(
            engine, real_sglang, PROMPT, LONG, lambda: publish(engine, group, other_tiny_model, version=5)
        )
    before = reply.output_versions.count(4)
    assert 0 < before < LONG
    assert reply.output_versions == [4] * before + [5] * (LONG - before)
    assert reply.interruptions == (mode == "abort")
    old = reference_logprobs(tiny_model, PROMPT, reply.output_tokens)
    new = reference_logprobs(other_tiny_model, PROMPT, reply.output_tokens)
    expected = old[:before] + new[before:]
    if mode == "in_place":
        expected = reference_logprobs_on_old_keys(tiny_model, other_tiny_model, PROMPT, reply.output_tokens, before)
    assert reply.output_logprobs == pytest.approx(expected, abs=1e-3)
    assert engine.metrics()["rollout/stale_cache_tokens"] == (LONG - before if mode == "in_place" else 0)

    # A prompt of its own: in_place keeps the prefixes of the old weights too.
    fresh = [9, 8, 7, 6]
    after = ask(engine, fresh, max_new_tokens=8, greedy=True)
    assert after.output_tokens == reference_greedy(other_tiny_model, fresh, 8)
    assert (after.output_versions, engine.get_version()) == ([5] * 8, 5)
    # What /server_info says is the version of the start.
    assert asyncio.run(versions_said(real_sglang)) == {"/server_info": "0", "/model_info": "5"}


def test_kept_cache_is_that_of_the_old_weights_and_is_counted_and_flushed_in_time(
    connect, real_sglang, tiny_model, other_tiny_model
):
    prompt = list(range(20, 60))
    engine = connect(real_sglang, max_cache_age=1)
    engine.update_weights(tiny_model, 1)  # kept: the first publication that the cache outlives
    engine.update_weights(tiny_model, 2)  # flushed
    # One token less: SGLang would put the old key of the last one in the place of the new one, two tokens later.
    ask(engine, prompt[:-1], max_new_tokens=1)
    engine.metrics()
    engine.update_weights(other_tiny_model, 3)  # kept
    stale = ask(engine, prompt, max_new_tokens=16, greedy=True)
    expected = reference_logprobs_on_old_keys(tiny_model, other_tiny_model, prompt, stale.output_tokens, 0)
    assert stale.output_logprobs == pytest.approx(expected, abs=1e-3)
    metrics = engine.metrics()
    assert (metrics["rollout/stale_cache_tokens"], metrics["rollout/cache_age"]) == (16, 1)
    engine.update_weights(other_tiny_model, 4)  # flushed
    clean = ask(engine, prompt, max_new_tokens=16, greedy=True)
    assert clean.output_tokens == reference_greedy(other_tiny_model, prompt, 16)
    assert engine.metrics()["rollout/stale_cache_tokens"] == 0


def test_reply_outlives_a_publication_that_stopped_half_way(engine, real_sglang, tiny_model, other_tiny_model):
    engine.update_weights(tiny_model, 7)

    def publish_in_two_attempts():
        engine.pause()
        engine.begin_weight_update(8)  # as far as this one comes
        engine.end_weight_update(8)
        engine.resume()
        with weight_group(engine) as group:
            publish(engine, group, other_tiny_model, version=8)

    reply = interrupt(engine, real_sglang, PROMPT, LONG, publish_in_two_attempts)
    before = reply.output_versions.count(7)
    # The server aborted it while it was queued, and the client asked again only once the weights were whole.
    assert reply.output_versions == [7] * before + [8] * (LONG - before) and reply.interruptions >= 1
    old = reference_logprobs(tiny_model, PROMPT, reply.output_tokens)
    new = reference_logprobs(other_tiny_model, PROMPT, reply.output_tokens)
    assert reply.output_logprobs == pytest.approx(old[:before] + new[before:], abs=1e-3)


def test_session_that_a_killed_trainer_left_open_and_its_pause_stop_nobody(
    connect, real_sglang, tiny_model, monkeypatch
):
    monkeypatch.setattr(pool, "FIRST_HEALTH_S", 1.0)  # a paused one says nothing for longer
    killed = connect(real_sglang)
    killed.pause()
    killed.begin_weight_update(1)
    engine = connect(real_sglang)
    with weight_group(engine) as group:
        publish(engine, group, tiny_model, version=2)
    assert ask(engine, PROMPT, max_new_tokens=4, greedy=True).output_versions == [2] * 4


@pytest.mark.thorough  # test_catch_up.py has embedded ones
def test_server_that_came_late_takes_the_current_weights_from_their_folder_and_serves_at_once(
    connect, real_sglang, tiny_model, other_tiny_model, weights, tmp_path
):
    engine = connect(real_sglang)
    publisher = DiskPublisher(engine, folder=tmp_path, model_folder=str(other_tiny_model), timeout_s=LATE_S)
    engine.select_servers()
    publisher.publish(specs_of(weights), iter(weights.items()), 5)
    assert publisher.last.verified > 0
    # What a restart leaves: other weights under another name.
    other_client = connect(real_sglang)
    other_client.update_weights(tiny_model, 0)
    lose(engine, real_sglang)
    wait_until_serving(engine, 1)
    assert asyncio.run(versions_said(real_sglang))["/model_info"] == "5"
    reply = ask(engine, PROMPT, max_new_tokens=16, greedy=True)
    assert (reply.output_tokens, reply.output_versions) == (reference_greedy(other_tiny_model, PROMPT, 16), [5] * 16)


@pytest.mark.thorough  # it starts a second one; test_supervisor.py kills embedded servers
def test_killed_server_is_restarted_and_serves_only_once_it_was_published_to(
    connect, real_supervisor, real_sglang, tiny_model, other_tiny_model
):
    engine = connect(real_sglang)
    engine.update_weights(other_tiny_model, 9)
    pid = pid_of(real_supervisor, real_sglang)

    def kill_and_publish_again():
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: engine.needs_weights, "it does not come back", limit_s=LATE_S)
        # It has the weights of its model folder, which are not those of version 9.
        assert asyncio.run(versions_said(real_sglang))["/model_info"] == "0"
        engine.select_servers()
        with weight_group(engine) as group:
            publish(engine, group, other_tiny_model, version=9)

    reply = interrupt(engine, real_sglang, PROMPT, LONG, kill_and_publish_again, timeout_s=LATE_S)
    assert reply.output_versions == [9] * LONG
    expected = reference_logprobs(other_tiny_model, PROMPT, reply.output_tokens)
    assert reply.output_logprobs == pytest.approx(expected, abs=1e-3)
    engine.update_weights(tiny_model, 10)
