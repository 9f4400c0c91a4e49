"""Spans: the work that a process is doing, and for how long, of which those under way are always known.

A hang report lists the oldest of them. Those that have ended are forgotten, all but the last few, unless `record` was
called: then a trace of them can be written (trace.py). Times are seconds of CLOCK_MONOTONIC, which all processes of a
host share.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

SPANS_RECORDED = 100_000
"""Most spans of one recording; about 60 MB. Later ones are counted and left out."""
SPANS_REMEMBERED = 30
"""Newest ended spans that are known without a recording."""


@dataclass(eq=False, slots=True, kw_only=True)
class Span:
    """Something that took time. A child lies within its parent's time."""

    row: str
    """Its kind: episodes, replies, rewards, phases, ..."""
    name: str
    begin_s: float
    end_s: float | None = None
    """None while it is under way."""
    parent: Span | None = None
    place: str = ""
    """URL of the server at which it is; empty for what the process itself does."""
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def ancestors(self) -> Iterator[Span]:
        """Its parent, that one's parent and so on."""
        span = self.parent
        while span is not None:
            yield span
            span = span.parent


_inside: ContextVar[tuple[Spans, Span] | None] = ContextVar("inside", default=None)


class Spans:
    """The spans of one process, from any thread.

    spans = Spans()
    with spans("episodes", "prompt 7"):
        with spans("rewards", "last_number"):  # within the episode
            ...
    """

    def __init__(self, most: int = SPANS_RECORDED, on_end: Callable[[Span], None] = lambda span: None) -> None:
        """on_end is told each span that ends, in the thread and the context that it was in."""
        self._most, self._on_end, self._lock = most, on_end, threading.Lock()
        self._open: dict[int, Span] = {}
        self._last: deque[Span] = deque(maxlen=SPANS_REMEMBERED)
        self._recorded: list[Span] | None = None
        self.left_out = 0

    @contextmanager
    def __call__(self, row: str, name: str, *, place: str = "", **args: Any) -> Iterator[Span]:
        """The `with` block is the span, and the parent of those that begin in it, in its tasks and its threads."""
        within = _inside.get()
        # Of another object's span it is no child: the two are recorded and taken apart.
        parent = within[1] if within is not None and within[0] is self else None
        span = Span(row=row, name=name, begin_s=time.monotonic(), parent=parent, place=place, args=args)
        with self._lock:
            self._open[id(span)] = span
        # A context variable: tasks that begin in this block inherit it, and those beside it do not see it.
        token = _inside.set((self, span))
        try:
            yield span
        except BaseException as error:
            span.args["error"] = f"{type(error).__name__}: {error}"[:200]
            raise
        finally:
            _inside.reset(token)
            span.end_s = time.monotonic()
            with self._lock:
                del self._open[id(span)]
                self._last.append(span)
                if self._recorded is not None:
                    self._keep(span, self._recorded)
            # Outside of the lock, as it may begin or list spans itself.
            self._on_end(span)

    def open(self) -> list[Span]:
        """Those under way, the oldest first."""
        with self._lock:
            return sorted(self._open.values(), key=lambda span: span.begin_s)

    def last(self) -> list[Span]:
        """The last ones that ended, in the order of their ends."""
        with self._lock:
            return list(self._last)

    def record(self) -> None:
        """Keep the spans that end from now on."""
        with self._lock:
            self._recorded, self.left_out = [], 0

    def take(self) -> list[Span]:
        """End the recording; return what ended in it and what is under way."""
        with self._lock:
            recorded, self._recorded = self._recorded or [], None
            for span in self._open.values():
                self._keep(span, recorded)
            # Copied under the lock, while no span can end.
            return copied(recorded)

    def _keep(self, span: Span, recorded: list[Span]) -> None:
        if len(recorded) < self._most:
            recorded.append(span)
        else:
            self.left_out += 1


def copied(spans: list[Span]) -> list[Span]:
    """Return copies, whose parents are copies too; an ancestor that is not among them is passed over."""
    copies = {span: replace(span, args=dict(span.args)) for span in spans}
    for copy in copies.values():
        copy.parent = next((copies[span] for span in copy.ancestors if span in copies), None)
    return list(copies.values())


def span_here(row: str, name: str, **args: Any) -> AbstractContextManager[Span | None]:
    """A span within the one that this code runs in, whosever that is; nothing where it runs in none."""
    within = _inside.get()
    return nullcontext() if within is None else within[0](row, name, **args)
