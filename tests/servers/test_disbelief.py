"""Servers that are not what they say: restarted unnoticed, wrong, hung behind a door that answers, busy; and a client
that is itself late, or out of files. No wrong token counts, no sound server is blamed, and no request is lost.
"""

import asyncio
import itertools
import json
import os
import resource
import threading
import time
from concurrent.futures import wait

import pytest
from aiohttp import web

from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.launch import open_files
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers import client, membership, server_http
from megatron_rl.servers.membership import BAD_REPLIES
from megatron_rl.servers.server_http import ServerError, seconds_of
from megatron_rl.workflows import RLVRWorkflow
from tests.kit.client_calls import ask, request_of, start, update, wait_until_serving
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.scripted_server import counting
from tests.kit.waiting import LATE_S, LIMIT_S, SLOWNESS, until, wait_until

pytestmark = pytest.mark.usefixtures("quick_looks")
NOTHING_S = 0.1
"""For how long a test watches that nothing happens; on a slow machine it watches less."""


@pytest.fixture
def quick_patrol(monkeypatch):
    """Servers are visited all the time, whatever patience there is with them."""
    monkeypatch.setattr(membership, "PATROL_EVERY_S", 0.02)


# -- restarted


@pytest.mark.parametrize("name", ["default", "none", "0", "3"])
def test_server_restarted_while_idle_gives_no_token_of_the_weights_it_started_with(scripted, connect, name):
    restarted, steady = scripted(), scripted()
    engine = connect([restarted.url, steady.url])
    update(engine, version=3)
    assert sorted(ask(engine, rid=rid).output_versions for rid in "ab") == [[3, 3], [3, 3]]
    steady.calls.clear()
    restarted.restart(weight_version=name)
    replies = [ask(engine, rid=rid) for rid in "cdef"]
    assert [reply.output_versions for reply in replies] == [[3, 3]] * 4
    # Every reply that counts is the other's: this one has the weights of its start, whatever it calls them.
    assert len(steady.generations()) == 4 and engine.serving == [steady.url]
    restarted.wait_for_looks()
    assert engine.serving == [steady.url], "it says that it is well"
    engine.select_servers()
    update(engine, version=4)
    assert sorted(engine.serving) == sorted([restarted.url, steady.url])
    assert [ask(engine, rid=rid).output_versions for rid in "gh"] == [[4, 4]] * 2


def test_server_restarted_before_any_publication_has_the_weights_of_its_first_start_again(scripted, connect):
    server = scripted()
    engine = connect(server.url)
    assert ask(engine).output_versions == [0, 0]
    server.restart()
    assert ask(engine).output_versions == [0, 0] and engine.serving == [server.url]


def test_restart_that_nobody_asks_about_is_found_by_the_patrol(scripted, connect, quick_patrol):
    restarted, steady = scripted(), scripted()
    engine = connect([restarted.url, steady.url], health_timeout_s=LATE_S)
    update(engine, version=3)
    restarted.restart()
    wait_until(lambda: engine.serving == [steady.url])


def test_weight_group_is_formed_anew_only_where_a_server_in_it_was_started_anew(scripted, connect):
    failing, restarted = scripted(), scripted()
    engine = connect([failing.url, restarted.url])
    update(engine, version=3)
    before = engine.membership
    failing.hang_up_on.add("/generate")
    for reply in [start(engine, rid) for rid in "ab"]:
        reply.result(LIMIT_S)
    failing.hang_up_on.clear()
    wait_until_serving(engine, 2)
    engine.select_servers()
    update(engine, version=4)
    assert engine.membership == before
    restarted.restart()
    for reply in [start(engine, rid) for rid in "cd"]:
        reply.result(LIMIT_S)
    wait_until(lambda: engine.membership > before)


def test_head_that_does_not_publish_waits_to_hear_of_a_version_before_it_takes_its_tokens(scripted, connect):
    server = scripted()
    head = connect(server.url)
    server.weight_version = "3"
    head.mark_published([server.url], 3)
    server.script.append(lambda body: named(body, [("3", 0, 1), ("4", 1, 2)]))
    early = start(head, "a")
    wait_until(lambda: server.answered["/generate"])
    wait([early], NOTHING_S)
    assert not early.done()
    server.weight_version = "4"
    head.mark_published([server.url], 4)
    assert early.result(LIMIT_S).output_versions == [3, 4]


