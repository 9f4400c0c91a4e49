"""Streamed replies are the same, token for token. Who hangs up ends them, and a dead server's part is kept."""

import asyncio
import json

import orjson
import pytest
from aiohttp import web

from megatron_rl.agents import AgentWorkflow
from megatron_rl.api import RequestRefused
from megatron_rl.config import GenerationConfig
from megatron_rl.types import LLMRequest
from tests.kit.reference import used_tokens
from tests.kit.scripted_server import counting
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import wait_until
from tests.unit import trying_agents

PROMPT = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "sample_key": "k"}


def request_of(number, on_tokens=None, **options):
    gconfig = GenerationConfig(max_new_tokens=24, ignore_eos=True, **options)
    ids = [1, 2, 3 + number]
    return LLMRequest(
        rid="r", input_ids=ids, gconfig=gconfig, metadata={"sample_key": str(number)}, on_tokens=on_tokens
    )


def test_a_streamed_reply_is_the_one_that_is_not_streamed(embedded_servers, connect):
    engine = connect(embedded_servers[0], seed=3)
    for number in range(4):
        told = []
        streamed = asyncio.run(engine.agenerate(request_of(number, told.append)))
        whole = asyncio.run(engine.agenerate(request_of(number)))
        assert streamed.output_tokens == whole.output_tokens == told[-1] and len(whole.output_tokens) == 24
        # A CPU's matrix products may differ in their last bit from call to call.
        assert streamed.output_logprobs == pytest.approx(whole.output_logprobs, abs=1e-5)
        assert streamed.output_versions == whole.output_versions and streamed.stop_reason == whole.stop_reason
        assert all(whole.output_tokens[: len(ids)] == ids for ids in told)
        assert len(told) > 3 and sorted(map(len, told)) == list(map(len, told))


def test_an_agents_trajectories_are_the_same_streamed_or_not(embedded_servers, connect):
    def trajectories(streams):
        engine = connect(embedded_servers[0], seed=5)
        gconfig = GenerationConfig(max_new_tokens=30)
        options = {"max_tokens": 400, "agent_args": {"streams": streams}}
        workflow = AgentWorkflow(lambda **_: 0.0, gconfig, make_tokenizer(), trying_agents.asks, **options)
        found = asyncio.run(workflow.arun_episode(engine, PROMPT))
        return sorted((one.input_ids.tolist(), one.versions.tolist(), one.logprobs.tolist()) for one in found)

    streamed, whole = trajectories(True), trajectories(False)
    assert [one[:2] for one in streamed] == [one[:2] for one in whole] and len(whole) >= 1
    for (*_, ours), (*_, theirs) in zip(streamed, whole, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)  # as above


def test_who_hangs_up_ends_the_generation_at_once_and_the_record_stays_whole(embedded_servers, connect):
    engine = connect(embedded_servers[0], seed=5)
    gconfig = GenerationConfig(max_new_tokens=2000, ignore_eos=True)
    workflow = AgentWorkflow(lambda **_: 0.0, gconfig, make_tokenizer(), trying_agents.hangs_up, max_tokens=480)

    async def main():
        episode = asyncio.create_task(workflow.arun_episode(engine, PROMPT))
        (trajectory,) = await episode
        return trajectory

    trajectory = asyncio.run(main())
    wait_until(lambda: not used_tokens(embedded_servers[0]), "the server generates for nobody")
    # The stream that was left is no part of it: the second request is a dialogue of its own.
    assert trajectory.sequence["turns"] == 1 and int(trajectory.loss_mask.sum()) == 5


def stream_of(server, *answers, ends=True):
    """A body of the protocol's events."""
    for answer in answers:
        if "meta_info" in answer:
            server._name_weights(answer["meta_info"])
    events = [b"data: " + orjson.dumps(answer) for answer in answers] + ([b"data: [DONE]"] if ends else [])
    return web.Response(body=b"".join(event + b"\n\n" for event in events), content_type="text/event-stream")


def cut(body, tokens):
    answer = counting(body, tokens=tokens)
    answer["meta_info"]["finish_reason"] = None
    return answer


def generate(connect, server, told):
    request = LLMRequest(
        rid="r", input_ids=[7], gconfig=GenerationConfig(max_new_tokens=10), on_tokens=lambda ids: told.append(ids)
    )
    return asyncio.run(connect(server.url).agenerate(request))


def test_the_part_that_a_dead_server_had_streamed_is_kept_and_continued(connect, scripted):
    server = scripted()
    told = []
    server.script.append(lambda body: stream_of(server, cut(body, 2), cut(body, 4), ends=False))
    server.script.append(lambda body: stream_of(server, cut(body, 3), counting(body)))
    reply = generate(connect, server, told)
    assert reply.output_tokens == list(range(8, 18)) and reply.stop_reason == "length" and reply.interruptions == 1
    assert told == [[8, 9], [8, 9, 10, 11], list(range(8, 15)), list(range(8, 18))]
    sent = [body for endpoint, body in server.calls if endpoint == "/generate"]
    assert sent[1]["input_ids"] == [7, 8, 9, 10, 11] and all(body["stream"] for body in sent)


@pytest.mark.parametrize("code", [400, 500])
def test_an_error_within_a_stream_is_one(connect, scripted, code):
    server = scripted()
    error = {"error": {"message": "it is too long", "type": "e", "code": code}}
    for _ in range(3):
        server.script.append(lambda body: stream_of(server, error))
    if code == 400:
        with pytest.raises(RequestRefused, match="it is too long"):
            generate(connect, server, [])
    else:
        server.script.append(lambda body: stream_of(server, counting(body)))
        assert generate(connect, server, []).output_len == 10


def test_a_long_reply_comes_in_a_bounded_number_of_pieces(connect, scripted):
    server = scripted()
    server.script.append(lambda body: stream_of(server, counting(body)))
    request = LLMRequest(
        rid="r", input_ids=[7], gconfig=GenerationConfig(max_new_tokens=900), on_tokens=lambda ids: None
    )
    assert asyncio.run(connect(server.url).agenerate(request)).output_len == 900
    (body,) = [body for endpoint, body in server.calls if endpoint == "/generate"]
    assert body["sampling_params"]["stream_interval"] == 2 and json.dumps(body)


def test_a_server_whose_events_are_not_whole_is_not_asked_for_them(connect, scripted):
    server = scripted(info={"incremental_streaming_output": True})
    assert generate(connect, server, told := []).output_len == 10 and told == []
    assert not any("stream" in body for _, body in server.calls)
