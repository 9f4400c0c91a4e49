"""Keeps a process running when the reader of its output is gone, as after `| head`: further output is discarded."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class _Output(io.FileIO):
    """A writable file descriptor that is redirected to /dev/null once its pipe has no reader."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # child processes that start from now on write there too
            os.close(nowhere)
            return super().write(data)  # type: ignore[arg-type]


def outlive_readers() -> None:
    """Keep this process running when nothing reads its standard output or error any more."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # not a real file: a notebook's stream, or a test's
        return stream
    stream.flush()
    buffer = io.BufferedWriter(_Output(descriptor, "w", closefd=False))
    options = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
    return io.TextIOWrapper(buffer, **options)
