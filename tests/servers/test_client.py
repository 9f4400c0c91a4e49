"""The client against embedded servers, and against scripted ones for everything that goes wrong."""

import asyncio
from concurrent.futures import wait
from functools import partial

import pytest
from aiohttp import web

from megatron_rl.api import NoServerLeft
from megatron_rl.config import GenerationConfig
from megatron_rl.servers import generate
from megatron_rl.types import LLMRequest, LLMResponse
from megatron_rl.workflows import RLVRWorkflow
from tests.kit import client_calls
from tests.kit.client_calls import PROMPT, abort_all, start, update
from tests.kit.pace import held_at
from tests.kit.reference import (
    interrupt,
    publish,
    reference_greedy,
    reference_logprobs,
    used_tokens,
    wait_for,
    weight_group,
)
from tests.kit.run_tokens import TOKEN
from tests.kit.scripted_server import counting, never, overloaded
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LIMIT_S, until

NOTHING_S = 0.1
"""For how long a test watches that nothing happens; on a slow machine it watches less."""
ask = partial(client_calls.ask, input_ids=PROMPT)


# Embedded servers


def test_greedy_reply_equals_transformers(embedded_servers, connect, tiny_model):
    reply = ask(connect(embedded_servers), max_new_tokens=24, greedy=True, ignore_eos=True)
    assert reply.output_tokens == reference_greedy(tiny_model, PROMPT, 24)
    assert reply.output_logprobs == pytest.approx(reference_logprobs(tiny_model, PROMPT, reply.output_tokens), abs=1e-4)
    assert (reply.stop_reason, reply.output_len) == ("length", 24)


def test_sampled_logprobs_are_those_at_the_temperature(embedded_servers, connect, tiny_model):
    reply = ask(connect(embedded_servers), max_new_tokens=24, temperature=0.7, top_p=0.9, ignore_eos=True)
    expected = reference_logprobs(tiny_model, PROMPT, reply.output_tokens, temperature=0.7)
    assert reply.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_samples_of_a_seeded_run_do_not_depend_on_the_servers(embedded_servers, connect):
    workflow = RLVRWorkflow(lambda **_: 0.0, GenerationConfig(n_samples=3, max_new_tokens=8), make_tokenizer())
    data = [{"prompt": text} for text in ("The quick", "lazy dog", "What is 12 +")]
    batches = [
        connect(urls, seed=seed).rollout_batch(data, workflow)
        for urls, seed in ((embedded_servers, 7), (embedded_servers[:1], 7), (embedded_servers[:1], 8))
    ]
    assert batches[0]["input_ids"].tolist() == batches[1]["input_ids"].tolist()
    assert batches[0]["input_ids"].tolist() != batches[2]["input_ids"].tolist()
    # The samples of one prompt differ from one another.
    first, second = (batches[0].select([i])["input_ids"].tolist() for i in (0, 1))
    assert first != second


def test_published_weights_answer_with_their_version(embedded_servers, connect, tiny_model, other_tiny_model):
    engine = connect(embedded_servers)
    assert sum(engine.server_ranks.values()) == 2
    with weight_group(engine) as group:
        publish(engine, group, other_tiny_model, version=3)
    expected = reference_greedy(other_tiny_model, PROMPT, 16)
    for rid in ("a", "b"):  # one server each
        reply = ask(engine, rid=rid, max_new_tokens=16, greedy=True, ignore_eos=True)
        assert (reply.output_tokens, reply.output_versions) == (expected, [3] * 16)
    engine.update_weights(tiny_model, 4)
    reply = ask(engine, max_new_tokens=16, greedy=True, ignore_eos=True)
    assert (reply.output_tokens, reply.output_versions) == (reference_greedy(tiny_model, PROMPT, 16), [4] * 16)


