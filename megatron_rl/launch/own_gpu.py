"""This rank's GPU: environment variables for the GPU's libraries, and CPU affinity to the cores near the GPU.

The GPU's properties are read from nvidia-smi, because a query through CUDA would initialize CUDA before those variables
are set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from megatron_rl.config import TrainConfig

BLACKWELL = 10.0
"""Lowest compute capability on which Megatron overlaps communication without CUDA_DEVICE_MAX_CONNECTIONS=1."""
SYSFS = Path("/sys")


def find() -> tuple[str, float] | None:
    """Return the PCI address (as in sysfs) and the compute capability of this rank's GPU.

    Return None if nvidia-smi reports no GPU for this rank.
    """
    rank, visible = int(os.environ.get("LOCAL_RANK", 0)), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(rank)] if visible is None else [name.strip() for name in visible.split(",")][rank : rank + 1]
    if not names or not names[0] or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--id={names[0]}", "--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader"]
    address, _, capability = subprocess.run(command, capture_output=True, text=True).stdout.partition(",")
    try:
        return address.strip().lower()[-len("0000:00:00.0") :], float(capability)
    except ValueError:  # an old driver, or a GPU that fell off the bus
        return None


def set_variables(config: TrainConfig) -> None:
    """Set environment variables that NCCL and CUDA read when they start. Those that the user has set are kept."""
    if (gpu := find()) is None:
        return
    _, capability = gpu
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # must match SGLang's, which joins the trainer's group
    layouts = (config.parallel, config.critic.parallel, config.reward_model.parallel)
    if capability < BLACKWELL and any(layout.tensor > 1 or layout.context > 1 for layout in layouts):
        # Megatron requires it: kernels then start in the order in which communication is to overlap them.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def stay_near() -> set[int]:
    """Bind this thread, and all threads that it starts later, to the cores of the NUMA node of this rank's GPU.

    Return the numbers of these cores. If they are unknown, bind nothing and return an empty set.
    """
    gpu = find()
    cores = cores_near(gpu[0]) & os.sched_getaffinity(0) if gpu is not None else set()
    if cores:
        os.sched_setaffinity(0, cores)
    return cores


def cores_near(address: str) -> set[int]:
    """Return the numbers of the cores of a PCI device's NUMA node; empty if sysfs does not list them."""
    try:
        node = int((SYSFS / "bus/pci/devices" / address / "numa_node").read_text())  # -1: the host has a single node
        spans = (SYSFS / f"devices/system/node/node{node}/cpulist").read_text().strip().split(",")  # 0-23,48-71
    except OSError:
        return set()
    ends = [[int(end) for end in span.split("-")] for span in spans if span]
    return {core for first, *last in ends for core in range(first, (last or [first])[0] + 1)}
