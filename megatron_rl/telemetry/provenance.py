"""A run's code version and start time, for the first line of its config.yaml."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from megatron_rl import __version__

ROOT = Path(__file__).parents[2]
MARK = "# megatron_rl "


def provenance() -> str:
    """Return a comment: `# megatron_rl 0.1.0, commit 1a2b3c4, 2026-01-02 03:04 UTC`."""
    return f"{MARK}{__version__}{commit()}, {time.strftime('%Y-%m-%d %H:%M %Z')}"


def commit() -> str:
    """Return the checkout's commit and whether it has local changes; empty for an installed package."""
    try:
        told = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    name, _, changed = told.stdout.strip().partition("-")
    is_ours = told.returncode == 0 and (ROOT / ".git").exists()
    return f", commit {name}{' with changes' if changed else ''}" if is_ours else ""


def read_provenance(config: str) -> str:
    """Return the provenance in a config.yaml, without the leading `# `; empty if it has none."""
    first = config.partition("\n")[0]
    return first.removeprefix("# ") if first.startswith(MARK) else ""
