"""Holds back the embedded servers that were forked from this process, so that a test meets replies that are under way.

A small model's reply can be complete before a test has seen that it has begun.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import time
from collections.abc import Iterator

FORM = struct.Struct("qd")
_shared = mmap.mmap(-1, FORM.size)
"""Memory that forks share with this process: tokens at which replies stop, and seconds to wait after each token."""


@contextlib.contextmanager
def held_at(tokens: int) -> Iterator[None]:
    """Let no reply become longer than `tokens` tokens while this lasts. Servers still carry out commands."""
    with _paced(tokens, 0.0):
        yield


@contextlib.contextmanager
def slowed(pause_s: float) -> Iterator[None]:
    """Let servers wait for `pause_s` after each token while this lasts."""
    with _paced(0, pause_s):
        yield


@contextlib.contextmanager
def _paced(tokens: int, pause_s: float) -> Iterator[None]:
    FORM.pack_into(_shared, 0, tokens, pause_s)
    try:
        yield
    finally:
        FORM.pack_into(_shared, 0, 0, 0.0)


def paced_server() -> None:
    """Be an embedded server that heeds the two above."""
    from megatron_rl.tools.embedded_server import server
    from megatron_rl.tools.embedded_server.batcher import Batcher

    decode = Batcher._decode

    def paced(self: Batcher) -> None:
        tokens, pause_s = FORM.unpack_from(_shared)
        if tokens and any(request.generated >= tokens for request in self._running):
            time.sleep(1e-3)
            return
        decode(self)
        time.sleep(pause_s)

    Batcher._decode = paced  # type: ignore[method-assign]
    server.main()
