"""GPUs' data-sheet figures and the assumed efficiencies: all numbers in a plan that are not computed."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Data-sheet figures of one GPU. FLOPS are those of dense matrices, without sparsity."""

    name: str
    memory: float
    """Bytes, as nvidia-smi reports them."""
    bandwidth: float
    """Bytes per second."""
    bfloat16_flops: float
    float32_flops: float
    """Without TF32, which torch disables by default."""

    def flops(self, dtype: str) -> float:
        return self.bfloat16_flops if dtype == "bfloat16" else self.float32_flops


DEVICES = {
    "a100": Device("A100 SXM 80 GB", 80.0 * GIB, 2.04e12, 312e12, 19.5e12),
    "h100": Device("H100 SXM 80 GB", 79.6 * GIB, 3.35e12, 989e12, 67e12),
    "h200": Device("H200 SXM 141 GB", 140.4 * GIB, 4.8e12, 989e12, 67e12),
    "b200": Device("B200 SXM 180 GB", 179.0 * GIB, 7.7e12, 2250e12, 75e12),
}

# Assumptions. None of them is measured on the user's cluster. `assumptions` returns them for printing with a plan.
RESERVED_BYTES = 3 * GIB
"""Memory per process for the CUDA context, NCCL buffers and cuBLAS workspaces."""
FRAGMENTATION = 0.05
"""Memory that torch's allocator holds but cannot use, as a share of the tensors' memory."""
SERVER_MEMORY_SHARE = 0.85
"""Share of a server GPU for weights and KV cache, if server_args has no --mem-fraction-static."""
TRAINING_EFFICIENCY = 0.4
"""Share of peak FLOPS reached in forward and backward passes."""
PREFILL_EFFICIENCY = 0.4
DECODE_BANDWIDTH = 0.6
"""Share of peak memory bandwidth reached in decoding."""
DECODE_EFFICIENCY = 0.4
DECODE_OVERHEAD_S = 2e-3
"""Fixed time of one decoding step of a server's batch: launches, sampling, scheduling."""
PUBLICATION_BANDWIDTH = 20e9
"""Bytes per second from the trainer to all servers."""
NODE_LINK, CLUSTER_LINK = 450e9, 50e9
"""Bytes per second that a GPU can send: over an H100's NVLink within a node, and over one 400 Gb/s port per GPU between
nodes."""
LINKS = {"in a node": NODE_LINK, "between nodes": CLUSTER_LINK}
HOST_BANDWIDTH = 25e9
"""Bytes per second between a GPU and host memory."""
HOST_TRAFFIC = 2.25
"""Bytes that an update moves between GPU, host memory and CPU, per byte that a CPU optimizer holds."""
MEAN_PROMPT = 0.5
"""Mean prompt length as a share of the maximum prompt length, if no file of lengths is given."""
MEAN_REPLY = 0.5
"""Mean reply length as a share of generation.max_new_tokens. Lengths are uniform between 0 and that maximum."""


def assumptions() -> dict[str, str]:
    """Return the assumptions behind a plan's figures, as {name: text}."""
    return {
        "peaks": "NVIDIA's data sheets, dense",
        "reserved memory": f"{RESERVED_BYTES / GIB:g} GiB a GPU",
        "fragmentation": f"{FRAGMENTATION:.0%}",
        "server memory": f"{SERVER_MEMORY_SHARE:.0%} for weights and KV cache",
        "training": f"{TRAINING_EFFICIENCY:.0%} of peak, and traffic beside it but for what optimizer.overlap hides",
        "prefill": f"{PREFILL_EFFICIENCY:.0%} of peak",
        "decoding": f"{DECODE_BANDWIDTH:.0%} of bandwidth, {DECODE_EFFICIENCY:.0%} of peak, "
        f"{DECODE_OVERHEAD_S * 1e3:g} ms a token",
        "links": f"{NODE_LINK / 1e9:g} GB/s of a GPU in a node, {CLUSTER_LINK / 1e9:g} GB/s between nodes",
        "publication": f"{PUBLICATION_BANDWIDTH / 1e9:g} GB/s",
        "host memory": f"{HOST_BANDWIDTH / 1e9:g} GB/s a GPU",
        "mean prompt": f"{MEAN_PROMPT:g} of the longest without --lengths",
        "mean reply": f"{MEAN_REPLY:g} of max_new_tokens, lengths spread evenly",
    }
