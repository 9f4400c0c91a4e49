"""The real SGLang router before embedded servers: versions stay right whatever it does with a server's requests."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import load_file

from megatron_rl.servers.reply_check import Asked, check_reply
from megatron_rl.servers.router import Router
from megatron_rl.weights.publish import GroupPublisher
from tests.kit.client_calls import ask, post, wait_until_serving
from tests.kit.in_process import specs_of
from tests.kit.pace import held_at
from tests.kit.reference import reference_greedy, used_tokens
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until
from tests.servers.test_faults import LONG, assert_same, roll_out


@pytest.fixture
def engine(embedded_servers, router, connect, tiny_model):
    """A client behind the router whose servers have version 1, which is that of the tiny model."""
    engine = connect(embedded_servers, seed=7, router=router)
    publisher = GroupPublisher(engine, bucket_bytes=100_000, backend="gloo", timeout_s=LATE_S)
    engine.select_servers()
    weights = load_file(tiny_model / "model.safetensors")
    publisher.publish(specs_of(weights), iter(weights.items()), 1)
    yield engine
    publisher.close()
    connect(embedded_servers).update_weights(tiny_model, 2)


def test_replies_through_the_router_are_those_of_the_servers(engine, embedded_servers, connect):
    direct = connect(embedded_servers, seed=7)
    direct.set_version(1)
    assert_same(roll_out(engine, max_new_tokens=16), roll_out(direct, max_new_tokens=16))


def test_update_goes_through_replies_under_way(engine, other_tiny_model, embedded_servers):
    with ThreadPoolExecutor(1) as pool:
        with held_at(LONG - 10):
            batch = pool.submit(roll_out, engine, LONG)
            wait_until(lambda: max(used_tokens(url) for url in embedded_servers) > 100)
            engine.update_weights(other_tiny_model, 2)
        versions = batch.result(LIMIT_S)["versions"]
    assert set(versions[versions >= 0].tolist()) == {1, 2}
    expected = reference_greedy(other_tiny_model, [1], 16)
    for rid in "ab":
        reply = ask(engine, rid=rid, max_new_tokens=16, greedy=True, ignore_eos=True)
        assert (reply.output_tokens, reply.output_versions) == (expected, [2] * 16)


def test_the_router_knows_the_servers_by_the_time_that_an_update_ends(engine, tiny_model, monkeypatch):
    serve_with, told = Router.serve_with, []

    async def note(self, urls, **options):
        await serve_with(self, urls, **options)
        told.append(sorted(urls))

    monkeypatch.setattr(Router, "serve_with", note)
    engine.update_weights(tiny_model, 2)
    assert told and told[-1] == sorted(engine.serving)


@pytest.mark.parametrize("name", ["none", "0"])
def test_server_that_was_restarted_behind_the_routers_back_gives_no_reply_before_it_caught_up(
    engine, embedded_servers, tiny_model, other_tiny_model, name
):
    restarted, _ = embedded_servers
    post(restarted, "/update_weights_from_disk", {"model_path": str(other_tiny_model), "weight_version": name})
    expected = reference_greedy(tiny_model, [1], 8)
    for rid in "abcd":  # the router asks both in turn
        reply = ask(engine, rid=rid, max_new_tokens=8, greedy=True, ignore_eos=True)
        assert (reply.output_tokens, reply.output_versions) == (expected, [1] * 8)
    wait_until_serving(engine, 2)  # it was dropped by one of these requests, or before by a look at its version
    sampling = {"temperature": 0, "max_new_tokens": 8}
    again = post(restarted, "/generate", {"input_ids": [1], "sampling_params": sampling}).json()
    assert (again["output_ids"], again["meta_info"]["weight_version"]) == (expected, "1")


def test_server_that_is_dropped_leaves_the_router_and_its_replies_are_asked_again(
    engine, embedded_servers, tiny_model, router, monkeypatch
):
    call = Router._call

    async def call_late(self, method, endpoint, body, timeout_s):
        if method == "DELETE":  # the server could catch up meanwhile, and abort what it was asked
            await asyncio.sleep(0.5)  # on a slow machine it may not have come so far
        await call(self, method, endpoint, body, timeout_s)

    monkeypatch.setattr(Router, "_call", call_late)
    dropped, left = embedded_servers
    calm = roll_out(engine, max_new_tokens=LONG)
    with ThreadPoolExecutor(1) as pool:
        with held_at(LONG - 10):
            batch = pool.submit(roll_out, engine, LONG)
            wait_until(lambda: used_tokens(dropped) > 100)
            engine.select_servers()
            engine.pause()
            engine.drop(dropped, "its weights are wrong")  # it stays paused, and with it what it was asked
            engine.resume()
        assert_same(batch.result(LIMIT_S), calm)
    wait_until_serving(engine, 2)  # from its peer
    reply = ask(engine, max_new_tokens=8, greedy=True, ignore_eos=True)
    assert reply.output_tokens == reference_greedy(tiny_model, [1], 8)


@pytest.mark.parametrize(
    ("spans", "is_good"),
    [
        ([("3", 2)], True),
        ([("3", 1), ("4", 1)], True),
        ([("2", 1), ("3", 1)], False),
        ([("none", 2)], False),
        ([("3", 1)], False),
        ([], False),
    ],
)
def test_reply_counts_only_where_each_token_names_a_version_that_may_serve(spans, is_good):
    ends = [0]
    for _, tokens in spans:
        ends.append(ends[-1] + tokens)
    named = [{"version": v, "start": a, "end": b} for (v, _), a, b in zip(spans, ends, ends[1:], strict=False)]
    meta = {"finish_reason": {"type": "length", "length": 2}, "output_token_logprobs": [[-1.0, 5, None]] * 2}
    asked = Asked(rid="r", prompt_tokens=1, max_new_tokens=2, version=3, is_routed=True)
    answer = {"text": "", "meta_info": meta | {"weight_version": "3", "weight_versions": named}}
    if is_good:
        assert check_reply(answer, asked).spans == spans
    else:
        with pytest.raises(ValueError, match="weight_versions = "):
            check_reply(answer, asked)
