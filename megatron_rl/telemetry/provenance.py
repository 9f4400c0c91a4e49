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
    if not (ROOT / ".git").exists():
        return ""
    try:
        name, changed = told_by_git("rev-parse", "--short=7", "HEAD"), told_by_git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f", commit {name}{' with changes' if changed else ''}"


def told_by_git(*command: str) -> str:
    """Return what git prints. It takes no lock: if it were killed with one, every later git command would fail."""
    whole = ["git", "-C", str(ROOT), "--no-optional-locks", *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def read_provenance(config: str) -> str:
    """Return the provenance in a config.yaml, without the leading `# `; empty if it has none."""
    first = config.partition("\n")[0]
    return first.removeprefix("# ") if first.startswith(MARK) else ""
