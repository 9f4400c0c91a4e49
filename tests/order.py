"""The order of the tests, and the files that stay in one worker.

The tests of a file stay together, and so do the files whose tests ask for the one real SGLang of a session, which takes
half a minute to start, or for the process that rehearses ranks, which takes ten seconds. What waits for others most of
the time comes first, so that the rest can use the cores meanwhile; the many small files at the end even out what the
workers have left to do. Files that fork programs come before those whose tests let torch use two threads: a fork of
such a process waits for threads that it has not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

FOLDERS = ("slurm", "end_to_end", "servers", "megatron")
FORKING = "fork_programs"
TESTS = Path(__file__).parent
SHARED = {
    "the real SGLang": ("real_sglang", "real_supervisor"),
    "the process that rehearses": ("rehearsals.of(", "rehearsals.run_programs("),
}
"""By each process that a session starts once: the words by which a file's text shows that its tests ask for it."""


@cache
def place_of(path: Path) -> int:
    folder = path.relative_to(TESTS).parts[0]
    if folder == path.name and FORKING in path.read_text(encoding="utf-8"):
        folder = "end_to_end"
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


@cache
def unit_of(path: Path) -> str:
    """Return the unit that one worker runs as a whole: a file, or all files that share a process."""
    text = path.read_text(encoding="utf-8")
    return next((what for what, shows in SHARED.items() if any(word in text for word in shows)), str(path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByUnit(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(config.rootpath / super()._split_scope(nodeid))

    return ByUnit(config, log) if config.option.dist == "loadfile" else None
