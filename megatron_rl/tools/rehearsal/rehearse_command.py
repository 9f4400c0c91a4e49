"""`megatron-rl rehearse CONFIG --nodes N --gpus-per-node G`."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.tools.rehearsal.rehearsal import rehearse
from megatron_rl.tools.rehearsal.rehearsal_text import as_dict, as_text


def rehearsal_text(
    path: Path, overrides: list[str], *, nodes: int, gpus_per_node: int, device: str, ranks: str, folder: Path
) -> str:
    """Return what a rehearsal found, and write it to `folder`/rehearsal.json. Errors as of `rehearse`."""
    options = {"nodes": nodes, "gpus_per_node": gpus_per_node, "device": device, "ranks": ranks, "folder": folder}
    result = rehearse(path, overrides, **options)
    target = folder / "rehearsal.json"
    target.write_text(json.dumps(as_dict(result), indent=1) + "\n")
    return f"{as_text(result)}\n{target}"
