"""The first and the last rank of every config for clusters, rehearsed: what an update takes of a GPU that is not there.

    python benchmarks/rehearse_configs.py

Figures are those of one update of two microbatches, or one for each stage, and of the rank that has most. Of three
stages and more a rank of the second is rehearsed, too. `GiB` is the most memory, `planned` what the plan says of the
longest replies. `own` and `upstream` count where the host waits for the device, at lines of this package and of
megatron.core, and `copies` are those between host and device. GB are what a rank sends in its node and to others. The
last column is the rehearsal's own time.
"""

from __future__ import annotations

import re
import time
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import frame

from megatron_rl.config import load_config
from megatron_rl.tools.plan.devices import GIB, Device
from megatron_rl.tools.plan.memory import models_of, trainer_memory
from megatron_rl.tools.plan.plan_command import prompt_tokens, with_models
from megatron_rl.tools.plan.step_sizes import plan_batch
from megatron_rl.tools.rehearsal.rehearsal import Rehearsal, World, rehearse, world_of
from megatron_rl.tools.rehearsal.sent_bytes import traffic

MODELS = frame.ROOT / "tests" / "model_configs"
CLUSTERS = "qwen3|llama3|deepseek|glm"
COLUMNS = {
    "ranks": "6,",
    "GiB": "8.1f",
    "planned": "9.1f",
    "kernels": "9,.0f",
    "TFLOP": "8,.0f",
    "own": "5.0f",
    "upstream": "10,.0f",
    "copies": "8,.0f",
    "GB in node": "12,.1f",
    "GB apart": "10,.1f",
    "seconds": "9.0f",
}
"""The columns of the table, and the format of the number in each."""


def nodes_of(path: Path) -> int:
    """Return the number in a config's name, or 1."""
    found = re.search(r"_(\d+)nodes?$", path.stem)
    return int(found[1]) if found else 1


def planned_gib(path: Path, overrides: list[str], result: Rehearsal) -> float:
    """Return what the plan says of the fullest rank's tensors."""
    config = with_models(load_config(path, overrides), MODELS)
    tokens, layout = prompt_tokens(config), config.parallel
    batch = plan_batch(config, tokens, result.world.ranks // (layout.tensor * layout.pipeline * layout.context))
    memory = trainer_memory(models_of(config), config, batch, tokens, result.world.ranks, result.device)
    return max(sum(parts.values()) for moment, parts in memory.moments.items() if moment != "start") / GIB


def figures(found: dict[str, Any], world: World, device: Device) -> dict[str, float]:
    """Return a rank's part of a row."""
    update = found["phases"]["update"]
    sent = dict.fromkeys(("in a node", "between nodes"), 0.0)
    for entry in traffic(found, world, device):
        if entry["phase"] == "update":
            sent[entry["link"]] += entry["bytes"] / 1e9
    return {
        "GiB": update["peak_bytes"] / GIB,
        "kernels": update["kernels"],
        "TFLOP": sum(update["flops"].values()) / 1e12,
        "own": sum(count for what, count in update["syncs"].items() if " at megatron_rl/" in what),
        "upstream": sum(count for what, count in update["syncs"].items() if " at megatron/core/" in what),
        "copies": sum(update["copies"].values()),
        "GB in node": sent["in a node"],
        "GB apart": sent["between nodes"],
    }


def most(by_rank: list[dict[str, float]]) -> dict[str, float]:
    """Return the figures of whichever rank has most."""
    return {name: max(part[name] for part in by_rank) for name in by_rank[0]}


def row(path: Path, overrides: list[str]) -> str:
    """Rehearse a config; return its row, or what is wrong with it."""
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        try:
            result = rehearsed(path, overrides, Path(folder))
        except ValueError as error:
            return "  " + " ".join(str(error).partition(" (all of it")[0].split())[:160]
    found = most([figures(part, result.world, result.device) for part in result.by_rank.values()])
    found |= {"ranks": result.world.ranks, "planned": planned_gib(path, overrides, result)}
    found["seconds"] = time.perf_counter() - began
    return "".join(format(found[name], form) for name, form in COLUMNS.items())


def rehearsed(path: Path, overrides: list[str], folder: Path) -> Rehearsal:
    layout = {"nodes": nodes_of(path), "gpus_per_node": 8}
    ranks = ranks_of(world_of(load_config(path, overrides), **layout))
    return rehearse(path, overrides, ranks=ranks, device="h100", folder=folder / "ranks", models=MODELS, **layout)


def ranks_of(world: World) -> str:
    """Return the ranks to rehearse: of a middle stage the one that holds most microbatches, if there is one."""
    return f"first,last,{world.ranks_of_stage}" if world.stages > 2 else "first,last"


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--only", default="", help="configs whose names have this")
    args = frame.arguments(parser, argv)
    paths = [path for path in sorted((frame.ROOT / "configs").glob("*.yaml")) if re.search(CLUSTERS, path.stem)]
    overrides: list[str] = []
    if args.quick:
        paths, overrides = [frame.ROOT / "configs" / "count_grpo.yaml"], [f"model.path={frame.TINY}"]
    print(f"{frame.Machine()}; H100 SXM 80 GB; megatron-core {metadata.version('megatron-core')}")
    heads = "".join(f"{name:>{form.partition('.')[0].strip(',')}}" for name, form in COLUMNS.items())
    print(f"{'':<30}{heads}")
    for path in paths:
        if args.only in path.stem:
            print(f"{path.stem:<30}{row(path, overrides)}", flush=True)


if __name__ == "__main__":
    frame.run(main)