def test_reply_that_an_update_interrupts_goes_on_with_the_new_weights(
    embedded_servers, connect, tiny_model, other_tiny_model
):
    engine = connect(embedded_servers[:1])
    engine.update_weights(tiny_model, 10)
    reply = interrupt(engine, embedded_servers[0], PROMPT, 400, lambda: engine.update_weights(other_tiny_model, 11))
    engine.update_weights(tiny_model, 12)
    assert reply.output_len == 400
    before = reply.output_versions.count(10)
    assert reply.output_versions == [10] * before + [11] * (400 - before)
    assert 0 < before < 400
    # Each part is what its weights would say after everything before it.
    old = reference_logprobs(tiny_model, PROMPT, reply.output_tokens)
    new = reference_logprobs(other_tiny_model, PROMPT, reply.output_tokens)
    assert reply.output_logprobs == pytest.approx(old[:before] + new[before:], abs=1e-3)


def test_reply_that_a_stranger_aborts_is_continued(embedded_servers, connect, tiny_model):
    engine = connect(embedded_servers[:1])
    reply = interrupt(engine, embedded_servers[0], PROMPT, 400, lambda: abort_all(engine))
    assert (reply.output_len, reply.stop_reason, reply.interruptions) == (400, "length", 1)
    expected = reference_logprobs(tiny_model, PROMPT, reply.output_tokens)
    assert reply.output_logprobs == pytest.approx(expected, abs=1e-3)
    assert engine.metrics()["rollout/interruptions"] == 1


def test_cancelled_reply_is_ended_at_the_server_and_goes_on_where_it_was(embedded_servers, connect, tiny_model):
    engine, begun = connect(embedded_servers[:1]), LLMResponse.nothing(PROMPT)
    options = GenerationConfig(max_new_tokens=400, ignore_eos=True)
    request = LLMRequest(rid="r", input_ids=PROMPT, begun=begun, gconfig=options)

    async def twice():
        with held_at(16):
            asking = asyncio.ensure_future(engine.agenerate(request))
            while await asyncio.to_thread(used_tokens, embedded_servers[0]) < len(PROMPT) + 8:
                assert not asking.done()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        before = begun.output_len
        return before, await engine.agenerate(request)

    before, reply = asyncio.run_coroutine_threadsafe(twice(), engine._running_thread().loop).result(LIMIT_S)
    assert 0 < before < 400 and reply is begun and (reply.output_len, reply.stop_reason) == (400, "length")
    assert reply.output_logprobs == pytest.approx(reference_logprobs(tiny_model, PROMPT, reply.output_tokens), abs=1e-3)


def test_requests_wait_while_paused(embedded_servers, connect):
    engine = connect(embedded_servers)
    engine.pause()
    engine.pause()  # twice is fine
    reply = start(engine, max_new_tokens=4, ignore_eos=True)
    wait([reply], NOTHING_S)
    assert not reply.done()
    engine.resume()
    assert reply.result(LIMIT_S).output_len == 4


def test_request_made_during_a_pause_counts_for_the_version_after_it(scripted, connect):
    server = scripted()
    engine = connect(server.url)
    engine.pause()
    reply = start(engine)
    wait([reply], NOTHING_S)
    assert server.generations() == []
    engine.set_version(9)
    engine.resume()
    assert reply.result(LIMIT_S).output_versions == [9, 9]


def test_impossible_requests_name_the_numbers(embedded_servers, connect):
    engine = connect(embedded_servers)
    with pytest.raises(ValueError, match="hold 512.*vocabulary of 512"):
        ask(engine, input_ids=[3, 512])
    with pytest.raises(ValueError, match="500 tokens of prompt.*20 of generation.max_new_tokens.*context of 512"):
        ask(engine, input_ids=[3] * 500, max_new_tokens=20)
    with pytest.raises(ValueError, match="at least one token"):
        ask(engine, input_ids=[])


# Servers that misbehave


def garbage(body):
    return web.Response(body=b"<html>busy</html>")


def nan(body):
    return counting(body, tokens=2, finish={"type": "stop", "matched": "NaN happened"})


def lost_logprobs(body):
    answer = counting(body)
    answer["meta_info"]["output_token_logprobs"].pop()
    return answer


