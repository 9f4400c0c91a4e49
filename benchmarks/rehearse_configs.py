"""The first and the last rank of every config for clusters, rehearsed: what an update takes of a GPU that is not there.

    python benchmarks/rehearse_configs.py            # all layers: a minute or more for each rank
    python benchmarks/rehearse_configs.py --few      # two and three layers of each kind on a stage, and what follows

Figures are those of one update of two microbatches, or one for each stage, and of the rank that has most. Of three
stages and more a rank of the second is rehearsed, too. `GiB` is the most memory, `planned` what the plan says of the
longest replies. `own` and `upstream` count where the host waits for the device, at lines of this package and of
megatron.core, and `copies` are those between host and device. GB are what a rank sends in its node and to others. The
last column is the rehearsal's own time.

All of them but the time are linear in the layers of a stage, so those of a model follow from few of its layers, on the
layout of all of them.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import frame

from megatron_rl.config import load_config
from megatron_rl.tools.plan.devices import GIB
from megatron_rl.tools.plan.memory import models_of, trainer_memory
from megatron_rl.tools.plan.plan_command import prompt_tokens, with_models
from megatron_rl.tools.plan.step_sizes import plan_batch
from megatron_rl.tools.rehearsal.rehearsal import Rehearsal, World, rehearse, world_of
from megatron_rl.tools.rehearsal.sent_bytes import traffic
from megatron_rl.weights.architecture import read_architecture

MODELS = frame.ROOT / "tests" / "model_configs"
CLUSTERS = "qwen3|llama3|deepseek"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
DEPTHS = (2, 3)
"""Layers of each kind on a stage, of a rehearsal with few. One alone holds less than its share."""
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
    parts = trainer_memory(models_of(config), config, batch, tokens, result.world.ranks, result.device).parts
    return sum(size for name, size in parts.items() if name not in ("fragmentation", "reserved")) / GIB


def figures(found: dict[str, Any], world: World) -> dict[str, float]:
    """Return a rank's part of a row."""
    update = found["phases"]["update"]
    sent = dict.fromkeys(("in a node", "between nodes"), 0.0)
    for entry in traffic(found, world):
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


class FewLayers:
    """A config with few layers on each stage, and what follows for all of them.

    Dense layers before mixtures all stay, on the first stage. Of a config that recomputes some layers of a stage, each
    layer that is recomputed comes with one that is not.
    """

    def __init__(self, path: Path) -> None:
        self.config = config = with_models(load_config(path), MODELS)
        self.stages, given = config.parallel.pipeline, config.megatron
        arch = read_architecture(config.model.path)
        self.dense = arch.mixture.layers.index(True) if arch.mixture else 0
        self.is_half = given.get("recompute_method") == "block"
        self.given = [key for key in (FIRST, LAST) if key in given]
        even = (arch.layers - sum(given[key] for key in self.given)) // (self.stages - len(self.given))
        of_stage = [even] * self.stages
        for key, stage in ((FIRST, 0), (LAST, -1)):
            of_stage[stage] = given.get(key, even)
        of_stage[0] -= self.dense
        self.depths = [layers // 2 for layers in of_stage] if self.is_half else of_stage
        """Layers of each kind on each stage of the whole model."""
        assert not self.is_half or {given["recompute_num_layers"]} == set(self.depths)

    def settings(self, depth: int, folder: Path) -> list[str]:
        """Write the model's config.json with `depth` layers of each kind on a stage; return the settings for it."""
        published = json.loads((Path(self.config.model.path) / "config.json").read_text())
        published.pop("quantization_config", None)
        each = 2 * depth if self.is_half else depth
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(
            json.dumps(published | {"num_hidden_layers": self.dense + each * self.stages})
        )
        sizes = {FIRST: self.dense + each, LAST: each}
        words = [f"model.path={folder}", *(f"megatron.{key}={sizes[key]}" for key in self.given)]
        return words + [f"megatron.recompute_num_layers={depth}"] * self.is_half

    def figures(self, by_depth: dict[int, Rehearsal]) -> dict[str, float]:
        """Return the figures of all layers: those of whichever rank has most."""
        (few, one), (more, other) = sorted(by_depth.items())
        parts = []
        for rank in one.by_rank:
            small, large = (figures(each.by_rank[rank], each.world) for each in (one, other))
            times = (self.depths[rank // one.world.ranks_of_stage] - few) / (more - few)
            parts.append({name: small[name] + times * (large[name] - small[name]) for name in small})
        return most(parts)


def row(path: Path, overrides: list[str], *, is_few: bool) -> str:
    """Rehearse a config; return its row, or what is wrong with it."""
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        try:
            if is_few:
                few = FewLayers(path)
                by_depth = {n: rehearsed(path, few.settings(n, Path(folder) / f"{n}"), Path(folder)) for n in DEPTHS}
                result, found = by_depth[DEPTHS[0]], few.figures(by_depth)
            else:
                result = rehearsed(path, overrides, Path(folder))
                found = most([figures(part, result.world) for part in result.by_rank.values()])
        except ValueError as error:
            return "  " + " ".join(str(error).partition(" (all of it")[0].split())[:160]
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
    parser.add_argument("--few", action="store_true", help="work out the rows from rehearsals with few layers")
    args = frame.arguments(parser, argv)
    paths = [path for path in sorted((frame.ROOT / "configs").glob("*.yaml")) if re.search(CLUSTERS, path.stem)]
    overrides: list[str] = []
    if args.quick:
        paths, overrides = [frame.ROOT / "configs" / "count_grpo.yaml"], [f"model.path={frame.TINY}"]
    layers = "worked out from few layers" if args.few else "all layers"
    print(f"{frame.Machine()}; H100 SXM 80 GB, {layers}")
    heads = "".join(f"{name:>{form.partition('.')[0].strip(',')}}" for name, form in COLUMNS.items())
    print(f"{'':<30}{heads}")
    for path in paths:
        if args.only in path.stem:
            print(f"{path.stem:<30}{row(path, overrides, is_few=args.few)}", flush=True)


if __name__ == "__main__":
    frame.run(main)
