"""Starting Python processes: the path on which they find this package, and imports that cost them less."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = Path(__file__).parents[2]


def python_path() -> str:
    """Return the PYTHONPATH on which a child finds this package, wherever it was started, and what is found here."""
    return os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))


@contextmanager
def importing() -> Iterator[None]:
    """Import what a process is made of within this: once, at its start.

    Its million objects all stay, but Python's collector would look through them again and again while they come, for a
    fifth of the time, and later whenever it looks for garbage. It does not while this lasts, and passes over them ever
    after; so processes that are forked from this one share them.
    """
    # Within another one, or where a user has turned it off, the collector stays off.
    is_outermost = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_outermost:
            gc.enable()