# -- wrong


def named(body, spans):
    reply = counting(body)
    reply["meta_info"]["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return reply


def spoilt(**meta):
    return lambda body: (reply := counting(body))["meta_info"].update(meta) or reply


@pytest.mark.parametrize(
    "wrong",
    [
        lambda body: named(body, [("999", 0, 2)]),
        lambda body: named(body, [("4", 0, 2)]),
        lambda body: named(body, [("2", 0, 2)]),
        lambda body: named(body, [("-1", 0, 2)]),
        lambda body: named(body, [("incomplete", 0, 2)]),
        lambda body: counting(body, tokens=300),
        spoilt(output_token_logprobs=[["NaN", 2, None], [-1e308, 3, None]]),
        lambda body: [counting(body)],
        lambda body: {"error": {"message": "nothing"}},
        lambda _: web.Response(status=404, body=b"\xff<html>"),
        lambda _: web.Response(status=403, body=b"[" * 5000),
        lambda _: web.Response(status=500, body=b"[" * 900 + b"]" * 900),
        lambda _: web.Response(body=b"\x00" * 100, headers={"Content-Encoding": "gzip"}),
    ],
)
def test_server_with_wrong_replies_trains_nobody_and_the_others_go_on(scripted, connect, wrong):
    bad, good = scripted(), scripted()
    engine = connect([bad.url, good.url])
    update(engine, version=3)
    bad.script.extend([wrong] * 2)
    for rid in "abcd":
        reply = ask(engine, rid=rid)
        assert (reply.output_tokens, reply.output_logprobs) == ([2, 3], [-0.25, -0.25])
        assert reply.output_versions == [3, 3]
    assert engine.metrics()["rollout/server_failures"] >= 1


def test_server_whose_replies_are_wrong_again_and_again_is_dropped_with_the_reason(scripted, connect):
    dropped, rounds = [], itertools.count()
    bad, good = scripted(), scripted()
    engine = connect([bad.url, good.url], on_drop=lambda url, reason: dropped.append((url, reason)))
    update(engine, version=3)
    bad.script.extend([spoilt(completion_tokens=7)] * 100)

    def is_dropped():
        replies = [start(engine, f"{next(rounds)}-{number}") for number in range(2)]
        assert [reply.result(LIMIT_S).output_tokens for reply in replies] == [[2, 3]] * 2
        return bool(dropped)

    wait_until(is_dropped)
    ((url, reason),) = dropped
    assert url == bad.url and f"{BAD_REPLIES} of its replies could not be used" in reason
    assert "completion_tokens = 7: 2 tokens came" in reason
    assert engine.metrics()["rollout/bad_replies"] == BAD_REPLIES
    sent = len(bad.generations())
    bad.wait_for_looks()
    ask(engine, rid="x"), ask(engine, rid="y")
    assert len(bad.generations()) == sent and engine.serving == [good.url]
    # Started anew, or published to, it has another chance.
    bad.script.clear()
    engine.select_servers(), update(engine, version=4)
    assert sorted(engine.serving) == sorted([bad.url, good.url])


def without_logprob(body):
    reply = counting(body)
    reply["meta_info"]["output_token_logprobs"][1][0] = None
    return reply


def with_nan(body):
    text = json.dumps(without_logprob(body)).replace("[null, 3", "[NaN, 3")
    assert "NaN" in text
    return web.Response(text=text, content_type="application/json")


@pytest.mark.parametrize("wrong", [without_logprob, with_nan])
def test_reply_without_a_log_prob_is_refused_and_its_server_stays(scripted, connect, wrong):
    server = scripted()
    engine = connect(server.url)
    update(engine, version=3)
    for rid in "abcde":  # a server is lost for one that is bad in another way, and dropped after four
        server.script.append(wrong)
        assert ask(engine, rid=rid).output_logprobs == [-0.25, -0.25] and engine.serving == [server.url]
    metrics = engine.metrics()
    assert metrics["rollout/unknown_logprobs"] == metrics["rollout/bad_replies"] == 5
    assert metrics["rollout/server_failures"] == 0


def test_only_server_whose_replies_lack_log_probs_ends_the_run_with_the_reason(scripted, connect):
    dropped, server = [], scripted()
    engine = connect(server.url, on_drop=lambda *it: dropped.append(it))
    update(engine, version=3)
    server.script.extend([without_logprob] * 100)
    wait([start(engine, f"{number}") for number in range(4)], LIMIT_S)
    reason = "the only server left: 16 of its last 16 replies lack .*position 1 = None.*policy/entropy"
    with pytest.raises(RuntimeError, match=reason):
        engine.rollout_batch([{"input_ids": [1]}], RLVRWorkflow(lambda **_: 0.0, GenerationConfig(), None))
    assert not dropped and engine.serving == [server.url]


def test_one_of_two_servers_whose_replies_lack_log_probs_is_dropped_by_its_rate(scripted, connect):
    dropped, rounds = [], itertools.count()
    bad, good = scripted(), scripted()
    engine = connect([bad.url, good.url], on_drop=lambda url, reason: dropped.append((url, reason)))
    update(engine, version=3)
    bad.script.extend([without_logprob] * 200)

    def is_dropped():
        replies = [start(engine, f"{next(rounds)}-{number}") for number in range(4)]
        assert [reply.result(LIMIT_S).output_tokens for reply in replies] == [[2, 3]] * 4
        return bool(dropped)

    wait_until(is_dropped)
    assert dropped[0][0] == bad.url and "16 of its last 16 replies lack" in dropped[0][1]


def test_request_is_refused_by_two_servers_or_the_one_that_did_is_to_blame(scripted, connect):
    refusing, good = scripted(), scripted()
    engine = connect([refusing.url, good.url])
    refusing.refusals["/generate"] = (400, {"error": {"message": "top_p must be in (0, 1]"}})
    replies = [start(engine, rid) for rid in "abcd"]
    assert [reply.result(LIMIT_S).output_tokens for reply in replies] == [[2, 3]] * 4
    assert engine.metrics()["rollout/bad_replies"] >= 1
    good.refusals["/generate"] = refusing.refusals["/generate"]
    with pytest.raises(ValueError, match="HTTP 400: top_p must be in"):
        ask(engine)


def test_server_that_claims_more_ids_than_the_model_has_is_not_believed(scripted):
    server = scripted(info={"vocab_size": 10**9})
    engine = RemoteSGLangEngine(RolloutConfig(token_file=TOKEN_FILE), vocab_size=1000)
    engine.initialize(server.url)
    try:
        server.script.append(lambda body: counting(body | {"input_ids": [5000]}))
        assert ask(engine).output_tokens == [2, 3] and engine.metrics()["rollout/bad_replies"] == 1
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("info", {"tp_size": "two"}),
        ("info", {"vocab_size": [1]}),
        ("info", {"context_length": -5}),
        ("info", {"version": None}),
        ("name", 3),
        ("name", ["default"]),
    ],
)
def test_server_that_says_nonsense_of_itself_is_lost_until_it_talks_sense(scripted, connect, place, value):
    odd, steady = scripted(), scripted()
    engine = connect([odd.url, steady.url])
    before = dict(odd.info)
    if place == "info":
        odd.info |= value
    else:
        odd.weight_version = value
    odd.hang_up_on.add("/generate")
    ask(engine, rid="a"), ask(engine, rid="b")
    odd.hang_up_on.clear()
    looks = odd.answered["/model_info"]
    wait_until(lambda: odd.answered["/model_info"] >= looks + 2, "nobody looks at it")
    assert engine.serving == [steady.url]
    odd.info.update(before)
    odd.weight_version = "default"
    wait_until_serving(engine, 2)