def wrong_ids(body):
    return counting(body | {"input_ids": [998]})


def no_number(body):
    answer = counting(body)
    answer["meta_info"]["output_token_logprobs"][1][0] = None
    return answer


def impossible_logprob(body):
    answer = counting(body)
    answer["meta_info"]["output_token_logprobs"][1][0] = 0.5
    return answer


def no_tokens(body):
    return counting(body, tokens=0)


def hangs_up(body):
    raise ConnectionResetError


@pytest.mark.parametrize(
    "fault",
    [garbage, overloaded, nan, lost_logprobs, wrong_ids, no_number, impossible_logprob, no_tokens, hangs_up],
)
def test_fault_is_tried_again(scripted, connect, fault):
    server = scripted()
    server.script.append(fault)
    engine = connect(server.url)
    reply = ask(engine, input_ids=[1, 2], max_new_tokens=5)
    assert reply.output_tokens == [3, 4, 5, 6, 7]
    assert reply.output_logprobs == [-0.25] * 5
    assert engine.metrics()["rollout/request_retries"] == 1


def test_faults_without_end_name_the_server_and_its_message(scripted, connect):
    server = scripted()
    server.script.extend([overloaded] * 10)
    with pytest.raises(RuntimeError, match=f"{server.url}/generate: HTTP 503: out of memory"):
        ask(connect(server.url))
    assert len(server.generations()) == generate.REQUEST_ATTEMPTS


def test_another_server_takes_over(scripted, connect):
    broken, good = scripted(), scripted()
    broken.script.extend([overloaded] * 10)
    engine = connect([broken.url, good.url])
    assert ask(engine, input_ids=[1], max_new_tokens=2).output_tokens == [2, 3]
    assert (len(broken.generations()), len(good.generations())) == (1, 1)


def test_refused_request_is_an_error_of_its_own_and_sent_once(scripted, connect):
    server = scripted()
    server.script.append(lambda _: web.json_response({"error": {"message": "top_p must be in (0, 1]"}}, status=400))
    with pytest.raises(ValueError, match=f"{server.url}/generate: HTTP 400: top_p must be in"):
        ask(connect(server.url))
    assert len(server.generations()) == 1


def test_server_that_is_down_is_named(connect, scripted):
    with pytest.raises(RuntimeError, match="http://127.0.0.1:9/server_info"):
        connect("http://127.0.0.1:9")
    with pytest.raises(ValueError, match="rollout.servers"):
        connect([])
    server = scripted()
    engine = connect(server.url, start_timeout_s=0.3)
    server.stop()
    server.stop = lambda: None
    with pytest.raises(RuntimeError, match=f"no rollout server is left, and none has recovered: {server.url}"):
        ask(engine)


def test_router_is_refused_because_it_forwards_no_control_calls(scripted, connect):
    router = scripted(endpoints={"/generate", "/health", "/get_model_info", "/flush_cache"})
    with pytest.raises(ValueError, match=f"{router.url}/server_info: not found.*a router .*rollout.servers"):
        connect(router.url)


def test_hanging_server_meets_the_deadline(scripted, connect):
    server = scripted()
    server.script.append(never)
    with pytest.raises(RuntimeError, match="no complete reply within rollout.request_timeout_s = 0.3 s"):
        ask(connect(server.url, request_timeout_s=0.3))


