"""Computes the bytes that a rehearsed rank sends to others, and their transfer times at nominal link speeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_rl.tools.plan.devices import Device
from megatron_rl.tools.rehearsal.rehearsal import World


def traffic(found: dict[str, Any], world: World, device: Device) -> list[dict[str, Any]]:
    """Return the collectives grouped by phase, kind and group: number of calls, bytes on the wire, transfer time."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for call, name, ranks, link, nbytes in _calls(found, world):
        key = (call["phase"], call["kind"], call["group"])
        row = rows.setdefault(
            key,
            {"phase": key[0], "kind": key[1], "group": name, "ranks": ranks, "link": link}
            | {"calls": 0, "bytes": 0.0, "seconds": 0.0},
        )
        row["calls"] += 1
        row["bytes"] += nbytes
        row["seconds"] += nbytes / device.links[link]
    return list(rows.values())


def exposed(found: dict[str, Any], world: World, device: Device) -> dict[str, dict[str, Any]]:
    """Return the collectives of an update that do not overlap with computation, by kind, group and code line.

    These are the synchronous calls, because no computation runs on their stream meanwhile. The result maps a text with
    kind, group and code line to the number of calls, the bytes on the wire, and the transfer time in seconds.
    """
    rows: dict[str, dict[str, Any]] = {}
    for call, name, _, link, nbytes in _calls(found, world):
        if call["phase"] != "update" or call["is_async"]:
            continue
        what = f"{call['kind']} of {name.lower()} at {call['line']}"
        row = rows.setdefault(what, {"calls": 0, "bytes": 0.0, "seconds": 0.0})
        row["calls"] += 1
        row["bytes"] += nbytes
        row["seconds"] += nbytes / device.links[link]
    return rows


def wire_bytes(kind: str, nbytes: int, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring collective, or that the root of a gather receives.

    nbytes: size of the whole tensor, which is also the result for messages and broadcasts.
    """
    share = (ranks - 1) / ranks
    if kind.startswith("allreduce"):
        return 2 * share * nbytes
    if kind.startswith(("allgather", "reduce_scatter", "alltoall", "gather")):
        return share * nbytes
    return float(nbytes)


def _calls(found: dict[str, Any], world: World) -> Iterator[tuple[dict[str, Any], str, int, str, float]]:
    """Yield each call on the device in a group of several ranks: (call, group name, ranks, link, bytes on the wire)."""
    for call in found["collectives"]:
        name, ranks = found["groups"][call["group"]]
        if len(ranks) > 1 and call["on_device"]:
            is_inside = len({rank // world.gpus_per_node for rank in ranks}) == 1
            link = "in a node" if is_inside else "between nodes"
            yield call, name, len(ranks), link, wire_bytes(call["kind"], call["nbytes"], len(ranks))
