"""Checks that the collectives and messages of rehearsed ranks match. If they do not, NCCL waits forever."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, zip_longest
from typing import Any

ANY_SIZE = ("alltoall_base", "alltoall", "gather", "scatter")
"""Collectives in which the ranks' tensors may differ in size."""
NAMED = 3
"""Maximum number of mismatches reported for a pair of ranks."""

Call = dict[str, Any]


def differences(by_rank: dict[int, dict[str, Any]]) -> list[str]:
    """Return the mismatches as sentences. by_rank: {rehearsed rank: content of its ledger}."""
    found = []
    for first, second in combinations(sorted(by_rank), 2):
        found += _of_groups(first, by_rank[first], second, by_rank[second])
        for source, target in ((first, second), (second, first)):
            found += _of_messages(source, by_rank[source], target, by_rank[target])
    return found


def _of_groups(first: int, one: dict[str, Any], second: int, other: dict[str, Any]) -> list[str]:
    mine, theirs = _calls_by_group(one), _calls_by_group(other)
    found = []
    for group in mine.keys() | theirs.keys():
        if not {first, second} <= set(group[1]):
            continue
        for number, (a, b) in enumerate(zip_longest(mine.get(group, []), theirs.get(group, []))):
            if a is None or b is None or _signature(a) != _signature(b):
                found.append(
                    f"call {number + 1} of group {group[0]} (ranks {_short(group[1])}) is {_said(a)} on rank {first} "
                    f"and {_said(b)} on rank {second}."
                )
                break  # all later calls of this group are shifted
    return found[:NAMED]


def _of_messages(source: int, sender: dict[str, Any], target: int, receiver: dict[str, Any]) -> list[str]:
    sent = [call for call in sender["collectives"] if call["kind"] == "send" and call["peer"] == target]
    got = [call for call in receiver["collectives"] if call["kind"] == "recv" and call["peer"] == source]
    for number, (a, b) in enumerate(zip_longest(sent, got)):
        if a is None or b is None or (a["dtype"], a["sizes"]) != (b["dtype"], b["sizes"]):
            return [
                f"message {number + 1} from rank {source} to rank {target} is {_said(a)} there and {_said(b)} here."
            ]
    return []


def _calls_by_group(found: dict[str, Any]) -> dict[tuple[str, tuple[int, ...]], list[Call]]:
    calls = defaultdict(list)
    for call in found["collectives"]:
        if call["kind"] not in ("send", "recv"):
            name, ranks = found["groups"][call["group"]]
            calls[name, tuple(ranks)].append(call)
    return calls


def _signature(call: Call) -> tuple[Any, ...]:
    sizes = () if call["kind"] in ANY_SIZE else tuple(call["sizes"])
    return call["kind"], call["dtype"], sizes, call["peer"], call["on_device"]


def _said(call: Call | None) -> str:
    if call is None:
        return "nothing"
    return f"{call['kind']} of {call['sizes']} {call['dtype']} at {call['line']}"


def _short(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