def test_aborted_reply_is_resumed_from_its_tokens(scripted, connect):
    def aborted(count, version, then):
        def answer(body):
            engine.set_version(then)
            reply = counting(body, tokens=count, finish={"type": "abort", "message": "Aborted"})
            reply["meta_info"]["weight_versions"] = [{"version": version, "start": 0, "end": count}]
            return reply

        return answer

    def in_queue(body):
        return {"text": "", "meta_info": {"id": "x", "finish_reason": {"type": "abort", "message": "in queue"}}}

    server = scripted()
    server.script.extend([aborted(3, "4", then=4), in_queue, aborted(2, "5", then=6)])
    engine = connect(server.url, seed=3)
    engine.set_version(4)
    reply = ask(engine, input_ids=[10], max_new_tokens=8, min_new_tokens=4, metadata={"sample_key": "k"})
    assert reply.output_tokens == [11, 12, 13, 14, 15, 16, 17, 18]
    assert reply.output_versions == [4, 4, 4, 5, 5, 6, 6, 6]
    assert (reply.stop_reason, reply.interruptions) == ("length", 3)
    sent = server.generations()
    assert [body["input_ids"] for body in sent] == [
        [10],
        [10, 11, 12, 13],
        [10, 11, 12, 13],
        [10, 11, 12, 13, 14, 15],
    ]
    assert [body["sampling_params"]["max_new_tokens"] for body in sent] == [8, 5, 5, 3]
    assert [body["sampling_params"]["min_new_tokens"] for body in sent] == [4, 1, 1, 0]
    # A continuation must not repeat the draws of the part before it.
    seeds = [body["sampling_params"]["sampling_seed"] for body in sent]
    assert len(set(seeds)) == 3 and seeds[1] == seeds[2]


def test_tokens_of_a_cancelled_reply_are_asked_for_and_kept(scripted, connect):
    server = scripted()
    ended = asyncio.Event()

    async def until_ended(body):
        await ended.wait()
        return counting(body, tokens=3, finish={"type": "abort", "message": "Aborted"})

    server.script.append(until_ended)
    server.answers["/abort_request"] = lambda body: ended.set() or {}
    engine, begun = connect(server.url), LLMResponse.nothing(PROMPT)
    request = LLMRequest(rid="r", input_ids=PROMPT, begun=begun, gconfig=GenerationConfig(max_new_tokens=8))

    async def twice():
        asking = asyncio.ensure_future(engine.agenerate(request))
        await until(server.generations)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert begun.output_tokens == [6, 7, 8] and server.body_of("/abort_request")["rid"].startswith("r-")
        return await engine.agenerate(request)

    reply = asyncio.run_coroutine_threadsafe(twice(), engine._running_thread().loop).result(LIMIT_S)
    assert reply.output_tokens == list(range(6, 14)) and len(reply.output_versions) == 8
    _, again = server.generations()
    assert again["input_ids"] == [*PROMPT, 6, 7, 8] and again["sampling_params"]["max_new_tokens"] == 5


def test_a_reply_in_parts_loses_no_more_than_a_part_with_a_server(scripted, connect, monkeypatch):
    monkeypatch.setattr(generate, "FIRST_RETRY_S", 0.001)
    dying, other = scripted(), scripted()
    dying.script.extend([counting, lambda body: web.Response(status=500, text="dying")])
    engine = connect([dying.url, other.url], seed=3, part_tokens=3)
    reply = ask(engine, input_ids=[10], max_new_tokens=8, min_new_tokens=4, metadata={"sample_key": "k"})
    assert reply.output_tokens == [11, 12, 13, 14, 15, 16, 17, 18] and len(reply.output_versions) == 8
    assert (reply.stop_reason, reply.interruptions) == ("length", 0)
    asked = [(body["input_ids"], body["sampling_params"]) for body in dying.generations() + other.generations()]
    assert [ids for ids, _ in asked] == [[10], [10, 11, 12, 13], [10, 11, 12, 13], [10, 11, 12, 13, 14, 15, 16]]
    bounds = [(params["max_new_tokens"], params["min_new_tokens"]) for _, params in asked]
    assert bounds == [(3, 3), (3, 1), (3, 1), (2, 0)]


def test_parts_end_where_the_reply_does_and_no_text_to_stop_at_lies_across_two(scripted, connect):
    server = scripted()
    engine = connect(server.url, part_tokens=3)
    assert ask(engine, input_ids=[10], max_new_tokens=8, stop=["end"]).output_len == 8
    server.script.append(lambda body: counting(body, tokens=2, finish={"type": "stop", "matched": 12}))
    assert ask(engine, input_ids=[10], max_new_tokens=8).output_len == 2
    assert [body["sampling_params"]["max_new_tokens"] for body in server.generations()] == [8, 3]


