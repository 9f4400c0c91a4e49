"""Training prompts chosen and ordered by how often a policy solves them, as `megatron-rl eval` has measured it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from megatron_rl.data.data_files import read_rows


def digest_of(prompt: dict[str, Any]) -> str:
    """Name a prompt by its content, whatever data set or mixture it is in."""
    # A mixture adds the source, and what is measured may be one of its parts alone.
    own = {name: value for name, value in prompt.items() if name != "source"}
    return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:32]


def by_success(prompts: list[dict[str, Any]], path: str, band: list[float]) -> list[dict[str, Any]]:
    """Return the prompts whose mean reward in the eval.jsonl at `path` is in `band`, those solved most often first.

    As often solved ones keep their order. ValueError where a prompt was not measured, or none is in the band.
    """
    rates = {row["prompt"]: sum(row["rewards"]) / len(row["rewards"]) for row in read_measured(path)}
    unknown = sum(digest_of(prompt) not in rates for prompt in prompts)
    if unknown:
        raise ValueError(
            f"data.success_rates = {path!r}: has no replies to {unknown} of the {len(prompts)} training prompts; "
            f"evaluate them: megatron-rl eval CONFIG eval.sets.train.source=..., with data.train's source and args."
        )
    low, high = band
    kept = [prompt for prompt in prompts if low <= rates[digest_of(prompt)] <= high]
    if not kept:
        raise ValueError(f"data.success_band = {band}: no prompt has a success rate in it; widen it.")
    return sorted(kept, key=lambda prompt: -rates[digest_of(prompt)])


def read_measured(path: str) -> list[dict[str, Any]]:
    rows = read_rows(path, key="data.success_rates")
    for number, row in enumerate(rows, start=1):
        if not (isinstance(row, dict) and isinstance(row.get("prompt"), str) and row.get("rewards")):
            raise ValueError(
                f"data.success_rates = {path!r}, line {number}: has no prompt and rewards; give an eval.jsonl that "
                f"megatron-rl eval wrote."
            )
    return rows