# -- hung


def test_server_whose_scheduler_hangs_is_lost_at_the_first_deadline_and_gets_no_more(scripted, connect):
    hung, steady = scripted(), scripted()
    engine = connect([hung.url, steady.url], request_timeout_s=SLOWNESS, health_timeout_s=LATE_S)
    hung.scheduler_hangs = True
    replies = [start(engine, rid) for rid in "ab"]
    ends = [reply.exception(LIMIT_S) for reply in replies]
    assert sorted(str(type(end)) for end in ends) == sorted([str(type(None)), str(ServerError)])
    wait_until(lambda: engine.serving == [steady.url])
    for rid in "cdefgh":
        assert ask(engine, rid=rid).output_tokens == [2, 3]
    assert engine.serving == [steady.url] and "/generate" not in hung.controls()
    hung.scheduler_hangs = False
    wait_until_serving(engine, 2)


def test_requests_of_a_server_that_generates_nothing_move_before_their_deadline(scripted, connect):
    hung, steady = scripted(), scripted()
    engine = connect([hung.url, steady.url], health_timeout_s=0.3)
    hung.scheduler_hangs = True
    replies = [start(engine, rid) for rid in "abcd"]
    assert [reply.result(LIMIT_S).output_tokens for reply in replies] == [[2, 3]] * 4
    wait_until(lambda: engine.serving == [steady.url])  # which may have been slow to answer for a moment


