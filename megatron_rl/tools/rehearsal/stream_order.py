"""Finds race conditions between a rehearsed device's streams: uses of the same memory without a defined order.

Operations on one stream run one after the other. Operations on two streams run in any order, unless one stream waits
for the other or for one of its events, or the host waits in between. There are two kinds of *fault*: two operations on
the same bytes without a defined order, at least one of which writes, and memory that is freed while a stream may still
use it. The host counts as one more stream. It executes its own operations at once, and operations that it launches
later run after them.

    stream "a"        write x, record event e
    default stream                              read x                a fault
    default stream                              wait for e, read x    no fault

A clock says which operations are certainly done: {stream number: number of its operations that are done}.

A backward pass is assumed to run on the stream that called it, because torch itself orders the streams of a backward
pass. Reads of host memory are recorded if they go through an operator or `tolist`, but not if they go through numpy.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_rl.tools.rehearsal.known_numbers import on_device
from megatron_rl.tools.rehearsal.operations import Operation, tensors_in

Clock = dict[int, int]
HOST = -1
"""The host's number among the streams."""
COPIES = ("aten::copy_", "aten::_to_copy")
"""Operations whose host tensors `StreamOrder.copy` records, because the device may read or write them later."""


def advance(clock: Clock, other: Clock) -> None:
    """Add the operations that are done in `other` to `clock`, in place."""
    for stream, time in other.items():
        if time > clock.get(stream, 0):
            clock[stream] = time


@dataclass(slots=True)
class Use:
    """The last operation of one stream that read or wrote one span of a storage."""

    time: int
    name: str
    line: str

    def text(self, is_write: bool) -> str:
        return f"{'write' if is_write else 'read'} by {self.name} at {self.line}"


Span = tuple[int, int, bool]
"""(offset of the first byte in the storage, offset after the last byte, True if written or False if read)."""


@dataclass(slots=True)
class Memory:
    """A storage and its uses."""

    storage: weakref.ref
    owner: int
    """Number of the stream that may reuse the memory as soon as it is freed. HOST for host memory."""
    address: int
    """Address of the storage if it is in host memory; 0 if it is on the device."""
    uses: dict[int, dict[Span, Use]] = field(default_factory=lambda: defaultdict(dict))
    latest: Clock = field(default_factory=dict)
    """{stream number: time of the stream's last use}, where time is the stream's number of operations."""
    recorded: set[int] = field(default_factory=set)
    """Streams given to Tensor.record_stream. The allocator waits for these streams before the memory is reused."""
    kept: set[int] = field(default_factory=set)
    """Streams of asynchronous collectives on the storage. torch keeps the storage alive until they have ended."""


