"""Computes from the plan's figures how many clients' models fit into the memory of a rank.

One model occupies the engine. The others are kept on the device if the base, an update and the plan's reserves leave
room there, and otherwise in host memory. Without a GPU, the device's memory is host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.config import TrainConfig
from megatron_rl.tools.plan.devices import FRAGMENTATION
from megatron_rl.tools.plan.memory import Model, TrainerMemory, memory_of, states_of_stage
from megatron_rl.tools.plan.step_sizes import BatchPlan, Bounds, PromptTokens
from megatron_rl.weights.decoder import Architecture

HOST_SHARE = 0.8
"""Share of the free host memory that models may take. Requests, results and checkpoints need the rest."""
MOST_BY_DEFAULT = 64
MIB = 2**20
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """Numbers of models for which there is room on the device and in host memory, in addition to the occupant.

    model_bytes: bytes that one model takes in host memory.
    """

    on_device: int
    in_host: int
    model_bytes: float

    @property
    def slots(self) -> int:
        return 1 + self.on_device + self.in_host


def room_of(
    config: TrainConfig, arch: Architecture, *, world_size: int, local_ranks: int, device_bytes: float | None
) -> Room:
    """Compute the room for models on this rank. The engine must be built already, so that free memory excludes it.

    local_ranks: ranks of this host. device_bytes: memory of this rank's GPU; None without a GPU.
    """
    policy = Model("policy", arch, config.actor, megatron=config.megatron)
    kept = gathered = 0.0
    for stage in range(config.parallel.pipeline):
        states = states_of_stage(policy, stage, world_size)
        own = policy.trained_of_stage(stage).total * policy.itemsize + states["optimizer"] + states["gradients"]
        kept, gathered = max(kept, own), max(gathered, states["gradients"])
    unshared = replace(config, batch=replace(config.batch, share_prompts=False))
    memory = memory_of(policy, unshared, _batch(config, arch), PromptTokens.of([1]), world_size)
    host = HOST_SHARE * free_host_bytes() / local_ranks
    if device_bytes is None:
        servers = config.rollout.server_count * policy.itemsize * policy.parameters / local_ranks
        host -= memory.peak - memory.kept + servers
        return Room(int(max(0.0, host) / (kept + gathered)), 0, kept)
    room = device_bytes - TrainerMemory({"policy": memory}, False, device_bytes).peak
    on_device = int(max(0.0, room) / ((1 + FRAGMENTATION) * (kept + gathered)))  # a pass gathers gradients once more
    return Room(on_device, int(max(0.0, host) / kept), kept)


def slots_of(given: int | None, room: Room, config: TrainConfig) -> int:
    """Return the number of slots: `given`, or if that is None, a default that fits into the room.

    Raises ValueError if `given` exceeds the room.
    """
    if given is None:  # a whole model is as large as the base, and clients rarely expect to share a server for them
        return min(room.slots, MOST_BY_DEFAULT) if config.lora.rank else 1
    if given > room.slots:
        smaller = f"a lower lora.rank than {config.lora.rank}" if config.lora.rank else "lora.rank for adapters"
        raise ValueError(
            f"--slots {given}: a rank has room for {room.slots} models of {room.model_bytes / MIB:,.1f} MiB, one in "
            f"the engine, {room.on_device} on its device and {room.in_host} in host memory; set at most {room.slots}, "
            f"or {smaller}, or start more ranks with optimizer.distributed=true."
        )
    return given


def free_host_bytes() -> float:
    """Return this host's free memory in bytes, or that of this process's container if it is less."""
    free = float(psutil.virtual_memory().available)
    limit, used = (CGROUP / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, float(most) - float(used.read_text()))
    return max(0.0, free)


def _batch(config: TrainConfig, arch: Architecture) -> BatchPlan:
    """Return the plan of a step whose microbatches are full and outnumber the pipeline's stages."""
    longest = arch.max_positions
    if not config.batch.allow_longer_sequences:
        longest = min(longest, config.batch.tokens_per_microbatch)
    microbatches = 4 * config.parallel.pipeline * config.parallel.virtual_pipeline
    count = microbatches * max(1, config.batch.tokens_per_microbatch // longest)
    step: dict[str, Any] = dict.fromkeys(field.name for field in fields(BatchPlan)) | {
        "trajectories": count,
        "longest_sequence": longest,
        "replicas": 1,
        "trajectories_per_replica": Bounds(count, count),
        "microbatches": Bounds(microbatches, microbatches),
        "updates": 1,
    }
    return BatchPlan(**step)
