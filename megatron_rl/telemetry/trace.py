"""One step as a Chrome trace, which ui.perfetto.dev and chrome://tracing show: trace/step-N.json.gz.

A process of the trace is a trainer rank (its phases; on rank 0 also publications), a rollout process (episodes, replies
with the calls for them, rewards) or a server (its requests, the control commands to it, its pauses). Arrows lead from a
call to what the server made of it, and from a publication to each server's first request of that version.

Time is that of rank 0's host. Processes of one host share CLOCK_MONOTONIC. The clock of another host's rank is compared
just after a barrier. A server tells wall-clock times: its clock is that of its client unless a call's time contradicts
it, and is then set by the middle of the call that spent the least time on the way (`clock_offset`). A server that tells
only how long a request took has it shown in the middle of its call.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.telemetry.spans import Span, copied

FOLDER = "trace"
ROWS = ("phases", "publication", "gathering", "episodes", "replies", "rewards", "paused", "control", "requests")
"""From top to bottom within a process."""
Event = dict[str, Any]


@dataclass(kw_only=True)
class Recording:
    """The spans of one rollout process."""

    pid: int
    wall_minus_monotonic_s: float
    spans: list[Span]
    left_out: int = 0


@dataclass(kw_only=True)
class RankTrace:
    """The spans of one trainer rank, and of its rollout process if it has one, in a step."""

    rank: int
    host: str
    boot: str
    """Of the host's kernel: processes that have it in common share a clock."""
    pid: int
    clock_s: float
    """Its clock at a moment that is the same on all ranks."""
    phases: list[Span]
    publications: list[Span] = field(default_factory=list)
    """With the version that was published in `args`."""
    rollout: Recording | None = None


def write_trace(folder: Path, step: int, ranks: list[RankTrace]) -> Path:
    """Write the trace of a step into a run's folder, rank 0 first among `ranks`; return its path."""
    path = folder / FOLDER / f"step-{step}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(gzip.compress(json.dumps(chrome_trace(step, ranks)).encode(), compresslevel=3))
    os.replace(unfinished, path)
    return path


def chrome_trace(step: int, ranks: list[RankTrace]) -> dict[str, Any]:
    """Return the trace as the JSON object of the Chrome Trace Event Format; times in microseconds from its first."""
    picture = Picture()
    rollouts: list[tuple[str, str, list[Span]]] = []
    servers: dict[str, list[Span]] = defaultdict(list)
    left_out = 0
    for trace in ranks:
        # Hosts of one name may differ, and containers of one host have other names: the boot says which clock it is.
        offset = 0.0 if trace.boot == ranks[0].boot else ranks[0].clock_s - trace.clock_s
        own = moved(trace.phases + trace.publications, offset)
        picture.add(f"rank {trace.rank}", f"{trace.host}, pid {trace.pid}", own)
        if (recording := trace.rollout) is None:
            continue
        spans, left_out = moved(recording.spans, offset), left_out + recording.left_out
        label = f"{trace.host}, pid {recording.pid}"
        rollouts.append((f"rollouts of rank {trace.rank}", label, [span for span in spans if not span.place]))
        for span in spans:
            if span.place:
                servers[span.place].append(span)
        for url, requests in server_requests(spans, recording.wall_minus_monotonic_s - offset).items():
            servers[url] += requests
    for process in rollouts:
        picture.add(*process)
    for url, spans in sorted(servers.items()):
        picture.add(f"server {url}", "rollout server", [*spans, *pauses(spans)])
    picture.add_arrows()
    return picture.as_json({"step": step, "spans left out": left_out})


def moved(spans: list[Span], by_s: float) -> list[Span]:
    """Return copies on another clock; those under way end with the last of all."""
    copies = copied(spans)
    last = max((span.begin_s if span.end_s is None else span.end_s for span in copies), default=0.0)
    for span in copies:
        if span.end_s is None:
            span.end_s, span.args["unfinished"] = last, True
        span.begin_s, span.end_s = span.begin_s + by_s, span.end_s + by_s
    return copies


# -- servers -----------------------------------------------------------------------------------------------------------


def server_requests(spans: list[Span], wall_minus_client_s: float) -> dict[str, list[Span]]:
    """Return, by server, what it says of the calls among a client's spans, on the client's clock."""
    calls: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if "e2e_latency" in span.args.get("timing", {}):
            calls[span.args["server"]].append(span)
    found: dict[str, list[Span]] = {}
    for url, answered in calls.items():
        offset_s = clock_offset(answered, wall_minus_client_s)
        found[url] = [part for call in answered for part in request_spans(call, offset_s)]
    return found


def clock_offset(calls: list[Span], wall_minus_client_s: float) -> float:
    """Return what to add to a server's wall-clock times to have them on the clock of its client, whose calls these are.

    That is the client's own difference where the calls do not contradict it.
    """
    told = [call for call in calls if "request_received_ts" in call.args["timing"]]
    if not told:
        return -wall_minus_client_s
    # The call with the least time on the way leaves the least room for error in where its middle was.
    call = min(told, key=on_the_way_s)
    timing = call.args["timing"]
    middle = timing["request_received_ts"] + timing["e2e_latency"] / 2
    offset = (call.begin_s + ended(call)) / 2 - middle
    is_contradicted = abs(offset + wall_minus_client_s) > max(0.0, on_the_way_s(call)) / 2
    return offset if is_contradicted else -wall_minus_client_s


def on_the_way_s(call: Span) -> float:
    """The part of a call's time in which the server did not have it."""
    return ended(call) - call.begin_s - float(call.args["timing"]["e2e_latency"])


def ended(span: Span) -> float:
    assert span.end_s is not None, "`moved` has ended them all"
    return span.end_s


