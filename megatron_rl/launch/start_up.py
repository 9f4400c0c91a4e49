"""Starting Python processes: PYTHONPATH for children, and faster imports."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = Path(__file__).parents[2]


def python_path() -> str:
    """Return a PYTHONPATH for child processes: this package's parent folder, then the current PYTHONPATH."""
    return os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))


@contextmanager
def importing() -> Iterator[None]:
    """Make imports inside this context a fifth faster, by turning the garbage collector off.

    Afterwards the imported objects are frozen, so that no later collection scans them, and forked processes share their
    memory.
    """
    # The collector stays off inside another such context, or if the user has turned it off.
    is_outermost = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_outermost:
            gc.enable()