def test_a_greedy_reply_in_parts_is_the_whole_one(embedded_servers, connect):
    whole, parts = (
        ask(connect(embedded_servers, part_tokens=tokens), max_new_tokens=24, greedy=True, ignore_eos=True)
        for tokens in (0, 5)
    )
    assert parts.output_tokens == whole.output_tokens and parts.stop_reason == "length"
    assert parts.output_logprobs == pytest.approx(whole.output_logprobs, abs=1e-4)


def test_reply_that_is_always_aborted_is_given_up(scripted, connect, monkeypatch):
    monkeypatch.setattr(generate, "FIRST_RETRY_S", 0.001)
    server = scripted()
    server.script.extend([lambda body: counting(body, tokens=0, finish={"type": "abort", "message": "no"})] * 100)
    reply = ask(connect(server.url))
    assert (reply.stop_reason, reply.output_tokens) == ("abort", [])
    assert len(server.generations()) == generate.FRUITLESS_RESUMES + 1


def test_requests_of_one_rid_share_a_server_and_have_ids_of_their_own(scripted, connect):
    servers = [scripted(), scripted()]
    engine = connect([server.url for server in servers])

    async def many():
        await asyncio.gather(
            *(
                engine.agenerate(LLMRequest(rid=rid, input_ids=[1], gconfig=GenerationConfig(max_new_tokens=1)))
                for rid in ("a", "b", "c", "d")
                for _ in range(3)
            )
        )

    asyncio.run(many())
    rids = [[body["rid"] for body in server.generations()] for server in servers]
    assert len({rid for server in rids for rid in server}) == 12
    assert [len(server) for server in rids] == [6, 6]
    assert not {rid[0] for rid in rids[0]} & {rid[0] for rid in rids[1]}


def test_seed_is_sent_only_where_there_is_one(scripted, connect):
    server = scripted()
    ask(connect(server.url), metadata={"sample_key": "k"})
    engine = connect(server.url, seed=5)
    ask(engine, metadata={"sample_key": "k"})
    ask(engine, metadata={"sample_key": "other"})
    ask(engine, metadata={"sample_key": "k"})
    ask(engine, metadata={"sample_key": "k"}, greedy=True)
    seeds = [body["sampling_params"].get("sampling_seed") for body in server.generations()]
    assert seeds[0] is None and seeds[4] is None
    assert seeds[1] == seeds[3] != seeds[2]
    assert 0 <= seeds[1] < 2**63


def test_token_is_sent_and_another_one_is_refused_by_name(scripted, connect, tmp_path):
    server = scripted(api_key=TOKEN)
    assert ask(connect(server.url), max_new_tokens=1).output_len == 1
    with pytest.raises(ValueError, match=f"{server.url}/server_info: HTTP 401: Unauthorized; .*rollout.token_file"):
        connect(server.url, token_file=str(tmp_path / "another"))


def test_answer_without_an_end_costs_no_memory(scripted, connect, monkeypatch):
    monkeypatch.setattr(generate, "MAX_ANSWER_BYTES", 100_000)
    endless, sent = scripted(), []

    async def body():
        while True:
            sent.append(1000)
            yield b" " * 1000

    endless.script.extend([lambda _: web.Response(body=body(), content_type="application/json")] * 4)
    with pytest.raises(RuntimeError, match="/generate: answered more than 100,000 bytes"):
        ask(connect(endless.url), max_new_tokens=1)
    # What fits into sockets and buffers was sent on the way.
    assert len(endless.generations()) == 4 and sum(sent) < 4 * 20_000_000


def test_long_message_of_a_server_is_cut(scripted, connect):
    server = scripted()
    server.refusals["/generate"] = (400, {"error": {"message": "x" * 100_000}})
    with pytest.raises(ValueError, match="HTTP 400: x+") as refused:
        ask(connect(server.url), max_new_tokens=1)
    assert len(str(refused.value)) < 2000


