"""Spans: pieces of work with their start and end times. Spans in progress are always tracked.

A hang report lists the oldest spans in progress. Of ended spans only the last few are kept, unless `record` was called.
Then all are kept, and trace.py can write a trace of them. Times are seconds of CLOCK_MONOTONIC, which all processes of
a host share.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

SPANS_RECORDED = 100_000
"""Maximum number of spans in a recording, which take about 60 MB. Further spans are counted and discarded."""
SPANS_REMEMBERED = 30
"""Number of ended spans that are kept if there is no recording."""


@dataclass(eq=False, slots=True, kw_only=True)
class Span:
    """A piece of work with its start and end. A child span lies within the time of its parent."""

    row: str
    """Kind of the work: `episodes`, `replies`, `rewards`, `phases`, ... A trace shows each kind as a row."""
    name: str
    begin_s: float
    end_s: float | None = None
    parent: Span | None = None
    place: str = ""
    """URL of the server that does the work; '' for work of this process."""
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def ancestors(self) -> Iterator[Span]:
        """The parent, its parent, and so on."""
        span = self.parent
        while span is not None:
            yield span
            span = span.parent


_inside: ContextVar[tuple[Spans, Span] | None] = ContextVar("inside", default=None)


class Spans:
    """The spans of one process. All methods may be called from any thread.

    spans = Spans()
    with spans("episodes", "prompt 7"):
        with spans("rewards", "last_number"):  # within the episode
            ...
    """

    def __init__(self, on_end: Callable[[Span], None] = lambda span: None) -> None:
        """Start without spans. on_end: called with each span when it ends, in the thread and context of the span."""
        self._on_end, self._lock = on_end, threading.Lock()
        self._open: dict[int, Span] = {}
        self._last: deque[Span] = deque(maxlen=SPANS_REMEMBERED)
        self._recorded: list[Span] | None = None
        self.left_out = 0

    def __call__(self, row: str, name: str, *, place: str = "", **args: Any) -> Recorder:
        """Record the `with` block as a span. Spans that begin in the block, its tasks and its threads become children.

        row, name, place, args: fields of Span.
        """
        return Recorder(self, Span(row=row, name=name, begin_s=0.0, place=place, args=args))

    def begin(self, span: Span) -> None:
        with self._lock:
            self._open[id(span)] = span

    def end(self, span: Span) -> None:
        with self._lock:
            del self._open[id(span)]
            self._last.append(span)
            if self._recorded is not None:
                self._keep(span, self._recorded)
        # Outside the lock, because on_end may begin or list spans itself.
        self._on_end(span)

    def open(self) -> list[Span]:
        """Return the spans in progress, oldest first."""
        with self._lock:
            return sorted(self._open.values(), key=lambda span: span.begin_s)

    def last(self) -> list[Span]:
        """Return the spans that ended last, the latest one at the end."""
        with self._lock:
            return list(self._last)

    def record(self) -> None:
        """Start a recording: keep all spans that end from now on."""
        with self._lock:
            self._recorded, self.left_out = [], 0

    def take(self) -> list[Span]:
        """Stop the recording. Return the spans that ended during it and those in progress."""
        with self._lock:
            recorded, self._recorded = self._recorded or [], None
            for span in self._open.values():
                self._keep(span, recorded)
            # Copy under the lock, while no span can end.
            return copied(recorded)

    def _keep(self, span: Span, recorded: list[Span]) -> None:
        if len(recorded) < SPANS_RECORDED:
            recorded.append(span)
        else:
            self.left_out += 1


class Recorder(AbstractContextManager[Span]):
    """Records its `with` block as a span. It is a class because a generator takes twice as long."""

    def __init__(self, spans: Spans, span: Span) -> None:
        self._spans, self._span = spans, span

    def __enter__(self) -> Span:
        span, within = self._span, _inside.get()
        # A span of another Spans object cannot be the parent: the two are recorded and taken separately.
        span.parent = within[1] if within is not None and within[0] is self._spans else None
        span.begin_s = time.monotonic()
        self._spans.begin(span)
        # A context variable: tasks started in this block inherit it, concurrent ones do not see it.
        self._token = _inside.set((self._spans, span))
        return span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        span = self._span
        if error is not None:
            span.args["error"] = f"{type(error).__name__}: {error}"[:200]
        _inside.reset(self._token)
        span.end_s = time.monotonic()
        self._spans.end(span)


def copied(spans: list[Span]) -> list[Span]:
    """Return copies of spans, whose parents are copies, too.

    If a span's parent is not in `spans`, the copy's parent is that of the nearest ancestor in `spans`.
    """
    copies = {span: replace(span, args=dict(span.args)) for span in spans}
    for copy in copies.values():
        copy.parent = next((copies[span] for span in copy.ancestors if span in copies), None)
    return list(copies.values())


def span_here(row: str, name: str, **args: Any) -> AbstractContextManager[Span | None]:
    """Record the `with` block as a child of the current span. Does nothing if there is no current span.

    The span is recorded in the Spans object of the current one.
    """
    within = _inside.get()
    return nullcontext() if within is None else within[0](row, name, **args)
