"""Writes one step as a Chrome trace for ui.perfetto.dev or chrome://tracing: trace/step-N.json.gz.

A trainer rank shows its phases, and rank 0 also weight publications. A rollout process shows episodes, replies with
their calls, and rewards. A server shows requests, control commands and pauses. Arrows lead from a call to the server's
request, and from a publication to each server's first request of that version.

Times are on the clock of rank 0's host. Processes of one host share CLOCK_MONOTONIC. A rank on another host compares
its clock just after a barrier. A server reports wall-clock times, and is assumed to share its client's clock unless a
call contradicts that (`clock_offset`).
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
"""Rows of a process in a trace, from top to bottom."""
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
    """One step's spans of a trainer rank, and of its rollout process if it has one."""

    rank: int
    host: str
    boot: str
    """Boot ID of the host's kernel. Processes with the same boot ID share a clock."""
    pid: int
    clock_s: float
    """Time on this rank's clock just after a barrier, which is the same moment on all ranks."""
    phases: list[Span]
    publications: list[Span] = field(default_factory=list)
    rollout: Recording | None = None


def write_trace(folder: Path, step: int, ranks: list[RankTrace]) -> Path:
    """Write a step's trace into a run's folder and return its path. The first of `ranks` must be rank 0."""
    path = folder / FOLDER / f"step-{step}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(gzip.compress(json.dumps(chrome_trace(step, ranks)).encode(), compresslevel=3))
    os.replace(unfinished, path)
    return path


def chrome_trace(step: int, ranks: list[RankTrace]) -> dict[str, Any]:
    """Build the trace as a Chrome Trace Event Format object. Times are microseconds from the first event."""
    picture = Picture()
    rollouts: list[tuple[str, str, list[Span]]] = []
    servers: dict[str, list[Span]] = defaultdict(list)
    left_out = 0
    for trace in ranks:
        # Compare boot ids: hosts may share a name, and containers of one host have different names.
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
    return picture.as_json({"step": step, "spans left out": left_out})


def moved(spans: list[Span], by_s: float) -> list[Span]:
    """Return copies of spans whose times are later by `by_s`, so that they are times of another clock.

    In the copies, spans in progress end at the latest time of all spans.
    """
    copies = copied(spans)
    last = max((span.begin_s if span.end_s is None else span.end_s for span in copies), default=0.0)
    for span in copies:
        if span.end_s is None:
            span.end_s, span.args["unfinished"] = last, True
        span.begin_s, span.end_s = span.begin_s + by_s, span.end_s + by_s
    return copies


# -- servers -----------------------------------------------------------------------------------------------------------


def server_requests(spans: list[Span], wall_minus_client_s: float) -> dict[str, list[Span]]:
    """Return {server URL: requests} that servers have reported for a client's calls. Times are on the client's clock.

    spans: the client's spans. wall_minus_client_s: offset from the client's clock to its wall clock.
    """
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
    """Return the offset from a server's wall clock to its client's clock, in seconds.

    Normally it is the offset from the client's own wall clock to the client's clock, `-wall_minus_client_s`. If a call
    contradicts this, the clocks are aligned at the middle of the call that spent the least time outside of the server,
    because it gives the most exact offset.
    """
    told = [call for call in calls if "request_received_ts" in call.args["timing"]]
    if not told:
        return -wall_minus_client_s
    call = min(told, key=on_the_way_s)
    timing = call.args["timing"]
    middle = timing["request_received_ts"] + timing["e2e_latency"] / 2
    offset = (call.begin_s + ended(call)) / 2 - middle
    is_contradicted = abs(offset + wall_minus_client_s) > max(0.0, on_the_way_s(call)) / 2
    return offset if is_contradicted else -wall_minus_client_s


def on_the_way_s(call: Span) -> float:
    """Return the seconds that a call spent outside of the server."""
    return ended(call) - call.begin_s - float(call.args["timing"]["e2e_latency"])


def ended(span: Span) -> float:
    assert span.end_s is not None, "`moved` has ended them all"
    return span.end_s


def request_spans(call: Span, offset_s: float) -> Iterator[Span]:
    """Yield the server's request that belongs to a call, and its parts queued, prefill and decode if they are reported.

    offset_s: offset from the server's clock to the client's.
    """
    timing, took = call.args["timing"], call.args["timing"]["e2e_latency"]
    if "request_received_ts" in timing:
        begin = timing["request_received_ts"] + offset_s
    else:  # draw it in the middle of its call
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
        # Servers round: clamp each part between the previous part's end and the request's end.
        end = min(max(end, since), took)
        yield Span(row="requests", name=name, begin_s=begin + since, end_s=begin + end, parent=request)
        since = end


