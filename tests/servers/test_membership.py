"""Who gets requests and who takes part in publications, with scripted servers: every way to fail and to come back."""

import asyncio
from concurrent.futures import wait
from unittest.mock import Mock

import pytest

from megatron_rl.api import NoServerLeft
from megatron_rl.servers.membership import Membership
from megatron_rl.servers.server_http import CommandRefused, ServerError
from tests.kit.client_calls import ask, finish, load, start, update, wait_until_selected, wait_until_serving
from tests.kit.scripted_server import counting, never, overloaded
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until

pytestmark = pytest.mark.usefixtures("quick_looks")
NOTHING_S = 0.1
"""For how long a test watches that nothing happens; on a slow machine it watches less."""


def test_server_that_failed_serves_again_once_it_answers_with_the_weights_it_had(scripted, connect):
    flaky, steady = scripted(), scripted()
    engine = connect([flaky.url, steady.url])
    before = engine.membership
    flaky.script.append(overloaded)
    ask(engine)
    wait_until_serving(engine, 2)
    # It is the same process, in the same weight group.
    engine.select_servers()
    assert engine.membership == before
    metrics = engine.metrics()
    assert (metrics["rollout/server_failures"], metrics["rollout/servers"]) == (1, 2)


def test_restarted_server_gets_nothing_before_it_was_published_to(scripted, connect):
    restarted, steady = scripted(), scripted()
    engine = connect([restarted.url, steady.url])
    restarted.script.append(overloaded)
    restarted.weight_version = "none"
    ask(engine)
    sent = len(restarted.generations())
    # It answers well all the time, with weights that nobody trained.
    restarted.wait_for_looks()
    for rid in ("a", "b", "c", "d"):
        ask(engine, rid=rid)
    assert len(restarted.generations()) == sent and engine.serving == [steady.url]
    wait_until_selected(engine, 2)
    update(engine, version=3)
    assert sorted(engine.serving) == sorted([restarted.url, steady.url])
    assert "/update_weights_from_distributed" in restarted.controls()
    assert ask(engine, rid="e").output_versions == [3, 3]


def test_last_server_that_was_restarted_makes_the_trainer_publish_again(scripted, connect):
    server = scripted()
    engine = connect(server.url)
    assert not engine.needs_weights
    server.script.append(overloaded)
    server.weight_version = "none"
    waiting = start(engine)
    wait_until(lambda: engine.needs_weights)
    assert not waiting.done()
    engine.select_servers()
    update(engine, version=0)
    assert waiting.result(LIMIT_S).output_tokens == [2, 3]
    assert not engine.needs_weights


def test_time_without_a_server_does_not_count_towards_the_deadline_of_a_reply(scripted, connect):
    server = scripted()
    engine = connect(server.url, request_timeout_s=LATE_S, start_timeout_s=10 * LATE_S)
    server.script.append(overloaded)
    server.weight_version = "none"
    loop, passed = engine._thread.loop, [0.0]
    clock = loop.time
    loop.time = lambda: clock() + passed[0]
    waiting = start(engine)
    wait_until(lambda: engine.service.client.fleet.members._some_serve._waiters, "it waits for no server")
    passed[0] = 2 * LATE_S
    server.wait_for_looks()
    assert not waiting.done()
    engine.select_servers()
    update(engine)
    assert waiting.result(LIMIT_S).output_tokens == [2, 3]


def test_dropped_server_is_left_out_and_its_replies_move(scripted, connect):
    dropped = []
    good, bad = scripted(), scripted()
    engine = connect([good.url, bad.url], on_drop=lambda url, reason: dropped.append((url, reason)))

    bad.script.append(never)
    replies = [start(engine, rid) for rid in "ab"]
    wait_until(lambda: len(bad.generations()) == 1)
    membership = engine.membership
    engine.pause()
    engine.drop(bad.url, "its weights are wrong")
    assert dropped == [(bad.url, "its weights are wrong")]
    # The publisher sees by this number that the weight group no longer fits.
    assert engine.membership > membership and list(engine.server_ranks) == [good.url]
    engine.begin_weight_update(2)
    load(engine, 2)
    finish(engine, 2)
    assert (engine.serving, engine.get_version()) == ([good.url], 2)
    assert [reply.result(LIMIT_S).output_tokens for reply in replies] == [[2, 3], [2, 3]]
    assert "/update_weights_from_distributed" not in bad.controls()
    # At the next publication it has another chance.
    wait_until_selected(engine, 2)
    update(engine, version=3)
    assert sorted(engine.serving) == sorted([good.url, bad.url])


