"""Python programs of some lines in an interpreter of their own, for what a fork of the tests' process cannot show."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.kit.waiting import LATE_S

ROOT = Path(__file__).parents[2]


def start_python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start it, with its output and its errors as pipes of text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(_command(code, arguments), text=True, **{"cwd": ROOT} | pipes | options)


def run_python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    where = {"cwd": ROOT, "timeout": LATE_S}
    return subprocess.run(_command(code, arguments), capture_output=True, text=True, **where | options)


def _command(code: str, arguments: tuple[object, ...]) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
