"""Checks for first_hour.sh, of the installed packages or of a run's metrics.

    python scripts/first_hour_check.py --packages
    python scripts/first_hour_check.py runs/first_hour/sglang 3   # the run's folder, and its minimum number of steps

The last line printed is a summary. The exit status is 1 if something is wrong, and the summary says what.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

MOST_NATS = 0.05
"""Largest mean difference between log-probabilities of trainer and servers for the same tokens. Kernels of two programs
in bfloat16 differ by some thousandths."""
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex", "deep-ep", "sglang", "transformers")


def packages() -> str:
    """Print the versions of PACKAGES and return a summary.

    Raises ValueError if there is no GPU, or if an installed package does not load.
    """
    import torch

    from megatron_rl import platform

    for name in PACKAGES:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} is not installed")
    if not platform.has_cuda():
        raise ValueError(f"torch {torch.__version__} for CUDA {torch.version.cuda} sees no GPU; compare the driver.")
    platform.prepare()
    try:
        has_layers = platform.uses_transformer_engine("transformer_engine")
    except ValueError as error:
        if "does not load" in str(error):
            raise
        has_layers = False
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    layers = "Transformer Engine" if has_layers else "Megatron-Core"
    return (
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {torch.cuda.device_count()} GPUs, "
        f"layers of {layers}"
    )


def run_summary(folder: Path, least_steps: int) -> str:
    """Return a summary of the run's last step. Raises ValueError if steps are missing or trainer and servers differ."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps: dict[int, dict[str, Any]] = {row["step"]: row for row in rows if row["kind"] == "step"}
    if len(steps) < least_steps:
        raise ValueError(f"{path} has {len(steps)} of {least_steps} steps; the log above says why.")
    last = steps[max(steps)]
    differences = [row.get("mismatch/mean_age_0", row.get("mismatch/mean", 0.0)) for row in steps.values()]
    if max(differences) > MOST_NATS:
        raise ValueError(
            f"trainer and servers differ by {max(differences):.4f} nats on average, more than {MOST_NATS}: their "
            f"weights or their arithmetic is not the same."
        )
    verified = last.get("publish/verified_tensors", 0)
    compared = f"{verified} checksums of weights agree" if verified else "no checksums were compared"
    return (
        f"{len(steps)} steps, the last in {last['time/step']:.1f} s; published {last['publish/bytes'] / 1e9:.2f} GB in "
        f"{last['publish/duration_s']:.2f} s, {compared}; {max(differences):.5f} nats apart"
    )


if __name__ == "__main__":
    try:
        print(packages() if sys.argv[1:] == ["--packages"] else run_summary(Path(sys.argv[1]), int(sys.argv[2])))
    except ValueError as error:
        print(error)
        sys.exit(1)