def test_server_that_refuses_alone_is_dropped_and_where_all_refuse_nobody_is(scripted, connect):
    servers = [scripted(), scripted()]
    engine = connect([server.url for server in servers])
    refusal = (400, {"success": False, "message": "already open"})
    for server in servers:
        server.refusals["/begin_weight_update"] = refusal
    membership = engine.membership
    with pytest.raises(ServerError, match=f"{servers[0].url}/begin_weight_update: .*already open"):
        engine.begin_weight_update(2)
    assert (engine.membership, len(engine.server_ranks)) == (membership, 2)
    del servers[0].refusals["/begin_weight_update"]
    engine.begin_weight_update(2)
    assert list(engine.server_ranks) == [servers[0].url]


def test_server_that_failed_a_publication_is_not_asked_again_in_it_while_another_is_left(scripted, connect):
    good, bad = scripted(), scripted()
    engine = connect([good.url, bad.url])
    engine.drop(bad.url, "its weights are wrong")
    bad.wait_for_looks()  # it answers meanwhile
    engine.select_servers()
    assert list(engine.server_ranks) == [good.url]
    engine.drop(good.url, "so are its")
    # Now there is nobody else.
    wait_until_selected(engine, 2)


def test_server_that_a_publication_passes_by_while_it_is_looked_at_does_not_come_back_with_older_weights(
    scripted, connect
):
    late, steady = scripted(), scripted()
    engine = connect([late.url, steady.url])

    def hang(body):
        late.scheduler_hangs = True
        return overloaded(body)

    late.script.append(hang)
    ask(engine)
    # It has named the weights that it had.
    wait_until(lambda: late.asked["/health_generate"], "it is not asked whether it generates")
    engine.select_servers()
    update(engine, version=3)
    late.scheduler_hangs = False
    late.wait_for_looks()
    assert engine.serving == [steady.url]
    wait_until_selected(engine, 2)


def test_redirect_of_a_command_is_not_taken_for_its_success(scripted, connect):
    server = scripted()
    engine = connect(server.url)
    server.refusals["/pause_generation"] = (302, {})
    with pytest.raises(NoServerLeft, match=f"{server.url}/pause_generation: HTTP 302"):
        update(engine)


def test_a_refusal_is_reported_and_not_the_failure_of_a_server_that_is_dropped(scripted, connect):
    broken, refusing = scripted(), scripted()
    engine = connect([broken.url, refusing.url])
    broken.refusals["/pause_generation"] = (302, {})
    refusing.refusals["/pause_generation"] = (400, {"success": False, "message": "no such mode"})
    with pytest.raises(CommandRefused, match=f"{refusing.url}/pause_generation: .*no such mode"):
        update(engine)
    assert list(engine.server_ranks) == [refusing.url]


def test_nothing_is_sent_to_servers_with_a_part_of_the_weights(scripted, connect):
    server = scripted()
    engine = connect(server.url)
    server.refusals["/update_weights_from_distributed"] = (400, {"success": False, "message": "unknown tensor w"})
    with pytest.raises(ServerError):
        update(engine)
    engine.end_weight_update(2)
    engine.resume()  # as a publisher does that gives up
    # What it was generating would go on with those weights.
    assert server.controls()[-2:] == ["/abort_request", "/continue_generation"]
    waiting = start(engine)
    wait([waiting], NOTHING_S)
    assert server.generations() == [] and not waiting.done()
    server.refusals.clear()
    update(engine)
    assert waiting.result(LIMIT_S).output_len == 2


