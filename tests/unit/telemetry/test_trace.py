"""A step's trace from known spans: where each is drawn, on which clock, and what leads to what."""

import pytest

from megatron_rl.telemetry.spans import Span
from megatron_rl.telemetry.trace import RankTrace, Recording, chrome_trace, write_trace
from tests.chrome_trace import parse_trace, read_trace

SERVER = "http://n1:30000"
WALL_S = 1e9
"""Of the host, less its monotonic clock."""


def phase(name, begin, end, parent=None):
    return Span(row="phases", name=name, begin_s=begin, end_s=end, parent=parent)


def rank(number=0, *, boot="a", clock_s=50.0, phases=(), publications=(), spans=None, left_out=0):
    recording = None
    if spans is not None:
        recording = Recording(pid=7, wall_minus_monotonic_s=WALL_S, spans=spans, left_out=left_out)
    return RankTrace(
        rank=number,
        host=f"n{number}",
        boot=boot,
        pid=100 + number,
        clock_s=clock_s,
        phases=list(phases),
        publications=list(publications),
        rollout=recording,
    )


def call(begin, end, rid="r-1", *, version=3, parent=None, server=SERVER, **timing):
    args = {"server": server, "rid": rid, "version": version, "tokens": 5, "timing": timing}
    return Span(row="replies", name="generate", begin_s=begin, end_s=end, parent=parent, args=args)


def told(came, took, *, queued=0.0, first=0.0):
    """What an embedded server says of a request that came at `came` on its own monotonic clock."""
    return {
        "request_received_ts": came + WALL_S,
        "queue_time": queued,
        "first_token_latency": first,
        "e2e_latency": took,
    }


def milliseconds(found, zero):
    return round((found.begin - zero) / 1e6, 3), round((found.end - zero) / 1e6, 3)


def test_nested_phases_are_drawn_as_the_timers_saw_them():
    outer = phase("update", 12.0, 15.0)
    trace = parse_trace(
        chrome_trace(3, [rank(phases=[phase("rollout", 10.0, 12.0), phase("exchange", 13.0, 14.0, outer), outer])])
    )
    assert [(one.name, one.own) for one in trace.of("rank 0", "phases")] == [
        ("rollout", 2 * 10**9),
        ("update", 2 * 10**9),
        ("exchange", 10**9),
    ]


def test_spans_beside_each_other_get_lanes_and_a_lane_is_used_again():
    spans = [
        Span(row="episodes", name=name, begin_s=b, end_s=e) for name, b, e in [("a", 0, 4), ("b", 1, 3), ("c", 3, 5)]
    ]
    spans += [Span(row="episodes", name="d", begin_s=4.0, end_s=6.0)]
    trace = parse_trace(chrome_trace(0, [rank(spans=spans)]))
    lanes = {one.name: one.lane for one in trace.slices}
    assert lanes["a"] == lanes["d"] != lanes["b"] == lanes["c"]


def test_calls_are_on_the_lane_of_their_reply_however_many_there_are():
    replies = [Span(row="replies", name=f"reply {n}", begin_s=1.0, end_s=4.0) for n in range(3)]
    calls = [
        call(1.0 + n, 2.0 + n, rid=f"r-{m}-{n}", parent=reply) for m, reply in enumerate(replies) for n in range(3)
    ]
    trace = parse_trace(chrome_trace(0, [rank(spans=[*calls, *replies])]))
    drawn = trace.of("rollouts", "replies")
    assert len({one.lane for one in drawn}) == 3
    assert [one.parent.name for one in drawn if one.name == "generate"] == [
        f"reply {n}" for n in (0, 0, 0, 1, 1, 1, 2, 2, 2)
    ]


def test_a_server_of_the_same_host_is_drawn_by_its_own_times():
    # It has the request in the last third of the call: the first two were spent on the way to it.
    spans = [call(10.0, 10.9, **told(10.6, 0.3, queued=0.1, first=0.15))]
    trace = parse_trace(chrome_trace(0, [rank(spans=spans)]))
    zero = trace.of("rollouts", "replies")[0].begin
    parts = {one.name: milliseconds(one, zero) for one in trace.of(f"server {SERVER}", "requests")}
    assert parts == {"r-1": (600, 900), "queued": (600, 700), "prefill": (700, 750), "decode": (750, 900)}


def test_a_server_whose_clock_is_off_is_set_by_the_call_with_the_least_time_on_the_way():
    off = 1000.0
    # The second call spent 0.02 s on the way, the first 1.0 s and nearly all of it before the server had it.
    spans = [
        call(10.0, 12.0, rid="slow", **told(10.95 + off, 1.0, queued=0.0, first=0.1)),
        call(13.0, 14.02, rid="quick", **told(13.01 + off, 1.0, queued=0.0, first=0.1)),
    ]
    trace = parse_trace(chrome_trace(0, [rank(spans=spans)]))
    zero = min(one.begin for one in trace.slices)
    requests = {one.name: milliseconds(one, zero) for one in trace.of("server", "requests") if one.parent is None}
    assert requests == {"slow": (950, 1950), "quick": (3010, 4010)}


