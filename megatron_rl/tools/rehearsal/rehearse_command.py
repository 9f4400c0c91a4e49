"""`megatron-rl rehearse CONFIG --nodes N --gpus-per-node G`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.tools.rehearsal.rehearsal import rehearse
from megatron_rl.tools.rehearsal.rehearsal_text import as_dict, as_text


def rehearsal_text(path: Path, overrides: list[str], *, folder: Path, **options: Any) -> str:
    """Return what a rehearsal found, and write it to `folder`/rehearsal.json. Options and errors as of `rehearse`."""
    result = rehearse(path, overrides, folder=folder, **options)
    target = folder / "rehearsal.json"
    target.write_text(json.dumps(as_dict(result), indent=1) + "\n")
    return f"{as_text(result)}\n{target}"