def test_server_that_is_only_slow_keeps_its_requests(scripted, connect, quick_patrol):
    async def slow(body):
        # It seems to have been asked for longer than the client is patient, and is looked at for it.
        engine.service.client.fleet.members.serving[0].busy_since -= 2 * LATE_S
        await until(lambda: server.answered["/health_generate"] >= 3, "nobody asks whether it generates")
        return counting(body)

    server = scripted()
    server.script.append(slow)
    engine = connect(server.url, health_timeout_s=LATE_S)
    engine.service.client.fleet.members.serving[0].last_reply_s -= 2 * LATE_S
    assert ask(engine).output_tokens == [2, 3] and len(server.generations()) == 1
    assert engine.metrics()["rollout/server_failures"] == 0


def test_server_that_hangs_in_a_pause_delays_a_publication_by_the_deadline_of_commands_alone(scripted, connect):
    hung, steady = scripted(), scripted()
    # Any other deadline would end the test.
    engine = connect([hung.url, steady.url], control_timeout_s=SLOWNESS, health_timeout_s=LATE_S)
    hung.hangs = True
    update(engine, version=3)
    assert engine.serving == [steady.url]


def test_long_reply_has_time_in_proportion_to_its_length():
    engine = RemoteSGLangEngine(RolloutConfig())

    def deadline_s(tokens):
        return engine.service.client._deadline_s(request_of(max_new_tokens=tokens))

    assert deadline_s(128) == 600.0 and 32_768 / deadline_s(32_768) == 10.0


# -- the patrol


def test_patrol_outlives_a_server_that_is_forgotten_while_it_is_visited(scripted, connect):
    forgotten, hanging, steady = (scripted() for _ in range(3))
    engine = connect([server.url for server in (forgotten, hanging, steady)], health_timeout_s=0.5 * SLOWNESS)
    members = engine.service.client.fleet.members
    forgotten.hangs = True
    visits = forgotten.asked["/model_info"]
    wait_until(lambda: forgotten.asked["/model_info"] > visits, "it is not visited")
    (gone,) = [server for server in members.serving if server.url == forgotten.url]

    async def act(what):
        what(gone)

    engine._thread.run(act(members.forget))
    rounds = steady.asked["/model_info"]
    wait_until(lambda: steady.asked["/model_info"] >= rounds + 2, "the patrol has ended")
    hanging.hangs = True
    wait_until(lambda: engine.serving == [steady.url])
    for late in (
        members.forget,
        members.record_success,
        lambda one: members.lose(one, "late"),
        lambda one: members.drop(one, ""),
    ):
        engine._thread.run(act(late))
    engine._thread.run(act(lambda one: members.mark_published([one, *members.serving], "3")))
    assert engine.serving == [steady.url]


def test_patrol_that_ended_fails_the_run_instead_of_leaving_it_without_one(scripted, connect):
    engine = connect(scripted().url)

    async def fault():
        raise KeyError("a bug of ours")

    async def begin():
        engine.service.client.fleet.members.lasting(fault(), "the patrol of rollout servers")

    engine._thread.run(begin())
    wait_until(lambda: "the patrol of rollout servers has ended: KeyError" in str(engine.service.executor._fatal))


def test_watch_over_a_lost_server_begins_again_where_it_fails_by_a_bug_of_ours(scripted, connect, monkeypatch):
    failing, steady = scripted(), scripted()
    engine = connect([failing.url, steady.url])
    faults = [KeyError("a bug"), TypeError("another")]
    probe = client.ServerClient.probe

    async def odd_probe(self, *, timeout_s):
        if faults:
            raise faults.pop()
        return await probe(self, timeout_s=timeout_s)

    monkeypatch.setattr(client.ServerClient, "probe", odd_probe)
    failing.hang_up_on.add("/generate")
    assert [reply.result(LIMIT_S).output_len for reply in [start(engine, rid) for rid in "ab"]] == [2, 2]
    failing.hang_up_on.clear()
    wait_until_serving(engine, 2) and not faults


