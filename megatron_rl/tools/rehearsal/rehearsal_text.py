"""Formats a rehearsal's results as text, JSON and an HTML page (`megatron-rl rehearse`)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_rl.tools.plan.devices import GIB, Device
from megatron_rl.tools.plan.plan_command import keys_of, make_plan, start_command
from megatron_rl.tools.plan.plan_text import as_dict as plan_dict
from megatron_rl.tools.plan.plan_text import as_text as plan_as_text
from megatron_rl.tools.rehearsal import te_package
from megatron_rl.tools.rehearsal.budget import budget, budget_lines
from megatron_rl.tools.rehearsal.rehearsal import Rehearsal, World, rehearse
from megatron_rl.tools.rehearsal.rehearsal_page import page_of
from megatron_rl.tools.rehearsal.sent_bytes import traffic

LAYERS = {
    "transformer_engine": "layers and optimizer of Transformer Engine",
    "local": "layers of torch's operators, optimizer of Transformer Engine",
}
SHOWN = 6
"""Maximum number of lines of each list."""


def rehearsal_text(path: Path, overrides: list[str], *, folder: Path, **options: Any) -> str:
    """Rehearse a job, write the results to `folder` and return them as text. Options and errors: see `rehearse`."""
    result = rehearse(path, overrides, folder=folder, **options)
    return f"{as_text(result)}\n{write(result, path, folder)}"


def plan_and_rehearsal_text(
    path: Path, overrides: list[str], *, folder: Path, as_json: bool = False, **options: Any
) -> str:
    """Plan a run, rehearse the first and last rank of the chosen plan, and return both as text or JSON.

    Takes the options of make_plan; raises the errors of make_plan and `rehearse`.
    """
    plan = make_plan(path, overrides, **options)
    chosen = [word for word in overrides if not word.startswith("rollout.server_count=")]
    if not plan.config.rollout.servers:
        chosen.append(f"rollout.server_count={plan.servers}")
    result = rehearse(path, chosen, ranks="first,last", trainer_gpus=plan.trainer_gpus, folder=folder, **options)
    place, command = write(result, path, folder), start_command(plan, path, overrides)
    if as_json:
        return json.dumps(plan_dict(plan, keys_of(overrides)) | {"command": command, "rehearsal": as_dict(result)})
    return f"{plan_as_text(plan, command, keys_of(overrides))}\n\nrehearsal\n{as_text(result)}\n{place}"


def write(result: Rehearsal, config: Path, folder: Path) -> Path:
    """Write the results to rehearsal.json, and charts to rehearsal.html, in `folder`. Return the path of the latter."""
    found, page = as_dict(result), folder / "rehearsal.html"
    (folder / "rehearsal.json").write_text(json.dumps(found) + "\n")
    page.write_text(page_of(found, title=f"{config.stem}, rehearsed"), encoding="utf-8")
    return page


def as_dict(result: Rehearsal) -> dict[str, Any]:
    """Return all results, named as in Ledger. Collectives are summed up instead of listed."""
    by_rank, world = {}, result.world
    for rank, found in result.by_rank.items():
        rest = {name: value for name, value in found.items() if name not in ("collectives", "groups")}
        by_rank[rank] = rest | {"traffic": traffic(found, world, result.device)}
        by_rank[rank] |= {"budget": budget(found, world, result.device)}
    return {
        "nodes": world.nodes,
        "gpus_per_node": world.gpus_per_node,
        "trainer_ranks": world.ranks,
        "device": result.device.name,
        "links": result.device.links,
        "ranks": by_rank,
    }


def as_text(result: Rehearsal) -> str:
    """Return the results as text, one screen per rank."""
    world = result.world
    lines = [
        f"{world.ranks} trainer ranks on {world.nodes} x {world.gpus_per_node} {result.device.name}; rehearsed: "
        f"{', '.join(map(str, sorted(result.by_rank)))}. One update of two microbatches, or one for each stage; "
        f"{LAYERS[result.by_rank[max(result.by_rank)]['layers']]} {te_package.version()}."
    ]
    for rank, found in sorted(result.by_rank.items()):
        lines += ["", f"rank {rank}", *_of_rank(found, world, result.device)]
    links = ", ".join(f"{speed / 1e9:g} GB/s {way}" for way, speed in result.device.links.items())
    lines += ["", f"Times of links: {links}."]
    return "\n".join(lines)


def _of_rank(found: dict[str, Any], world: World, device: Device) -> list[str]:
    lines = [
        f"  memory  {found['peak_bytes'] / GIB:.1f} GiB at most, in {found['peak_phase']}, at {found['peak_line']}; "
        f"then by part and by line:",
        "    " + ", ".join(f"{part} {nbytes / GIB:.2f}" for part, nbytes in found["peak_by_part"].items() if nbytes),
    ]
    for line, nbytes in Counter(found["peak_by_line"]).most_common(SHOWN):
        lines.append(f"    {nbytes / GIB:7.2f} GiB  {line}")
    if most := found["host"]["peak_bytes"]:
        parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in found["host"]["peak_by_part"].items() if size)
        lines.append(
            f"  host    {most / GIB:.1f} GiB at most in large tensors, in {found['host']['peak_phase']}: {parts}"
        )
    lines.append("  phase                kernels   TFLOP   peak GiB   syncs   copies       MB")
    for name, phase in found["phases"].items():
        flops, copied = sum(phase["flops"].values()), sum(phase["copied_bytes"].values())
        lines.append(
            f"  {name:<18}{phase['kernels']:>10,}{flops / 1e12:>8.1f}{phase['peak_bytes'] / GIB:>11.1f}"
            f"{sum(phase['syncs'].values()):>8}{sum(phase['copies'].values()):>9}{copied / 1e6:>9.1f}"
        )
    syncs: Counter[str] = Counter()
    for name, phase in found["phases"].items():
        if name != "start":
            syncs.update(phase["syncs"])
    lines += ["  host syncs by line", *(f"    {count:>5}  {where}" for where, count in syncs.most_common(SHOWN))]
    if found["unordered"]:
        lines.append("  uses of memory in no order between streams")
        lines += [f"    {count:>5}  {what}" for what, count in Counter(found["unordered"]).most_common(SHOWN)]
    lines.append("  traffic              calls    GB sent      ms   group, link")
    rows = sorted(traffic(found, world, device), key=lambda row: -row["seconds"])
    for row in rows[:SHOWN]:
        lines.append(
            f"    {row['kind']:<17}{row['calls']:>7,}{row['bytes'] / 1e9:>11.2f}{row['seconds'] * 1e3:>8.1f}   "
            f"{row['group'].lower()} of {row['ranks']}, {row['link']}, in {row['phase']}"
        )
    lines += budget_lines(found, world, device, shown=SHOWN)
    peers = ", ".join(f"{count} over {backend}" for backend, count in found["peers"].items())
    groups = ", ".join(f"{count} of {backend}" for backend, count in found["made_groups"].items())
    lines.append(f"  groups  {groups} are made; peers of this rank: {peers}")
    if found["buckets"]:
        size = sum(found["buckets"])
        lines.append(
            f"  publication  {size / 1e9:.1f} GB in {len(found['buckets'])} buckets, each a request to every server"
        )
    if found["assumed"]:
        lines.append("  assumed")
        lines += [f"    {count:>5}  {what}" for what, count in Counter(found["assumed"]).most_common(SHOWN)]
    return lines
