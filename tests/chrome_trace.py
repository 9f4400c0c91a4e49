"""Reads a Chrome trace by the documented rules of its format; breaking one is an AssertionError.

The rules are those of "Trace Event Format" (Google), for the kinds of events that are used here: M, X, s and f.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = {"process_name": "name", "process_labels": "labels", "process_sort_index": "sort_index"}
NAMES |= {"thread_name": "name", "thread_sort_index": "sort_index"}


@dataclass(eq=False)
class Slice:
    """An X event; times in nanoseconds."""

    name: str
    row: str
    process: str
    lane: tuple[int, int]
    begin: int
    end: int
    args: dict[str, Any]
    parent: Slice | None = None
    children: list[Slice] = field(default_factory=list)

    @property
    def own(self) -> int:
        """Its time without that of its children."""
        return self.end - self.begin - sum(child.end - child.begin for child in self.children)


@dataclass
class ChromeTrace:
    slices: list[Slice]
    arrows: list[tuple[str, Slice, Slice]]

    def of(self, process: str, row: str) -> list[Slice]:
        return [found for found in self.slices if found.process.startswith(process) and found.row == row]

    @property
    def processes(self) -> list[str]:
        return sorted({found.process for found in self.slices})


def read_trace(path: Path) -> ChromeTrace:
    return parse_trace(json.loads(gzip.decompress(path.read_bytes())))


def parse_trace(trace: dict[str, Any]) -> ChromeTrace:
    """Check each event and that slices of one lane nest; bind arrows to the slices that they lead from and to."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    trace = json.loads(json.dumps(trace, allow_nan=False))
    processes: dict[int, str] = {}
    slices, ends = [], {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXsf" and isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        if event["ph"] == "M":
            assert set(event["args"]) == {NAMES[event["name"]]}, event
            if event["name"] == "process_name":
                assert event["pid"] not in processes, "two processes share a number"
                processes[event["pid"]] = event["args"]["name"]
            continue
        assert isinstance(event["name"], str) and isinstance(event["cat"], str) and event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["args"], dict), event
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            lane = event["pid"], event["tid"]
            row, process = event["cat"], processes[event["pid"]]
            slices.append(Slice(event["name"], row, process, lane, begin, begin + length, event["args"]))
        else:
            assert event["ph"] == "s" or event["bp"] == "e", "an arrow leads to the slice that encloses its end"
            pair = ends.setdefault((event["cat"], event["name"], event["id"]), {})
            assert event["ph"] not in pair, f"two arrows share the id {event['id']}"
            pair[event["ph"]] = event
    nest(slices)
    arrows = []
    for (kind, _, _), pair in ends.items():
        assert pair.keys() == {"s", "f"} and pair["s"]["ts"] <= pair["f"]["ts"], f"{kind}: an arrow goes back in time"
        arrows.append((kind, beginning(slices, pair["s"])[-1], beginning(slices, pair["f"])[0]))
    return ChromeTrace(slices, arrows)


def nest(slices: list[Slice]) -> None:
    """Set parents and children; AssertionError where two slices of a lane overlap in part."""
    stacks: dict[tuple[int, int], list[Slice]] = {}
    for found in sorted(slices, key=lambda found: (found.begin, -found.end)):
        stack = stacks.setdefault(found.lane, [])
        while stack and stack[-1].end <= found.begin:
            stack.pop()
        if stack:
            assert found.end <= stack[-1].end, f"{found} overlaps {stack[-1]} in part"
            found.parent = stack[-1]
            stack[-1].children.append(found)
        stack.append(found)


def beginning(slices: list[Slice], event: dict[str, Any]) -> list[Slice]:
    """The slices of its lane that begin where an arrow does, a parent before its children."""
    at, lane = round(event["ts"] * 1000), (event["pid"], event["tid"])
    found = [one for one in slices if one.lane == lane and one.begin == at]
    assert found, f"{event} is at the beginning of no slice"
    return sorted(found, key=lambda one: -one.end)
