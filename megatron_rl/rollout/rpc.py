"""Calls between two processes over one socket: pickled Python objects, with tensors sent without an extra copy.

One side calls, the other serves. A frame is a pickled message followed by the bytes of its tensors. A Future in an
answer becomes a Future on the caller's side, which completes like the original. Cancelling it cancels both.

Unpickling is safe here: data comes only from the trainer or the child that it started, over an anonymous socket pair.
What servers answered is sent only as validated numbers and text.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import pickle
import queue
import socket
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from megatron_rl.life import process_exit

CLOSE_S = 10.0
_COUNT = struct.Struct("<I")

P = ParamSpec("P")
T = TypeVar("T")


class ServedTraceback(Exception):
    """The other process's traceback, attached as the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Unreadable(RuntimeError):
    """A complete message was received, but its content cannot be unpickled here."""


class RpcSocket:
    """Sends and receives messages.

    Any thread may send, but only one may receive. Raises EOFError or OSError if the peer is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._sending = end, threading.Lock()
        # A forked process, such as a checkpoint writer, would otherwise keep the socket open after this end is closed.
        itself = weakref.ref(self)

        def close_in_child() -> None:
            if (wire := itself()) is not None:
                wire.close()

        os.register_at_fork(after_in_child=close_in_child)

    def send(self, message: tuple[object, ...], *, name_of: Callable[[Future[Any]], int] | None = None) -> None:
        """Send a message. name_of: returns the number that replaces a future in the message."""
        buffers: list[memoryview] = []
        head = _pack(message, buffers, name_of)
        sizes = [len(head), *(buffer.nbytes for buffer in buffers)]
        frame = _COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + head
        # Send head and tensors separately, because joining them would copy every batch again.
        with self._sending:
            self._socket.sendall(frame)
            for buffer in buffers:
                self._socket.sendall(buffer)

    def receive(self, *, future_of: Callable[[int], Future[Any]] | None = None) -> Any:
        """Receive a message. future_of: returns the future for a number that replaces one in the message."""
        (count,) = _COUNT.unpack(self._read(_COUNT.size))
        sizes = struct.unpack(f"<{count}Q", self._read(8 * count))
        head, *buffers = [self._read(size) for size in sizes]
        try:
            return _Unpickler(io.BytesIO(head), buffers, future_of).load()
        except Exception as error:  # objects may raise anything, even EOFError
            raise Unreadable(f"a message cannot be read: {type(error).__name__}: {error}") from error

    def hang_up(self) -> None:
        """Make `receive` raise on both ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            received = self._socket.recv_into(view)
            if received == 0:
                raise EOFError("the other process is gone.")
            view = view[received:]
        return content


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[memoryview], name_of: Callable[[Future[Any]], int] | None):
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
        self._name_of = name_of

    def persistent_id(self, value: Any) -> int | None:
        return self._name_of(value) if isinstance(value, Future) and self._name_of is not None else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(flat.numpy()), value.dtype, tuple(value.shape))


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, buffers: list[bytearray], future_of: Callable[[int], Future[Any]] | None
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._future_of = future_of

    def persistent_load(self, number: Any) -> Future[Any]:
        assert self._future_of is not None, "no call asked for a future"
        return self._future_of(number)


