"""Compares the overhead of a rehearsed rank's update with targets: host syncs, copies, kernels, extra memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron_rl.tools.plan.devices import GIB, Device
from megatron_rl.tools.rehearsal.rehearsal import World
from megatron_rl.tools.rehearsal.sent_bytes import exposed

OWN, UPSTREAM = " at megatron_rl/", " at megatron/core/"
TARGETS = {
    "own waits in a microbatch": 0,
    "own waits in a step": 3,
    "copies to the device in a microbatch": 2,
    "kernels of a layer, of Transformer Engine's": 1.3,
    "GiB beside weights, gradients, optimizer and activations": 2.0,
}
"""{figure of an update: its maximum}."""


def budget(found: dict[str, Any], world: World, device: Device) -> dict[str, Any]:
    """Return each target's figure in the update (None if not observed), and the code lines that cause overhead.

    `waits`: {host sync and its code line: count in the update}, for lines of this package and of megatron.core.
    `exposed`: the collectives that do not overlap with computation, by kind, group and code line.
    """
    phase = found["phases"]["update"]
    microbatches = max(phase["microbatches"], 1)
    layers = found["kernels_of_layers"]
    own_in_microbatch = _at(phase["in_microbatches"], OWN)
    figures = {
        "own waits in a microbatch": sum(own_in_microbatch.values()) / microbatches,
        "own waits in a step": sum(_at(phase["syncs"], OWN).values()) - sum(own_in_microbatch.values()),
        "copies to the device in a microbatch": phase["copies_in_microbatches"].get("to device", 0) / microbatches,
        "kernels of a layer, of Transformer Engine's": (
            layers["engine"] / layers["transformer_engine"] if layers else None
        ),
        "GiB beside weights, gradients, optimizer and activations": found["extra_bytes"] / GIB,
    }
    return {
        "targets": [
            {"what": what, "at_most": most, "found": figures[what], "is_met": _is_met(figures[what], most)}
            for what, most in TARGETS.items()
        ],
        "waits": _at(phase["syncs"], OWN) | _at(phase["syncs"], UPSTREAM),
        "exposed": exposed(found, world, device),
    }


def budget_lines(found: dict[str, Any], world: World, device: Device, *, shown: int) -> list[str]:
    """Return the budget as lines of text: the targets, the most frequent waits and the longest exposed collectives.

    shown: maximum number of waits, and of collectives.
    """
    result = budget(found, world, device)
    lines = ["  budget of an update     found   at most"]
    for target in result["targets"]:
        figure = "not seen" if target["found"] is None else f"{target['found']:.2f}"
        verdict = {True: "", False: "  MISSED", None: ""}[target["is_met"]]
        lines.append(f"    {figure:>22}{target['at_most']:>10g}   {target['what']}{verdict}")
    lines += [
        f"    {count:>22}            waits: {where}" for where, count in Counter(result["waits"]).most_common(shown)
    ]
    longest = sorted(result["exposed"].items(), key=lambda item: -item[1]["seconds"])
    whole = sum(row["seconds"] for _, row in longest)
    lines.append(f"    {whole * 1e3:>19.1f} ms            exposed in all; by line:")
    for what, row in longest[:shown]:
        lines.append(
            f"    {row['seconds'] * 1e3:>19.1f} ms            {row['calls']} x {what}, {row['bytes'] / 1e9:.2f} GB"
        )
    return lines


def _at(syncs: dict[str, int], place: str) -> dict[str, int]:
    return {what: count for what, count in syncs.items() if place in what}


def _is_met(figure: float | None, most: float) -> bool | None:
    return None if figure is None else figure <= most
