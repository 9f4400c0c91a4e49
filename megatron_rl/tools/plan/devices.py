"""GPUs' data-sheet figures and the assumed efficiencies: all numbers in a plan that are not computed."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Data-sheet figures of one GPU. FLOPS are those of dense matrices, without sparsity."""

    name: str
    memory: float
    """Size of the memory in bytes, as nvidia-smi reports it."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    bfloat16_flops: float
    float32_flops: float
    """Peak FLOPS in float32, without TF32, which torch disables by default."""
    node_link: float
    """Bytes per second that a GPU can send over NVLink within a node: half of the data sheet's sum for both
    directions."""

    @property
    def links(self) -> dict[str, float]:
        """{kind of link: bytes per second that a GPU can send over it}."""
        return {"in a node": self.node_link, "between nodes": CLUSTER_LINK}

    def flops(self, dtype: str) -> float:
        return self.bfloat16_flops if dtype == "bfloat16" else self.float32_flops


DEVICES = {
    "a100": Device("A100 SXM 80 GB", 80.0 * GIB, 2.04e12, 312e12, 19.5e12, 300e9),
    "h100": Device("H100 SXM 80 GB", 79.6 * GIB, 3.35e12, 989e12, 67e12, 450e9),
    "h200": Device("H200 SXM 141 GB", 140.4 * GIB, 4.8e12, 989e12, 67e12, 450e9),
    "b200": Device("B200 SXM 180 GB", 179.0 * GIB, 7.7e12, 2250e12, 75e12, 900e9),
}

# Assumptions. None of them is measured on the user's cluster. `assumptions` returns them for printing with a plan.
RESERVED_BYTES = 3 * GIB
"""Memory per process for the CUDA context, NCCL buffers and cuBLAS workspaces."""
FRAGMENTATION = 0.05
"""Memory that torch's allocator holds but cannot use, as a share of the tensors' memory."""
SERVER_MEMORY_SHARE = 0.85
"""Share of a server GPU for weights and KV cache, if server_args has no --mem-fraction-static."""
PREFILL_EFFICIENCY, DECODE_EFFICIENCY = 0.4, 0.4
"""Maximum share of peak FLOPS that servers reach in prefill, and in decoding."""
DISK_BANDWIDTH = 5e9
"""Bytes per second that a shared file system transfers, for rollout.publication = disk or delta."""
CLUSTER_LINK = 50e9
"""Bytes per second that a GPU can send between nodes: over one 400 Gb/s port per GPU."""
HOST_BANDWIDTH = 25e9
"""Bytes per second between a GPU and host memory."""
HOST_TRAFFIC = 2.25
"""Bytes that an update moves between GPU, host memory and CPU, per byte that a CPU optimizer holds."""
MEAN_PROMPT = 0.5
"""Mean prompt length as a share of the maximum prompt length, if no file of lengths is given."""
MEAN_REPLY = 0.5
"""Mean reply length as a share of generation.max_new_tokens, if no file of lengths is given."""

# Fitted to published runs: half of the rows of benchmarks/data/published_runs.csv. `benchmarks/bench_plan.py` shows the
# errors of both halves, and fits the constants with --fit.
MATRIX_EFFICIENCY, HALF_SIZE = 0.565, 280.0
"""Share of peak FLOPS that a trainer's large matrix products reach. A product with only HALF_SIZE rows, or only
HALF_SIZE columns per rank, reaches half of that."""
ATTENTION_EFFICIENCY = 0.5
"""Share of peak FLOPS that a trainer's causal attention reaches."""
LAYER_S, MIXTURE_S = 4e-4, 1.4e-3
"""Seconds of a layer's forward pass over a microbatch in addition to its matrix products. LAYER_S: for norms and kernel
launches. MIXTURE_S: further seconds of a mixture of experts, for routing, sorting rows and waiting for their counts."""
ROUTING_IMBALANCE = 1.6
"""Rows of the busiest expert rank, divided by the mean over all expert ranks."""
LINK_SHARE = 0.78
"""Share of a link's bandwidth that collectives and publications reach."""
DECODE_BANDWIDTH = 0.58
"""Share of peak memory bandwidth that servers reach in decoding."""
DECODE_LAYER_S, DECODE_REPLY_S = 3.5e-5, 4.6e-5
"""Seconds that a decoding step takes in addition to memory reads. DECODE_LAYER_S: per layer, including all-reduces
within a node. DECODE_REPLY_S: per reply."""
ALL_REDUCE_S = 1.25e-4
"""Seconds per layer that all-reduces add to a decoding step for each node of the server after the first."""
GROUP_S, IPC_S, IPC_TENSOR_S = 1.0, 6.0, 2.3e-4
"""Seconds of a publication in addition to sending the whole model over one link. GROUP_S: with servers on other GPUs.
IPC_S, and IPC_TENSOR_S per tensor: with servers on the trainer's GPUs."""

# Assumed, because published runs give the means of lengths only.
REPLY_SPREAD, ENDLESS = 0.8, 0.01
"""Reply lengths are log-normal. REPLY_SPREAD: standard deviation of the logarithm. ENDLESS: share of replies that run
to the maximum length."""
STEP_RANGE = (0.85, 1.4)
"""Lowest and highest ratio of real to planned step time, among the published runs that were held out of the fit."""


def assumptions(device: Device) -> dict[str, str]:
    """Return the assumptions behind a plan's figures, as {name: text}."""
    return {
        "peaks": "data sheets, dense",
        "reserved memory": f"{RESERVED_BYTES / GIB:g} GiB a GPU",
        "fragmentation": f"{FRAGMENTATION:.0%}",
        "server memory": f"{SERVER_MEMORY_SHARE:.0%} for weights and KV cache",
        "training": f"{MATRIX_EFFICIENCY:.0%} of peak, {ATTENTION_EFFICIENCY:.0%} in attention",
        "decoding": f"{DECODE_BANDWIDTH:.0%} of bandwidth, {DECODE_LAYER_S * 1e6:.0f} us a layer",
        "links": f"{LINK_SHARE:.0%} of {device.node_link / 1e9:g} GB/s in a node, {CLUSTER_LINK / 1e9:g} outside",
        "host memory": f"{HOST_BANDWIDTH / 1e9:g} GB/s a GPU",
        "mean lengths": f"{MEAN_PROMPT:g} (prompts), {MEAN_REPLY:g} (replies) of the longest without --lengths",
    }