def _pack(message: object, buffers: list[memoryview], name_of: Callable[[Future[Any]], int] | None) -> bytes:
    file = io.BytesIO()
    _Pickler(file, buffers, name_of).dump(message)
    return file.getvalue()


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that uses the received bytes without a copy."""
    return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)


# -- the side that is called -------------------------------------------------------------------------------------------


Find = Callable[[str], Callable[..., Any]]
Key = tuple[str, int]
"""Identifies a pending result: ("call", number of the call) or ("future", number of a future in an answer)."""


class RpcServer:
    """Answers the peer's calls, on the event loop that `serve` runs on.

    `find(name)` returns the function that answers calls of that name. Calls are answered one after the other: if a
    function returns an awaitable, it is awaited before the next call. There are two exceptions. Calls named in
    `at_once` are answered by the thread that reads, even if the event loop is blocked. Calls named in `beside`, of
    coroutine functions, run concurrently with other calls.

    The call PULSE is answered at once as well. Its answer also has the seconds that each current call has lasted.
    Another thread sends the results of futures, because sending a batch takes long.
    """

    def __init__(
        self, wire: RpcSocket, find: Find, *, at_once: Collection[str] = (), beside: Collection[str] = ()
    ) -> None:
        self.wire, self._find, self._at_once, self._beside = wire, find, {*at_once, PULSE}, set(beside)
        self._busy: dict[str, float] = {}
        self._futures: dict[Key, Future[Any] | asyncio.Task[Any]] = {}
        """Pending tasks of calls, and pending futures in answers."""
        self._numbers = iter(range(1 << 62))
        self._done: queue.SimpleQueue[tuple[Key, Future[Any] | asyncio.Task[Any]]] = queue.SimpleQueue()
        self._messages: asyncio.Queue[tuple[Any, ...] | BaseException] = asyncio.Queue()

    async def serve(self) -> None:
        """Answer calls until the peer is gone."""
        # Both threads run until the process ends, because `receive` and `get` cannot be interrupted.
        process_exit.start_thread(self._send_results, name="answers")
        loop = asyncio.get_running_loop()
        process_exit.start_thread(lambda: self._listen(loop), name="calls")
        while isinstance(message := await self._messages.get(), tuple):
            with noted(self._busy, f"the call {message[1]!r}"):
                await self._attend(*message)
        if not isinstance(message, EOFError | OSError):
            raise message

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                message = self.wire.receive()
                if message[1] in self._at_once:
                    self._attend_at_once(*message)
                elif message[1] in self._beside:
                    loop.call_soon_threadsafe(self._start, *message)
                else:
                    loop.call_soon_threadsafe(self._messages.put_nowait, message)
            except BaseException as fault:  # the event loop handles it
                loop.call_soon_threadsafe(self._messages.put_nowait, fault)
                return

    def _start(self, key: Key, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            task = asyncio.ensure_future(self._find(name)(*args, **kwargs))
        except Exception as raised:  # whatever it is, the caller gets it
            self._reply(key, None, raised)
            return
        self._futures[key] = task
        task.add_done_callback(partial(self._note_done, key))

    async def _attend(self, key: Key | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == CANCEL:
            if (future := self._futures.get(args[0])) is not None:
                future.cancel()
            return
        error: BaseException | None = None
        try:
            result = self._find(name)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
        except Exception as raised:
            result, error = None, raised
        except asyncio.CancelledError:  # something that the call awaited was cancelled, not this task
            result, error = None, CancelledError()
        self._reply(key, result, error)

    def _attend_at_once(self, key: Key | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now = time.monotonic()
        lasting = {what: now - since for what, since in list(self._busy.items())}
        error: BaseException | None = None
        try:
            result = self._find(name)(*args, **kwargs)
            result = lasting | result if name == PULSE else result
        except Exception as raised:
            result, error = None, raised
        self._reply(key, result, error)

    def _reply(self, key: Key | None, result: Any, error: BaseException | None) -> None:
        if key is None:  # sent by `tell`: no answer is expected
            return
        handed_out: dict[int, Future[Any]] = {}

        def name_of(future: Future[Any]) -> int:
            number = next(self._numbers)
            handed_out[number] = future
            return number

        try:
            self.wire.send((key, result, None if error is None else _portable(error)), name_of=name_of)
        except OSError:
            return  # the peer is gone, and `receive` reports that
        except Exception as fault:  # pickling may raise anything; nothing was sent yet
            self._reply(key, None, Unsendable(f"the answer cannot be sent: {type(fault).__name__}: {fault}"))
            return
        for number, future in handed_out.items():  # only after the answer that contains them
            self._futures["future", number] = future
            future.add_done_callback(partial(self._note_done, ("future", number)))

    def _note_done(self, key: Key, future: Future[Any] | asyncio.Task[Any]) -> None:
        self._done.put((key, future))

    def _send_results(self) -> None:
        while True:
            key, future = self._done.get()
            self._futures.pop(key, None)
            error = CancelledError() if future.cancelled() else future.exception()
            with noted(self._busy, "the sending of an answer"):
                self._reply(key, None if error else future.result(), error)
            del future  # it holds its result


@contextlib.contextmanager
def noted(busy: dict[str, float], what: str) -> Iterator[None]:
    """Keep `busy[what]` set to the start time, by time.monotonic, for the duration of the block."""
    busy[what] = time.monotonic()
    try:
        yield
    finally:
        del busy[what]


CANCEL, PULSE = "cancel", "pulse"


class Unsendable(RuntimeError):
    """The result of a call cannot be sent to the other process."""


def _portable(error: BaseException) -> tuple[bytes, str, str]:
    """Return an error as three values: its pickle, its type and message, its traceback.

    The pickle is empty if the error cannot be pickled.
    """
    words = f"{type(error).__name__}: {error}"
    try:
        pickled = pickle.dumps(error)
    except Exception:  # user errors may hold anything
        pickled = b""
    return pickled, words, "".join(traceback.format_exception(error))


def _raised(pickled: bytes, words: str, told: str) -> BaseException:
    """Rebuild an error from the three values of `_portable`.

    An error that cannot be unpickled becomes a RuntimeError.
    """
    try:
        error = pickle.loads(pickled) if pickled else RuntimeError(words)
    except Exception:  # user errors may need classes that are missing here
        error = RuntimeError(words)
    error.__cause__ = ServedTraceback(told)
    return error


# -- the side that calls -----------------------------------------------------------------------------------------------


class ServedFuture(Future[Any]):
    """The pending answer of the other process."""

    def __init__(self, cancel: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._cancel = cancel

    def cancel(self) -> bool:
        was_cancelled = super().cancel()
        if was_cancelled:
            self._cancel()
        return was_cancelled


class RpcClient:
    """Calls the other process. A thread of this object receives the answers.

    on_told(name, args) is called, from that thread, for messages that answer no call. on_end(fault) is called there
    once the peer is gone (`fault` is None) or `fault` prevents further receiving. All waiting and later calls raise the
    exception that on_end returns.
    """

    def __init__(
        self,
        wire: RpcSocket,
        *,
        on_told: Callable[[str, tuple[Any, ...]], None],
        on_end: Callable[[BaseException | None], BaseException],
    ) -> None:
        self.wire, self._on_told, self._on_end = wire, on_told, on_end
        self._lock = threading.Lock()
        # Keys as in `Key`.
        self._awaited: dict[tuple[str, int], ServedFuture] = {}
        self._numbers = iter(range(1 << 62))
        self._fault: BaseException | None = None
        self.hearing = process_exit.start_thread(self._hear, name="rollout-answers")

    @overload
    def start(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...

    @overload
    def start(self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    @overload
    def start(self, method: str, /) -> Future[Any]: ...

    def start(self, method: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the other process's object by its name, without waiting. Return a future of its result.

        The future raises what the method raises. Cancelling the future also cancels the call, if the server runs it
        concurrently with other calls.
        """
        key = "call", next(self._numbers)
        future = ServedFuture(lambda: self.tell(CANCEL, key))
        with self._lock:
            if self._fault is not None:
                raise self._fault
            self._awaited[key] = future
        with contextlib.suppress(OSError):  # the receiving thread reports why the connection ended
            self.wire.send((key, method if isinstance(method, str) else method.__name__, args, kwargs))
        return future

    def tell(self, name: str, /, *args: object) -> None:
        """Send a call to which no answer is sent. Does nothing if the peer is gone."""
        with contextlib.suppress(OSError):
            self.wire.send((None, name, args, {}))

    def close(self) -> None:
        """Close the connection. The receiving thread ends, unless `on_told` blocks it."""
        self.wire.hang_up()
        self.hearing.join(CLOSE_S)
        self.wire.close()

    def _future_of(self, number: int) -> Future[Any]:
        key = "future", number
        future = ServedFuture(lambda: self.tell(CANCEL, key))
        with self._lock:
            self._awaited[key] = future
        return future

    def _hear(self) -> None:
        fault: BaseException | None = None
        try:
            while True:
                self._hear_one()
        except (EOFError, OSError):
            pass
        except BaseException as error:  # in any case, no further answer would be received
            fault = error
        end = self._on_end(fault)
        # Under the lock: a call that starts now either finds the fault, or is among those failed here.
        with self._lock:
            self._fault = end
            awaited, self._awaited = self._awaited, {}
        for future in awaited.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(end)

    def _hear_one(self) -> None:
        key, content, error = self.wire.receive(future_of=self._future_of)
        if key is None:
            try:
                self._on_told(*content)
            except (EOFError, OSError) as own:  # raised by on_told, not by the socket
                raise RuntimeError(f"{content[0]!r} was told, and led to {type(own).__name__}: {own}") from own
            return
        with self._lock:
            future = self._awaited.pop(key)
        if not future.set_running_or_notify_cancel():
            return  # cancelled here while the answer was on its way
        if error is None:
            future.set_result(content)
        else:
            future.set_exception(_raised(*error))