def request_spans(call: Span, offset_s: float) -> Iterator[Span]:
    """Yield a server's request and its parts: queued, prefill and decode where the server tells them apart."""
    timing, took = call.args["timing"], call.args["timing"]["e2e_latency"]
    if "request_received_ts" in timing:
        begin = timing["request_received_ts"] + offset_s
    else:
        begin = (call.begin_s + ended(call) - took) / 2
    shown = ("version", "tokens", "cached_tokens", "stop_reason")
    args = {key: call.args[key] for key in shown if key in call.args}
    request = Span(row="requests", name=call.args["rid"], begin_s=begin, end_s=begin + took, args=args)
    yield request
    ends = {"queued": timing.get("queue_time"), "prefill": timing.get("first_token_latency"), "decode": took}
    if None in ends.values():
        return
    since = 0.0
    for name, end in ends.items():
        # Servers round: no part begins before the last one ended, or ends after the request.
        end = min(max(end, since), took)
        yield Span(row="requests", name=name, begin_s=begin + since, end_s=begin + end, parent=request)
        since = end


def pauses(spans: list[Span]) -> Iterator[Span]:
    """Yield when a server stood still: from the command that paused it to the answer to the one that let it go on."""
    since = None
    for span in sorted(spans, key=lambda span: span.begin_s):
        if span.name == "/pause_generation" and since is None:
            since = span.begin_s
        elif span.name == "/continue_generation" and since is not None:
            yield Span(row="paused", name="paused", begin_s=since, end_s=span.end_s)
            since = None


# -- the picture -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A span and where it is drawn."""

    span: Span
    pid: int
    tid: int


class Picture:
    """The events of a trace."""

    def __init__(self) -> None:
        self._drawn: list[Drawn] = []
        self._arrows: list[tuple[str, Drawn, Drawn]] = []
        self._names: list[Event] = []
        self._numbers = itertools.count(1)
        """Of processes and threads; a number that both had would be taken for a main thread."""

    def add(self, process: str, label: str, spans: list[Span]) -> None:
        """Add a process: a row of it has as many lanes as spans lie beside each other; a child is on its parent's."""
        pid = next(self._numbers)
        self._name(pid, 0, "process", process)
        self._names.append({"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": label}})
        for row in ROWS:
            for number, lane in enumerate(lanes([span for span in spans if span.row == row])):
                tid = next(self._numbers)
                self._name(pid, tid, "thread", f"{row} {number + 1}" if number else row)
                self._drawn += [Drawn(span, pid, tid) for span in lane]

    def add_arrows(self) -> None:
        """From each call to what the server made of it, and from publications to each server's first use of them."""
        calls = {drawn.span.args["rid"]: drawn for drawn in self._drawn if "rid" in drawn.span.args}
        published = {
            drawn.span.args["version"]: drawn
            for drawn in self._drawn
            if (drawn.span.row, drawn.span.name) == ("publication", "resume")
        }
        seen: set[tuple[int, Any]] = set()
        for request in sorted(self._drawn, key=lambda drawn: drawn.span.begin_s):
            if request.span.row != "requests" or request.span.parent is not None:
                continue
            self._arrows.append(("call", calls[request.span.name], request))
            version = request.span.args["version"]
            if version in published and (request.pid, version) not in seen:
                self._arrows.append(("weights", published[version], request))
            seen.add((request.pid, version))

    def as_json(self, about: dict[str, Any]) -> dict[str, Any]:
        zero = min((drawn.span.begin_s for drawn in self._drawn), default=0.0)
        events = list(self._names)
        for drawn in self._drawn:
            span = drawn.span
            # Both ends are rounded, and not the duration: a child that ends with its parent must not end behind it.
            begin, end = nanoseconds(span.begin_s - zero), nanoseconds(ended(span) - zero)
            args = {key: value for key, value in span.args.items() if key != "timing"}
            event = {"ph": "X", "name": span.name, "cat": span.row, "ts": begin / 1000, "dur": (end - begin) / 1000}
            events.append(event | {"pid": drawn.pid, "tid": drawn.tid, "args": args})
        for number, (kind, source, target) in enumerate(self._arrows):
            for ph, at in (("s", source), ("f", target)):
                ts = nanoseconds(at.span.begin_s - zero) / 1000
                event = {"ph": ph, "name": kind, "cat": kind, "id": number, "ts": ts}
                # bp: the arrow ends at the span around this moment, and not at the next one that begins.
                events.append(event | {"pid": at.pid, "tid": at.tid} | ({"bp": "e"} if ph == "f" else {}))
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}

    def _name(self, pid: int, tid: int, kind: str, name: str) -> None:
        for key, args in ((f"{kind}_name", {"name": name}), (f"{kind}_sort_index", {"sort_index": tid or pid})):
            self._names.append({"ph": "M", "name": key, "pid": pid, "tid": tid, "args": args})


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def lanes(spans: list[Span]) -> list[list[Span]]:
    """Deal the spans of a row out so that no two of a lane overlap but a parent and its child."""
    dealt: list[list[Span]] = []
    busy: list[tuple[float, int]] = []
    """(until when, lane)."""
    free: list[int] = []
    lane_of: dict[Span, int] = {}
    # Of those that begin together the longest first, then the ancestor: a parent comes before its children.
    for span in sorted(spans, key=lambda span: (span.begin_s, -ended(span), sum(1 for _ in span.ancestors))):
        if span.parent in lane_of:
            lane = lane_of[span.parent]
        else:
            while busy and busy[0][0] <= span.begin_s:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                dealt.append([])
                free.append(len(dealt) - 1)
            lane = heapq.heappop(free)
            heapq.heappush(busy, (ended(span), lane))
        lane_of[span] = lane
        dealt[lane].append(span)
    return dealt
