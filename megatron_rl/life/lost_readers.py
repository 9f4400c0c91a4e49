"""Output whose reader has gone, as after `| head`: it is discarded, and the process works on."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class _Output(io.FileIO):
    """A file descriptor for writing. Once nobody reads its pipe, it leads to /dev/null."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # child processes that start from now on write there too
            os.close(nowhere)
            return super().write(data)  # type: ignore[arg-type]


def outlive_readers() -> None:
    """Let this process print to standard output and error without an end to it when their readers go."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # it is no file: a notebook's, or that of a test
        return stream
    stream.flush()
    buffer = io.BufferedWriter(_Output(descriptor, "w", closefd=False))
    options = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
    return io.TextIOWrapper(buffer, **options)
