"""The GPU of this rank: what its libraries have to be told before they start, and the cores that are near it.

Asks nvidia-smi: CUDA itself would start, with the variables that are to be set for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import TrainConfig

BLACKWELL = 10.0
"""The compute capability from which on Megatron's overlap needs no CUDA_DEVICE_MAX_CONNECTIONS."""
SYSFS = Path("/sys")


@dataclass(frozen=True)
class Gpu:
    """A GPU as the system knows it: the address on the bus, as sysfs writes it, and the compute capability."""

    address: str
    capability: float


def find() -> Gpu | None:
    """Return the GPU that this rank takes, None where there is none or nvidia-smi does not say."""
    rank, visible = int(os.environ.get("LOCAL_RANK", 0)), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(rank)] if visible is None else [name.strip() for name in visible.split(",")][rank : rank + 1]
    if not names or not names[0] or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--id={names[0]}", "--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader"]
    address, _, capability = subprocess.run(command, capture_output=True, text=True).stdout.partition(",")
    try:
        return Gpu(address.strip().lower()[-len("0000:00:00.0") :], float(capability))
    except ValueError:  # an old driver, or a GPU that is gone
        return None


def set_variables(config: TrainConfig) -> None:
    """Set what NCCL and CUDA read at their start, on a rank with a GPU, where the user has not set it."""
    gpu = find()
    if gpu is None:
        return
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as SGLang has it, which joins the trainer's group
    layouts = (config.parallel, config.critic.parallel, config.reward_model.parallel)
    if gpu.capability < BLACKWELL and any(layout.tensor > 1 or layout.context > 1 for layout in layouts):
        # As upstream demands it: kernels then start in the order in which its communication overlaps them.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def stay_near() -> set[int]:
    """Keep this thread, and those that it starts, on the cores of its GPU's memory node; return them.

    Empty, and nothing changes, where the system does not tell, or none of them is this process's to use.
    """
    gpu = find()
    cores = cores_near(gpu.address) & os.sched_getaffinity(0) if gpu is not None else set()
    if cores:
        os.sched_setaffinity(0, cores)
    return cores


def cores_near(address: str) -> set[int]:
    """Return the cores of a device's memory node; empty where sysfs has none for it."""
    try:
        node = int((SYSFS / "bus/pci/devices" / address / "numa_node").read_text())  # -1: the host has one alone
        spans = (SYSFS / f"devices/system/node/node{node}/cpulist").read_text().strip().split(",")  # 0-23,48-71
    except OSError:
        return set()
    ends = [[int(end) for end in span.split("-")] for span in spans if span]
    return {core for first, *last in ends for core in range(first, (last or [first])[0] + 1)}
