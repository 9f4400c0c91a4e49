"""What makes a process start faster."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import what a process is made of within this: once, at its start.

    Its million objects all stay, but Python's collector would look through them again and again while they come, for a
    fifth of the time, and later whenever it looks for garbage. It does not while this lasts, and passes over them ever
    after; so processes that are forked from this one share them.
    """
    is_outermost = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_outermost:
            gc.enable()