def pauses(spans: list[Span]) -> Iterator[Span]:
    """Yield the pauses of a server. A pause begins with the pausing command and ends when the resuming one is answered.

    spans: the control commands sent to the server.
    """
    since = None
    for span in sorted(spans, key=lambda span: span.begin_s):
        if span.name == "/pause_generation" and since is None:
            since = span.begin_s
        elif span.name == "/continue_generation" and since is not None:
            yield Span(row="paused", name="paused", begin_s=since, end_s=span.end_s)
            since = None


# -- the picture -------------------------------------------------------------------------------------------------------


class Picture:
    """The events of a trace."""

    def __init__(self) -> None:
        self._place: dict[Span, tuple[int, int]] = {}
        """{span: (process ID, thread ID)} in the trace."""
        self._names: list[Event] = []
        self._numbers = itertools.count(1)
        """Counter for process IDs and thread IDs alike. A thread with its process's ID would count as main thread."""

    def add(self, process: str, label: str, spans: list[Span]) -> None:
        """Add a process with its spans. Spans of a row that overlap in time are put into several lanes (`lanes`)."""
        pid = next(self._numbers)
        self._name(pid, 0, "process", process)
        self._names.append({"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": label}})
        for row in ROWS:
            for number, lane in enumerate(lanes([span for span in spans if span.row == row])):
                tid = next(self._numbers)
                self._name(pid, tid, "thread", f"{row} {number + 1}" if number else row)
                self._place |= dict.fromkeys(lane, (pid, tid))

    def _arrows(self) -> Iterator[tuple[str, Span, Span]]:
        """Yield arrows as (kind, span where it begins, span where it ends).

        They lead from each call to its request, and from each publication to each server's first request of its
        version.
        """
        calls = {span.args["rid"]: span for span in self._place if "rid" in span.args}
        resumes = [span for span in self._place if (span.row, span.name) == ("publication", "resume")]
        published = {span.args["version"]: span for span in resumes}
        seen: set[tuple[int, Any]] = set()
        for request in sorted(self._place, key=lambda span: span.begin_s):
            if request.row != "requests" or request.parent is not None:
                continue
            yield "call", calls[request.name], request
            version = request.args["version"]
            first_use = self._place[request][0], version
            if version in published and first_use not in seen:
                yield "weights", published[version], request
            seen.add(first_use)

    def as_json(self, about: dict[str, Any]) -> dict[str, Any]:
        zero = min((span.begin_s for span in self._place), default=0.0)
        events = list(self._names)
        for span, (pid, tid) in self._place.items():
            # Round both ends rather than the duration: a child must not end after a parent that ends with it.
            begin, end = nanoseconds(span.begin_s - zero), nanoseconds(ended(span) - zero)
            args = {key: value for key, value in span.args.items() if key != "timing"}
            event = {"ph": "X", "name": span.name, "cat": span.row, "ts": begin / 1000, "dur": (end - begin) / 1000}
            events.append(event | {"pid": pid, "tid": tid, "args": args})
        for number, (kind, source, target) in enumerate(self._arrows()):
            # bp: the arrow ends at the enclosing span, not at the next one that begins.
            for span, end_of_arrow in ((source, {"ph": "s"}), (target, {"ph": "f", "bp": "e"})):
                pid, tid = self._place[span]
                event = {"name": kind, "cat": kind, "id": number, "ts": nanoseconds(span.begin_s - zero) / 1000}
                events.append(event | {"pid": pid, "tid": tid} | end_of_arrow)
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}

    def _name(self, pid: int, tid: int, kind: str, name: str) -> None:
        for key, args in ((f"{kind}_name", {"name": name}), (f"{kind}_sort_index", {"sort_index": tid or pid})):
            self._names.append({"ph": "M", "name": key, "pid": pid, "tid": tid, "args": args})


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def lanes(spans: list[Span]) -> list[list[Span]]:
    """Distribute a row's spans over lanes, and return the spans of each lane.

    In a lane, no spans overlap in time except for a parent and its children.
    """
    dealt: list[list[Span]] = []
    busy: list[tuple[float, int]] = []
    """Heap of (end time, lane number) of the occupied lanes."""
    free: list[int] = []
    lane_of: dict[Span, int] = {}
    # Of spans that begin together, sort the longest first, then ancestors, so that parents precede their children.
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