def test_a_server_that_dies_between_publications_is_noticed_by_the_pause(scripted, connect):
    dead, living = scripted(), scripted()
    engine = connect([dead.url, living.url])
    dead.hang_up_on.add("/pause_generation")
    update(engine)
    assert (engine.serving, list(engine.server_ranks)) == ([living.url], [living.url])


def test_server_that_hangs_loses_its_replies_to_others(scripted, connect):
    hanging, steady = scripted(), scripted()

    def hang(body):
        hanging.hangs = True
        return never(body)

    hanging.script.append(hang)
    engine = connect([hanging.url, steady.url], health_timeout_s=0.3)
    assert ask(engine).output_tokens == [2, 3]
    # The other one may have been slow to answer for a moment.
    wait_until(lambda: engine.serving == [steady.url])
    assert len(hanging.generations()) == 1


def test_only_server_that_dies_in_a_publication_makes_it_start_again_instead_of_ending_the_run(scripted, connect):
    server = scripted()
    engine = connect(server.url)
    server.hang_up_on.add("/pause_generation")
    with pytest.raises(NoServerLeft, match=f"{server.url}/pause_generation"):
        update(engine)
    server.hang_up_on.clear()
    engine.select_servers()
    update(engine)
    assert engine.serving == [server.url]


def test_what_a_killed_trainer_left_behind_does_not_stop_the_next_one(scripted, connect):
    server = scripted()
    # SGLang is not healthy while it is paused, and refuses a second session.
    server.refusals["/health"] = (503, {})
    server.refusals["/begin_weight_update"] = (400, {"success": False, "message": "already open"})

    server.on_call = lambda endpoint: {
        "/continue_generation": lambda: server.refusals.pop("/health", None),
        "/end_weight_update": lambda: server.refusals.pop("/begin_weight_update", None),
    }.get(endpoint, lambda: None)()
    engine = connect(server.url)
    update(engine, version=3)
    assert ask(engine).output_versions == [3, 3]


def test_other_ranks_follow_the_one_that_published(scripted, connect):
    left_out, good = scripted(), scripted()
    engine = connect([left_out.url, good.url])
    engine.mark_published([good.url], 7)
    assert (engine.serving, engine.get_version()) == ([good.url], 7)
    # Whatever it says, only a later publication brings it back: it has the weights of the time before, or claims more.
    for name in ("default", "7"):
        left_out.weight_version = name
        left_out.wait_for_looks()
        assert engine.serving == [good.url]
    engine.mark_published([good.url, left_out.url], 8)
    assert sorted(engine.serving) == sorted([good.url, left_out.url])


def test_version_is_the_live_one_and_not_that_of_the_start(scripted, connect):
    # /server_info of SGLang keeps the version of the start; a server that was published to would look restarted.
    server = scripted(info={"weight_version": "default"})
    engine = connect(server.url)
    update(engine, version=4)
    assert server.weight_version == "4"
    server.script.append(overloaded)
    assert ask(engine).output_tokens == [2, 3]


def test_aborted_request_of_a_dropped_server_is_not_mistaken_for_a_reply(scripted, connect):
    # A queued request that SGLang aborts comes without prompt_tokens and the like.
    server = scripted()
    aborted = {"id": "x", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    server.script.append(lambda _: {"text": "", "output_ids": [], "meta_info": aborted})
    server.script.append(lambda body: counting(body))
    reply = ask(connect(server.url))
    assert (reply.output_tokens, reply.interruptions) == ([2, 3], 1)


def test_a_watcher_ends_when_it_is_cancelled_also_if_a_fault_takes_the_place_of_the_cancellation():
    class Looking(Membership):
        async def _look_after(self, member):
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                raise KeyError("a fault while it stops") from None

    async def main():
        members = Looking([], catch_up=None)
        members.add(server := Mock(url="http://server"))
        watcher = members._members[server].watcher
        await asyncio.sleep(0)
        watcher.cancel()
        await asyncio.wait([watcher], timeout=LATE_S)
        assert watcher.cancelled()

    asyncio.run(main())