def test_event_loop_that_stands_still_blames_no_server(scripted, connect):
    async def slow(body):
        await until(may_answer.is_set)
        return counting(body)

    servers, may_answer = [scripted() for _ in range(2)], threading.Event()
    for server in servers:
        server.script.append(slow)
    patience_s = 0.2 * SLOWNESS
    engine = connect([server.url for server in servers], health_timeout_s=patience_s)
    replies = [start(engine, rid) for rid in "ab"]
    for _ in range(2):
        time.sleep(1.2 * patience_s)
        engine._thread.loop.call_soon_threadsafe(time.sleep, 2.5 * patience_s)
    may_answer.set()
    assert [reply.result(LIMIT_S).output_tokens for reply in replies] == [[2, 3]] * 2
    assert engine.metrics()["rollout/server_failures"] == 0
    assert [len(server.generations()) for server in servers] == [1, 1], "nothing was asked again"


# -- busy


@pytest.mark.parametrize("status", [408, 429])
def test_server_that_is_busy_is_asked_again_and_neither_blamed_nor_refused(scripted, connect, status):
    server = scripted()
    server.script.extend([lambda _: web.Response(status=status, headers={"Retry-After": "0"})] * 8)
    engine = connect(server.url)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(server_http, "LONGEST_BUSY_S", 0.05)
    monkey.setattr(server_http, "FIRST_BUSY_S", 0.01)
    try:
        assert ask(engine).output_tokens == [2, 3]
    finally:
        monkey.undo()
    assert engine.serving == [server.url] and len(server.generations()) == 9
    metrics = engine.metrics()
    assert (metrics["rollout/server_failures"], metrics["rollout/request_retries"]) == (0, 0)


def test_command_is_sent_again_where_the_server_is_busy(scripted, connect):
    server = scripted()
    engine = connect(server.url)
    server.refusals["/pause_generation"] = (429, {"error": "too many"})

    def recover(endpoint):
        if server.controls().count("/pause_generation") == 3:
            server.refusals.clear()

    server.on_call = recover
    update(engine, version=3)
    assert engine.serving == [server.url] and engine.get_version() == 3


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("2", 2.0), ("", 0.1), ("-5", 0.1), ("1e9", 0.1), ("99999999", 30.0), ("nan", 0.1), ("9" * 500, 0.1)]
    + [("Wed, 21 Oct 2015 07:28:00 GMT", 0.1), ("Wed, 21 Oct 9999 07:28:00 GMT", 30.0), ("soon", 0.1)],
)
def test_time_to_come_again_is_bounded(header, seconds):
    assert seconds_of(header) == seconds


# -- out of files


def test_process_that_is_out_of_files_waits_and_blames_no_server(scripted, connect, caplog):
    servers = [scripted(), scripted()]
    engine = connect([server.url for server in servers])
    ask(engine)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        replies = [start(engine, str(number)) for number in range(8)]
        wait_until(lambda: "wait until files are closed" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [reply.result(LIMIT_S).output_tokens for reply in replies] == [[2, 3]] * 8
    assert "wait until files are closed. Raise the limit" in caplog.text
    assert len(engine.serving) == 2 and engine.metrics()["rollout/server_failures"] == 0


def test_requests_wait_for_one_another_where_there_are_fewer_files_than_requests(scripted, connect, monkeypatch):
    running = most = 0

    async def count(body):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.02)  # others come meanwhile
        running -= 1
        return counting(body)

    server = scripted()
    server.script.extend([count] * 12)
    monkeypatch.setattr("megatron_rl.servers.pool.most_requests", lambda: 3)
    engine = connect(server.url)
    assert [reply.result(LIMIT_S).output_len for reply in [start(engine, str(n)) for n in range(12)]] == [2] * 12
    assert most == 3


def test_soft_limit_of_open_files_is_raised_to_the_hard_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = min(hard, 900) if hard != resource.RLIM_INFINITY else 900
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard))
        raised = open_files.raise_limit()
        assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (min(hard, 2**20) if hard > 0 else 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
