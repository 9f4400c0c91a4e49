"""Stand-ins for the streams and events of torch.cuda, which tell a StreamOrder what waits for what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_rl.tools.rehearsal.stream_order import Clock, StreamOrder


class Stream:
    """A stand-in for torch.cuda.Stream."""

    order: ClassVar[StreamOrder]
    note_wait: ClassVar[Callable[[str, Clock], None]]
    """Function called with (description, clock) when the host waits for the operations in the clock."""
    device = torch.device("cuda")

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = self.stream_id = self.order.add(f"the stream of {self.order.find_line()}", self)

    def wait_stream(self, other: Stream) -> None:
        self.order.wait(self.order.clock(other.cuda_stream), self.cuda_stream)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        Stream.note_wait("a stream waited for", self.order.clock(self.cuda_stream))

    def query(self) -> bool:
        self.order.host_waits(self.order.clock(self.cuda_stream))
        return True


class Event:
    """A stand-in for torch.cuda.Event. Waiting for an event that was never recorded has no effect."""

    def __init__(self, *_: object, **__: object) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Stream.order.clock(None if stream is None else stream.cuda_stream)

    def wait(self, stream: Stream | None = None) -> None:
        Stream.order.wait(self.clock, None if stream is None else stream.cuda_stream)

    def synchronize(self) -> None:
        Stream.note_wait("an event waited for", self.clock)

    def query(self) -> bool:
        Stream.order.host_waits(self.clock)
        return True

    def elapsed_time(self, _: Event) -> float:
        return 0.0


@contextlib.contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    order, before = Stream.order, Stream.order.current
    order.current = before if stream is None else stream.cuda_stream
    try:
        yield
    finally:
        order.current = before


def streams_of(order: StreamOrder, note_wait: Callable[[str, Clock], None]) -> dict[str, Any]:
    """Return {name: stand-in} for torch.cuda's functions and classes of streams and events.

    Also replaces Tensor.tolist and Tensor.record_stream. note_wait: as in `Stream`.
    """
    Stream.order, Stream.note_wait = order, note_wait
    default = object.__new__(Stream)
    default.cuda_stream = default.stream_id = 0
    order.streams[0] = default
    tolist = Tensor.tolist

    def checked_tolist(self: Tensor) -> Any:
        order.on_host("tolist", [self], [])
        return tolist(self)

    def set_stream(stream: Stream) -> None:
        order.current = stream.cuda_stream

    Tensor.tolist = checked_tolist  # type: ignore[method-assign]
    Tensor.record_stream = lambda self, stream: order.record_stream(self, stream.cuda_stream)  # type: ignore
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": _on_stream,
        "set_stream": set_stream,
        "current_stream": lambda *_: order.streams[order.current],
        "default_stream": lambda *_: default,
    }
