"""A run's code version and start time, for the first line of its config.yaml."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from megatron_rl import __version__

ROOT = Path(__file__).parents[2]
MARK = "# megatron_rl "


def provenance() -> str:
    """Return a comment with version, commit and time: `# megatron_rl 0.1.0, commit 1a2b3c4, 2026-01-02 03:04 UTC`."""
    return f"{MARK}{__version__}{commit()}, {time.strftime('%Y-%m-%d %H:%M %Z')}"


def commit() -> str:
    """Return words for the checkout's commit and whether the checkout has local changes.

    Return '' if this package is installed without a checkout.
    """
    if not (ROOT / ".git").exists():
        return ""
    try:
        name, changed = told_by_git("rev-parse", "--short=7", "HEAD"), told_by_git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f", commit {name}{' with changes' if changed else ''}"


def told_by_git(*command: str) -> str:
    """Return what a git command prints. The command takes no lock.

    If git were killed while it holds a lock, every later git command would fail.
    """
    whole = ["git", "-C", str(ROOT), "--no-optional-locks", *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def read_provenance(config: str) -> str:
    """Return the provenance in the text of a config.yaml, without the leading `# `; '' if the text has none."""
    first = config.partition("\n")[0]
    return first.removeprefix("# ") if first.startswith(MARK) else ""
