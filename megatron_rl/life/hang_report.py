"""Reports what a rollout process is doing when the run hangs, by a short message and a file with the details."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

from megatron_rl.telemetry.spans import Span, Spans

NAMED = 3
"""Maximum number of open spans that a message names."""
WORDS = {"episodes": "episode", "replies": "reply"}


class HangReport:
    """A file for reports on this process's open spans and stacks.

    SIGUSR2 also makes the process write a stack to the file, even if the interpreter is blocked: that of the thread
    which receives the signal, usually the main thread.
    """

    def __init__(self, path: Path, spans: Spans) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._spans = path, spans
        self._file = path.open("a")  # a resumed run keeps its earlier reports
        # One thread only: faulthandler would read the frames of others while they run, which can crash the process.
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=False)

    @property
    def file_number(self) -> int:
        """File descriptor of the file, so that other processes can write their stacks to it."""
        return self._file.fileno()

    def report(self) -> str:
        """Write open spans, recently ended spans and all stacks to the file. Return a summary of the open spans."""
        now, last = time.monotonic(), self._spans.last()
        words = in_words(self._spans.open(), now)
        lines = [time.strftime("%Y-%m-%d %H:%M:%S"), f"{words}.", "", "Under way, the oldest first:"]
        lines += [f"  {describe(span, now)}" for span in self._spans.open()]
        lines += ["", "Ended last:", *(f"  {describe(span, now)}" for span in last), "", *stacks(), ""]
        # One write call: SIGUSR2 may arrive meanwhile, and faulthandler writes a stack word by word.
        os.write(self.file_number, "\n".join(lines).encode())
        return words

    def close(self) -> None:
        """Close the report, and remove its file if it is empty."""
        faulthandler.unregister(signal.SIGUSR2)
        if self._file.tell() == 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        self._file.close()


def stacks() -> list[str]:
    """Return the stacks of all threads in faulthandler's format, but with thread names."""
    names, lines = {thread.ident: thread.name for thread in threading.enumerate()}, []
    for ident, frame in sys._current_frames().items():
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
        calls = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
        lines += [f'  File "{call.filename}", line {call.lineno} in {call.name}' for call in calls] + [""]
    return lines


def in_words(under_way: list[Span], now: float) -> str:
    """Return a summary of the open spans: their count by row, and the oldest of those that contain no other open span.

    now: monotonic time.
    """
    if not under_way:
        return "nothing is under way"
    counts = Counter(span.row if span.name != "generate" else "requests" for span in under_way)
    inner = {id(ancestor) for span in under_way for ancestor in span.ancestors}
    leaves = [span for span in under_way if id(span) not in inner]
    counted = ", ".join(f"{row}: {count}" for row, count in counts.items())
    return f"{counted}; the oldest: " + "; ".join(describe(span, now) for span in leaves[:NAMED])


def describe(span: Span, now: float) -> str:
    """Return a line about a span: what it is, its server, its prompt, and how long it has lasted or when it ended.

    now: monotonic time.
    """
    prompt = next((above.name for above in [span, *span.ancestors] if above.row in ("replies", "episodes")), "")
    if span.name == "generate":
        prompt = span.parent.name if span.parent is not None else ""
        what = f"request {span.args['rid']} to {span.args['server']}"
    elif span.row == "rewards":
        what = f"reward {span.name}"
    elif span.row == "control":
        what, prompt = f"{span.name} to {span.place}", ""
    else:
        what, prompt = f"{WORDS[span.row]} of {span.name}", ""
    of = f" (of {prompt})" if prompt else ""
    if span.end_s is None:
        return f"{what}{of} for {now - span.begin_s:.1f} s"
    error = f", {span.args['error']}" if "error" in span.args else ""
    return f"{what}{of} took {span.end_s - span.begin_s:.1f} s, ended {now - span.end_s:.1f} s ago{error}"