class StreamOrder:
    """The streams of a rank with their clocks, and the faults found.

    find_line: function that returns the current code line.
    """

    def __init__(self, find_line: Callable[[], str]) -> None:
        self.find_line = find_line
        self.faults: Counter[str] = Counter()
        """{text that names the two uses and their code lines: count}."""
        self.current = 0
        """Number of the current stream."""
        self.streams: list[Any] = []
        """The Stream objects, by number; None for the streams of communicators."""
        self.has_host_uses = False
        """True after a stream's first copy from or to page-locked memory, which the host may use meanwhile."""
        self.page_locked: list[range] = []
        """Address ranges of host memory pinned with cudaHostRegister."""
        self._names: list[str] = []
        self._clocks: list[Clock] = []
        self._host: Clock = {}
        self._memories: dict[int, Memory] = {}
        """{address of a storage object: the storage}."""
        self._communicators: dict[str, int] = {}
        self.add("the default stream", None)

    def add(self, name: str, stream: Any) -> int:
        """Add a stream and return its number."""
        self.streams.append(stream)
        self._names.append(name)
        self._clocks.append({})
        return len(self._names) - 1

    # Waiting

    def clock(self, stream: int | None = None) -> Clock:
        """Return a copy of a stream's clock (None: the current stream's). An event stores such a copy."""
        return dict(self._clocks[self.current if stream is None else stream])

    def wait(self, clock: Clock, stream: int | None = None) -> None:
        """Record that a stream (None: the current one) waits for the operations in `clock`."""
        advance(self._clocks[self.current if stream is None else stream], clock)

    def host_waits(self, clock: Clock | None = None) -> None:
        """Record that the host waits for the operations in `clock` (None: all operations of the current stream)."""
        advance(self._host, self._clocks[self.current] if clock is None else clock)

    def host_waits_for_all(self) -> None:
        for clock in self._clocks:
            advance(self._host, clock)

    # Uses of memory

    def note(self, op: Operation, args: Any, kwargs: Any, made: Any) -> None:
        """Record an operator's call: on the current stream if one of its tensors is on the device, else on the host."""
        results = [tensor for tensor in tensors_in(made) if on_device(tensor)]
        new = [tensor for tensor in results if self._memory(tensor) is None]
        for tensor in new:
            self._remember(tensor, self.current)
        if op.is_view or not op.launches:
            return
        given, written = tensors_in(args, kwargs), op.writes(args, kwargs)
        read = [tensor for tensor in given if all(tensor is not other for other in written)]
        if results or any(map(on_device, given)):
            self.launch(op.name, filter(on_device, read), [*filter(on_device, written), *new])
            # A launch reads host scalars at once, and the host tensor of a copy is recorded by `copy`.
            read, written = [] if op.name in COPIES else read, []
        if self.has_host_uses:
            self.on_host(op.name, *([tensor for tensor in part if not on_device(tensor)] for part in (read, written)))

    def launch(self, name: str, read: Iterable[Tensor], written: Iterable[Tensor], stream: int | None = None) -> None:
        """Record an operation on a stream (None: the current one)."""
        number = self.current if stream is None else stream
        clock = self._clocks[number]
        advance(clock, self._host)
        clock[number] = clock.get(number, 0) + 1
        use = Use(clock[number], name, self.find_line())
        for tensors, is_write in ((read, False), (written, True)):
            for tensor in tensors:
                memory = self._remember(tensor, number if on_device(tensor) else HOST)
                self._use(memory, tensor, number, clock, use, is_write)

    def communicate(
        self, communicator: str, name: str, read: list[Tensor], written: list[Tensor], *, is_async: bool
    ) -> Clock:
        """Record a collective's use of device tensors. Return the clock of its end.

        A synchronous collective runs on the current stream. An asynchronous one runs on the communicator's stream,
        after that has waited for the current stream.
        """
        stream = self.current
        if is_async:
            if communicator not in self._communicators:
                self._communicators[communicator] = self.add(f"NCCL's stream of {communicator}", None)
            stream = self._communicators[communicator]
            self.wait(self._clocks[self.current], stream)
        self.launch(name, read, written, stream)
        for tensor in (*read, *written) if is_async else ():
            self._remember(tensor, self.current).kept.add(stream)
        return self.clock(stream)

    def copy(self, host: Tensor, *, is_write: bool) -> None:
        """Record that the current stream reads or writes a host tensor in a copy, for which the host does not wait."""
        self.has_host_uses = True
        self.launch("a copy", *(([], [host]) if is_write else ([host], [])))

    def on_host(self, name: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Record an operation of the host, and check its order with the streams' uses of the same memory."""
        use = None
        for tensors, is_write in ((read, False), (written, True)):
            for tensor in tensors:
                memory = self._memory(tensor)
                if memory is not None and memory.latest:
                    use = use or Use(0, name, self.find_line())
                    self._use(memory, tensor, HOST, self._host, use, is_write)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        self._remember(tensor, self.current).recorded.add(stream)

    def _use(self, memory: Memory, tensor: Tensor, stream: int, clock: Clock, use: Use, is_write: bool) -> None:
        begin, end = _bytes_of(tensor)
        for other, latest in memory.latest.items():
            done = clock.get(other, 0)
            if other == stream or latest <= done:
                continue
            for (first, last, was_write), earlier in memory.uses[other].items():
                if earlier.time > done and first < end and begin < last and (is_write or was_write):
                    self.faults[
                        f"{use.text(is_write)} on {self._name(stream)}, in no order with the "
                        f"{earlier.text(was_write)} on {self._name(other)}"
                    ] += 1
        if stream != HOST and end > begin:
            memory.uses[stream][begin, end, is_write] = use
            memory.latest[stream] = use.time

    def _name(self, stream: int) -> str:
        return "the host" if stream == HOST else self._names[stream]

    # Memory

    def _memory(self, tensor: Tensor) -> Memory | None:
        return self._memories.get(tensor.untyped_storage()._cdata)

    def _remember(self, tensor: Tensor, owner: int) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memories.get(key)
        if memory is None:
            address = 0 if isinstance(tensor, FakeTensor) else storage.data_ptr()
            reference = weakref.ref(storage, lambda _: self._forget(key))
            memory = self._memories[key] = Memory(reference, owner, address)
        return memory

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage is about to be resized, which frees its memory and allocates new memory."""
        if memory := self._memories.get(storage._cdata):
            self._check_end(memory, "emptied", memory.recorded)
            owner = HOST if memory.owner == HOST else self.current
            self._memories[storage._cdata] = Memory(memory.storage, owner, memory.address)

    def _forget(self, key: int) -> None:
        memory = self._memories.pop(key)
        self._check_end(memory, "freed", memory.recorded | memory.kept)

    def _check_end(self, memory: Memory, how: str, safe: set[int]) -> None:
        """Record a fault if a stream may still use memory that is being freed. The memory's owner may reuse it at once.

        how: the fault's text says this about the memory, such as `freed`. safe: numbers of the streams that need no
        check.
        """
        if memory.owner == HOST and not any(memory.address in span for span in self.page_locked):
            return  # torch's own page-locked memory, which torch keeps until the copies are done
        clock = dict(self._host)
        if memory.owner != HOST:
            advance(clock, self._clocks[memory.owner])
        for other, latest in memory.latest.items():
            if other == memory.owner or other in safe or latest <= clock.get(other, 0):
                continue
            (_, _, was_write), last = max(memory.uses[other].items(), key=lambda item: item[1].time)
            self.faults[
                f"memory of {self._name(memory.owner)} {how} at {self.find_line()}, in no order with the "
                f"{last.text(was_write)} on {self._name(other)}"
            ] += 1


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last one."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + count * size
