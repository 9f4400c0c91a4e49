"""The first and the last rank of every config for clusters, rehearsed: what a step takes of a GPU that is not there.

    python benchmarks/rehearse_configs.py

Memory is that of the fuller of the two ranks, beside what the plan says. `own` and `upstream` are host syncs of one
update of two microbatches, or one for each stage, at lines of this package and of megatron.core. The norm of the
gradients is left out, as Transformer Engine's is one kernel. `copies` are those between host and device. GB are what
rank 0 sends in an update, `apart` between nodes.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import frame

from megatron_rl.config import load_config
from megatron_rl.tools.plan.devices import GIB
from megatron_rl.tools.plan.memory import models_of, trainer_memory
from megatron_rl.tools.plan.plan_command import prompt_tokens, with_models
from megatron_rl.tools.plan.step_sizes import plan_batch
from megatron_rl.tools.rehearsal.rehearsal import Rehearsal, rehearse
from megatron_rl.tools.rehearsal.rehearsal_text import traffic

MODELS = frame.ROOT / "tests" / "model_configs"
CLUSTERS = "qwen3|llama3|deepseek"
NORM = "megatron/core/utils.py"


def nodes_of(path: Path) -> int:
    """Return the number in a config's name, or 1."""
    found = re.search(r"_(\d+)nodes?$", path.stem)
    return int(found[1]) if found else 1


def planned_gib(path: Path, result: Rehearsal) -> float:
    """Return what the plan says of the fullest rank's tensors."""
    config = with_models(load_config(path, []), MODELS)
    tokens, layout = prompt_tokens(config), config.parallel
    batch = plan_batch(config, tokens, result.world.ranks // (layout.tensor * layout.pipeline * layout.context))
    parts = trainer_memory(models_of(config), config, batch, tokens, result.world.ranks, result.device).parts
    return sum(size for name, size in parts.items() if name not in ("fragmentation", "reserved")) / GIB


def waits(result: Rehearsal) -> tuple[int, int]:
    """Return the most host syncs of an update on one rank: at this package's lines, and at megatron.core's."""
    own, upstream = [0], [0]
    for found in result.by_rank.values():
        syncs = {what: n for what, n in found["phases"]["update"]["syncs"].items() if NORM not in what}
        own.append(sum(n for what, n in syncs.items() if " at megatron_rl/" in what))
        upstream.append(sum(n for what, n in syncs.items() if " at megatron/core/" in what))
    return max(own), max(upstream)


def row(path: Path, nodes: int, overrides: list[str]) -> str:
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        options = {"nodes": nodes, "gpus_per_node": 8, "ranks": "first,last", "device": "h100", "models": MODELS}
        try:
            result = rehearse(path, overrides, folder=Path(folder) / "ranks", **options)
        except ValueError as error:
            return " ".join(str(error).partition(" (all of it")[0].split())[:160]
    update = [found["phases"]["update"] for found in result.by_rank.values()]
    sent = [entry for entry in traffic(result.by_rank[0], result.world) if entry["phase"] == "update"]
    between = sum(entry["bytes"] for entry in sent if entry["link"] == "between nodes")
    copies = max(sum(phase["copies"].values()) for phase in update)
    own, upstream = waits(result)
    planned = planned_gib(path, result) if not overrides else float("nan")
    return (
        f"{result.world.ranks:>6}{result.peak_bytes / GIB:>9.1f}{planned:>9.1f}"
        f"{max(phase['kernels'] for phase in update):>10,}{sum(update[-1]['flops'].values()) / 1e12:>8.0f}"
        f"{own:>6}{upstream:>10}{copies:>8}{between / 1e9:>9.1f}{sum(entry['bytes'] for entry in sent) / 1e9:>8.1f}"
        f"{time.perf_counter() - began:>8.0f}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--only", default="", help="configs whose names have this")
    args = frame.arguments(parser, argv)
    paths = [path for path in sorted((frame.ROOT / "configs").glob("*.yaml")) if re.search(CLUSTERS, path.stem)]
    overrides: list[str] = []
    if args.quick:
        paths, overrides = [frame.ROOT / "configs" / "count_grpo.yaml"], [f"model.path={frame.TINY}"]
    print(f"{frame.Machine()}; H100 SXM 80 GB, one update, torch's operators")
    print(f"{'':<30} ranks      GiB  planned   kernels   TFLOP   own  upstream  copies  GB apart      GB       s")
    for path in paths:
        if args.only in path.stem:
            print(f"{path.stem:<30}{row(path, nodes_of(path), overrides)}", flush=True)


if __name__ == "__main__":
    frame.run(main)