def test_a_server_that_says_only_how_long_it_took_is_shown_in_the_middle_of_the_call():
    trace = parse_trace(chrome_trace(0, [rank(spans=[call(10.0, 11.0, e2e_latency=0.6)])]))
    (request,) = trace.of("server", "requests")
    assert milliseconds(request, trace.of("rollouts", "replies")[0].begin) == (200, 800)


def test_ranks_of_other_hosts_are_brought_to_the_first_ones_clock_with_their_rollouts_and_servers():
    here = rank(0, phases=[phase("rollout", 40.0, 41.0)], spans=[])
    same = rank(1, clock_s=50.4, phases=[phase("rollout", 40.0, 41.0)])
    away = rank(
        2,
        boot="b",
        clock_s=1050.0,
        phases=[phase("rollout", 1040.0, 1041.0)],
        spans=[call(1040.2, 1040.6, **told(1040.3, 0.2))],
    )
    trace = parse_trace(chrome_trace(0, [here, same, away]))
    phases = [trace.of(f"rank {number}", "phases")[0] for number in (0, 1, 2)]
    assert len({(one.begin, one.end) for one in phases}) == 1, "one host has one clock, whenever it was read"
    zero = phases[0].begin
    assert milliseconds(trace.of("rollouts of rank 2", "replies")[0], zero) == (200, 600)
    assert milliseconds(trace.of("server", "requests")[0], zero) == (300, 500)


def test_arrows_lead_from_calls_to_requests_and_from_a_publication_to_the_first_of_its_version():
    published = Span(row="publication", name="resume", begin_s=9.0, end_s=9.1, args={"version": 3})
    spans = [call(10.0 + n, 10.5 + n, rid=f"r-{n}", **told(10.1 + n, 0.3)) for n in range(3)]
    spans += [call(10.0, 10.5, rid="old", version=2, **told(10.1, 0.3))]
    trace = parse_trace(chrome_trace(0, [rank(publications=[published], spans=spans)]))
    calls = [(source.args["rid"], target.name) for kind, source, target in trace.arrows if kind == "call"]
    assert sorted(calls) == [(rid, rid) for rid in ("old", "r-0", "r-1", "r-2")]
    assert [(a.name, b.name) for kind, a, b in trace.arrows if kind == "weights"] == [("resume", "r-0")]


def test_a_server_stands_still_from_the_pause_to_the_answer_that_ends_it():
    names = [
        ("/pause_generation", 1.0, 1.2),
        ("/update_weights_from_tensor", 1.3, 1.5),
        ("/continue_generation", 1.6, 1.8),
    ]
    spans = [Span(row="control", name=name, begin_s=b, end_s=e, place=SERVER) for name, b, e in names]
    trace = parse_trace(chrome_trace(0, [rank(spans=spans)]))
    (paused,) = trace.of(f"server {SERVER}", "paused")
    assert paused.end - paused.begin == 800_000_000
    assert len(trace.of(f"server {SERVER}", "control")) == 3 and trace.of("rollouts", "control") == []


def test_what_is_under_way_is_drawn_to_the_end_and_what_is_left_out_is_counted(tmp_path):
    spans = [
        Span(row="episodes", name="done", begin_s=1.0, end_s=3.0),
        Span(row="episodes", name="long", begin_s=2.0),
    ]
    path = write_trace(tmp_path, 4, [rank(spans=spans, left_out=5)])
    assert path == tmp_path / "trace" / "step-4.json.gz" and [path] == list(path.parent.iterdir())
    done, long = read_trace(path).of("rollouts", "episodes")
    assert long.end == done.end and long.args["unfinished"] is True
    assert chrome_trace(4, [rank(spans=spans, left_out=5)])["otherData"] == {"step": 4, "spans left out": 5}


@pytest.mark.parametrize("begin", [0.1, 1e6 / 3, 7e8 / 9])
def test_children_lie_within_their_parents_however_the_clock_rounds(begin):
    reply, late = Span(row="replies", name="reply", begin_s=begin, end_s=begin + 0.3), 1e-5
    spans = [
        reply,
        call(begin, begin + 0.1, rid="a", parent=reply, **told(begin + late, 0.099, queued=0.1 / 3, first=0.2 / 3)),
    ]
    spans += [
        call(begin + 0.1, begin + 0.3, rid="b", parent=reply, **told(begin + 0.1 + late, 0.199, queued=0.2, first=0.2))
    ]
    trace = parse_trace(chrome_trace(0, [rank(spans=spans)]))  # which raises where they do not
    assert len(trace.of("server", "requests")) == 8
