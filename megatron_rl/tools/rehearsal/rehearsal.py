"""`megatron-rl rehearse`: rehearses some ranks of a job, each in a separate process, and compares their results.

Each rank runs one optimizer update with the code of a real run (step.py). Ranks of later pipeline stages run first,
because they send Python objects that earlier stages need.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_rl.config import TrainConfig, load_config
from megatron_rl.tools.plan.devices import DEVICES, FRAGMENTATION, GIB, RESERVED_BYTES, Device
from megatron_rl.tools.plan.length_files import read_lengths
from megatron_rl.tools.plan.plan_command import check_as_started, prompt_tokens, with_models
from megatron_rl.tools.rehearsal import te_package
from megatron_rl.tools.rehearsal.matching import differences
from megatron_rl.weights.architecture import read_architecture

PROGRAM = Path(__file__).with_name("start_ranks.py")
SHIM = Path(__file__).resolve().parents[2] / "_C_rehearsal.so"
KINDS = ("first", "last", "stage-boundaries", "all-distinct")


class RehearsalError(ValueError):
    """Raised for a failure that the job would have on its cluster."""


@dataclass(frozen=True)
class World:
    """The trainer's ranks: the GPUs of `nodes` x `gpus_per_node` that no server uses."""

    nodes: int
    gpus_per_node: int
    ranks: int
    stages: int

    @property
    def ranks_of_stage(self) -> int:
        return self.ranks // self.stages

    def chosen(self, wanted: str) -> list[int]:
        """Return the ranks that `wanted` names, those of later stages first.

        wanted: kinds (`KINDS`) or ranks, comma-separated. The world's last rank is always included, because the others
        need the loss that it sends.
        """
        size, last = self.ranks_of_stage, self.stages - 1
        found = {self.ranks - 1}
        for word in wanted.split(","):
            if word == "first":
                found.add(0)
            elif word == "last":
                continue
            elif word == "stage-boundaries":
                found |= {stage * size for stage in (0, 1, last - 1, last) if 0 <= stage <= last}
            elif word == "all-distinct":
                found |= {rank for stage in range(self.stages) for rank in (stage * size, (stage + 1) * size - 1)}
            elif word.isdecimal() and int(word) < self.ranks:
                found.add(int(word))
            else:
                raise ValueError(
                    f"--ranks {word}: must be one of {', '.join(KINDS)}, or a rank below {self.ranks}; separate "
                    f"several by commas."
                )
        return sorted(found, reverse=True)


@dataclass
class Rehearsal:
    """The results of a rehearsal. by_rank: {rank: content of its found.json}."""

    config: TrainConfig
    world: World
    device: Device
    by_rank: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        return max(found["peak_bytes"] for found in self.by_rank.values())

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU that are available to tensors."""
        return (self.device.memory - RESERVED_BYTES) / (1 + FRAGMENTATION)


def world_of(config: TrainConfig, *, nodes: int, gpus_per_node: int, trainer_gpus: int = 0) -> World:
    """Return the trainer's world: `trainer_gpus` ranks, or if that is 0, one for each GPU that no server uses.

    Raises ValueError if servers use all GPUs, or the layout does not suit the number of ranks.
    """
    own_servers = 0 if config.rollout.servers or config.rollout.colocated else config.rollout.server_count
    gpus = nodes * gpus_per_node
    ranks = trainer_gpus or gpus - own_servers * config.rollout.gpus_per_server
    if ranks < 1:
        raise ValueError(
            f"rollout.server_count = {own_servers} x rollout.gpus_per_server = {config.rollout.gpus_per_server}: take "
            f"all of the {gpus} GPUs; start fewer servers, or raise --nodes."
        )
    config.parallel.check_world_size(ranks)
    return World(nodes, gpus_per_node, ranks, config.parallel.pipeline)


def rehearse(
    path: Path,
    overrides: list[str],
    *,
    nodes: int,
    gpus_per_node: int,
    ranks: str,
    device: str,
    folder: Path,
    models: Path | None = None,
    lengths: Path | None = None,
    trainer_gpus: int = 0,
) -> Rehearsal:
    """Rehearse ranks of a job and return the results.

    ranks: as in World.chosen. folder: is emptied, and receives each rank's output. models: as in with_models. lengths:
    as in read_lengths. trainer_gpus: as in world_of.

    Raises ValueError for a job that cannot be rehearsed, and RehearsalError if ranks would fail, deadlock or run out of
    memory.
    """
    if not SHIM.exists():
        raise ValueError(f"{SHIM} does not exist: run `python csrc/build.py`, as `make` does.")
    te_package.sources()
    config = with_models(load_config(path, overrides), models)
    check_as_started(config)
    prompt_tokens(config, lengths)  # for its errors
    found = {"model.path": config.model.path, "critic.model": config.critic.model}
    found |= {"reward_model.path": config.reward_model.path, "teacher.path": config.teacher.path}
    found |= {f"teacher.by_source.{name}.path": part.get("path", "") for name, part in config.teacher.by_source.items()}
    world = world_of(config, nodes=nodes, gpus_per_node=gpus_per_node, trainer_gpus=trainer_gpus)
    result = Rehearsal(config, world, DEVICES[device])
    chosen = world.chosen(ranks)
    context = read_architecture(config.model.path).max_positions
    order = {
        "world_size": world.ranks,
        "gpus_per_node": gpus_per_node,
        "memory_bytes": int(result.device.memory),
        "config": str(path),
        "overrides": [*overrides, *(f"{key}={value}" for key, value in found.items() if value)],
        "lengths": read_lengths(lengths, config, context) if lengths else [],
    }
    shutil.rmtree(folder, ignore_errors=True)
    by_stage = groupby(chosen, key=lambda rank: rank // world.ranks_of_stage)
    folder.mkdir(parents=True)
    orders = [[order | {"rank": rank} for rank in stage] for _, stage in by_stage]
    (folder / "orders.json").write_text(json.dumps(orders))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), str(folder)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the rehearsal's process ended with {done.returncode}: {done.stderr[-2000:]}")
    for rank in chosen:
        result.by_rank[rank] = _found(folder / str(rank), rank)
    check(result)
    return result


def check(result: Rehearsal) -> None:
    """Raise RehearsalError if ranks would deadlock or run out of memory."""
    if faults := differences(result.by_rank):
        raise RehearsalError("ranks would wait for each other for ever: " + " ".join(faults))
    if result.peak_bytes > result.usable_bytes:
        rank = max(result.by_rank, key=lambda rank: result.by_rank[rank]["peak_bytes"])
        found = result.by_rank[rank]
        raise RehearsalError(
            f"rank {rank} needs {found['peak_bytes'] / GIB:.1f} GiB of the {result.usable_bytes / GIB:.1f} GiB that "
            f"tensors can have on a {result.device.name}, in {found['peak_phase']}, at {found['peak_line']}; recompute "
            f"(megatron.recompute_granularity), a smaller batch.tokens_per_microbatch or more ranks take less."
        )


def _found(place: Path, rank: int) -> dict[str, Any]:
    """Return a rank's results. If the rank failed, raise RehearsalError with its error."""
    if (place / "found.json").exists():
        return json.loads((place / "found.json").read_text())
    fault = place / "fault.txt"
    said = fault.read_text() if fault.exists() else "its process ended early"
    raise RehearsalError(f"rank {rank}: {said} (all of it is in {place / 'output.txt'})")