def test_token_is_not_carried_to_where_a_server_points(scripted, connect):
    pointing, elsewhere = scripted(), scripted(api_key=TOKEN)
    pointing.answers["/pause_generation"] = lambda _: web.Response(
        status=307, headers={"Location": f"{elsewhere.url}/pause_generation"}
    )
    engine = connect(pointing.url)
    with pytest.raises(NoServerLeft, match="/pause_generation: HTTP 307"):
        engine.pause()
    assert pointing.controls()[0] == "/pause_generation" and elsewhere.calls == []


# Control


def test_update_is_a_session_since_0_5_21(scripted, connect):
    server = scripted(version="0.5.21")
    engine = connect(server.url)
    update(engine)
    assert server.controls() == [
        "/pause_generation",
        "/flush_cache",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/end_weight_update",
        "/continue_generation",
    ]
    assert server.body_of("/pause_generation") == {"mode": "retract"}
    assert server.body_of("/update_weights_from_distributed") == {
        "names": ["w"],
        "dtypes": ["float32"],
        "shapes": [[2]],
        "group_name": "g",
        "load_format": "flattened_bucket",
        "weight_version": "2",
        "flush_cache": False,
    }
    assert engine.get_version() == 2
    assert ask(engine, max_new_tokens=2).output_versions == [2, 2]


def test_update_before_0_5_21_has_no_session(scripted, connect):
    server = scripted(version="0.5.19")
    update(connect(server.url))
    assert server.controls() == [
        "/pause_generation",
        "/flush_cache",
        "/update_weights_from_distributed",
        "/continue_generation",
    ]
    assert server.body_of("/pause_generation") == {"mode": "abort"}, "a flush needs it there"


def test_servers_before_0_5_6_have_no_pause_modes_and_other_names(scripted, connect):
    server = scripted(version="0.5.4")
    update(connect(server.url))
    assert server.body_of("/pause_generation") == {}


def test_group_ranks_follow_the_tensor_parallel_sizes(scripted, connect):
    servers = [scripted(info={"tp_size": 2}), scripted(), scripted(info={"tp_size": 4})]
    engine = connect([server.url for server in servers])
    assert list(engine.server_ranks.values()) == [2, 1, 4]
    wait_for(engine.join_weight_group(address="10.0.0.1", port=5, name="g", backend="nccl"))
    bodies = [server.body_of("/init_weights_update_group") for server in servers]
    assert [body["rank_offset"] for body in bodies] == [1, 3, 4]
    assert {body["world_size"] for body in bodies} == {8}


@pytest.mark.parametrize("status", [200, 400])
def test_refused_control_call_names_server_endpoint_and_message(scripted, connect, status):
    good, bad = scripted(), scripted()
    engine = connect([good.url, bad.url])
    bad.refusals["/update_weights_from_distributed"] = (status, {"success": False, "message": "unknown tensor w"})
    pattern = f"{bad.url}/update_weights_from_distributed: .*unknown tensor w"
    with pytest.raises(RuntimeError, match=pattern):
        update(engine)


def test_cache_is_flushed_until_the_server_agrees(scripted, connect):
    server = scripted()
    engine = connect(server.url, control_timeout_s=0.3)
    server.refusals["/flush_cache"] = (400, {"message": "requests are running"})
    with pytest.raises(RuntimeError, match="requests are running.*could not be flushed within 0.3 s"):
        engine.pause()

    def agree(endpoint):
        if server.controls().count("/flush_cache") == 3:
            server.refusals.clear()

    patient = connect(server.url)
    server.calls.clear()
    server.on_call = agree
    patient.pause()
    assert server.controls().count("/flush_cache") == 3


def test_destroyed_engine_says_so(scripted, connect):
    engine = connect(scripted().url)
    engine.destroy()
    engine.destroy()
    with pytest.raises(RuntimeError, match="initialize"):
        engine.pause()
