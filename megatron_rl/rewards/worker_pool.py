"""A bounded pool of worker processes. A discarded worker is killed with all processes it started, and replaced.

The event loop writes to a worker's socket and awaits the answer, without threads. The process that forks the workers
(worker.py) is also replaced if it dies, unless it repeatedly dies soon after its start.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, TypeAlias

from megatron_rl.launch.start_up import python_path
from megatron_rl.rewards.worker import LENGTH, Setup

logger = logging.getLogger(__name__)

START_S = 120.0
"""Time limit for the start of a worker in seconds. It includes the forking process's imports, which the first workers
wait for."""
STOP_S = 5.0
MOST_QUICK_DEATHS, QUICK_S = 3, 60.0
"""A forking process that dies within QUICK_S is replaced at most MOST_QUICK_DEATHS times in a row."""
MOST_REQUEST_BYTES, MOST_ANSWER_BYTES = 256 << 20, 1 << 20
RECEIVED_BYTES = 1 << 16


class WorkerDied(RuntimeError):
    """A worker process, or the process that forks the workers, exited unexpectedly."""


class WorkerPool:
    """Forked workers that answer requests, usable from any thread and event loop.

    pool = WorkerPool("reward", "megatron_rl.rewards.worker:computing", {"rewards": rewards}, workers=4)
    worker = await pool.acquire()
    content = await worker.ask(pool.frame(request))  # then pool.release(worker), or pool.discard(worker)
    """

    def __init__(
        self,
        kind: str,
        prepare: str,
        given: dict[str, Any],
        *,
        workers: int,
        memory_bytes: int = 0,
        stacks: int | None = None,
    ) -> None:
        """kind: the kind of work, named in messages. prepare, given, memory_bytes: as in worker.Setup.

        workers: maximum number of workers. stacks: descriptor of an open file for `show_stacks`.
        """
        self.kind, folder = kind, tempfile.mkdtemp(prefix=f"{kind}-")
        self._setup = Setup(prepare=prepare, given=given, sys_path=sys.path, folder=folder, memory_bytes=memory_bytes)
        self.most, self._stacks = workers, stacks
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._waiting: deque[tuple[int, asyncio.Future[Worker | None]]] = deque()
        """Thread and future of each call that waits for a worker, or for a slot in which it may start one."""
        self._count = 0
        self._numbers = itertools.count()
        self._quick_deaths = 0
        self._is_closed = False
        self._start()

    def close(self) -> None:
        """Kill all workers and free the pool's resources. May be called twice."""
        self._is_closed = True
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # it is still importing a module
            self.process.kill()
            self.process.wait()
        self._control.close()
        for worker in self._idle:
            worker.socket.close()
        self._idle.clear()
        shutil.rmtree(self._setup.folder, ignore_errors=True)  # still there if the process was killed

    def show_stacks(self) -> None:
        """Make every worker write its stack traces to the file `stacks`."""
        with suppress(OSError):  # the processes are gone
            tell(self._control, "stacks")

    def _start(self) -> None:
        """Start the process that forks workers. It removes the workers' folder when it exits."""
        shutil.rmtree(self._setup.folder, ignore_errors=True)  # left by a killed predecessor
        os.mkdir(self._setup.folder, 0o700)
        # Message boundaries are kept, so that a descriptor arrives with the command that it belongs to.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -P keeps the current folder out of the import path, which comes with the setup.
        command = [sys.executable, "-P", "-m", "megatron_rl.rewards", "--control", str(theirs.fileno())]
        given = [theirs.fileno()]
        if self._stacks is not None:
            command += ["--stacks", str(self._stacks)]
            given.append(self._stacks)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": python_path()},
            pass_fds=given,
            # Ctrl-C in a terminal must only reach the run. This process ends when its socket closes.
            start_new_session=True,
        )
        theirs.close()
        self._control, self._started_s = ours, time.monotonic()
        assert self.process.stdin is not None
        # if the process has died, the next acquire finds out
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(pickle.dumps(self._setup))

    def _revive(self) -> None:
        """Restart the process that forks workers if it has died. Its workers have died with it."""
        with self._lock:
            if self._is_closed or self.process.poll() is None:
                return
            lived_s = time.monotonic() - self._started_s
            self._quick_deaths = self._quick_deaths + 1 if lived_s < QUICK_S else 0
            if self._quick_deaths > MOST_QUICK_DEATHS:
                return  # the next acquire raises WorkerDied
            logger.warning(
                "the %s service's process ended (exit code %d) after %.0f s; it is started again.",
                self.kind,
                self.process.returncode,
                lived_s,
            )
            for worker in self._idle:
                worker.socket.close()
            # Busy workers still count until their callers find them dead.
            self._count -= len(self._idle)
            self._idle.clear()
            self._control.close()
            self._start()

    async def acquire(self, log: str = "") -> Worker:
        """Wait for an idle worker, or start one if there is room. WorkerDied if none can be started.

        log: file to which a newly started worker's output is appended, up to worker.MOST_PRINTED_BYTES.
        """
        return await self.started(self.reserve(), log)

    def reserve(self) -> Place:
        """Take an idle worker, a slot for a new worker, or else a place in the queue for one of these.

        Pass the result to `started` to get the worker, or to `give_up`.
        """
        self._revive()
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._count < self.most:
                self._count += 1
                return None
            waiter: asyncio.Future[Worker | None] = asyncio.get_running_loop().create_future()
            self._waiting.append((threading.get_ident(), waiter))
            return waiter

    def give_up(self, place: Place) -> None:
        """Release what `reserve` took."""
        if not isinstance(place, asyncio.Future):
            self.release(place)
        elif not place.cancel() and not place.cancelled():
            self.release(place.result())

    async def started(self, place: Place, log: str = "") -> Worker:
        """Return the worker for a place that `reserve` returned. Wait for the worker or start it, if needed.

        log, errors: as for `acquire`.
        """
        try:
            worker = await place if isinstance(place, asyncio.Future) else place
        except asyncio.CancelledError:  # perhaps just after another call gave it a worker
            self.give_up(place)
            raise
        if worker is not None:
            return worker
        worker = self._new_worker(log)
        try:
            async with asyncio.timeout(START_S):
                await worker.hear()
        # A cancelled caller must give its slot back too, or the pool would shrink for good.
        except BaseException as error:
            self.discard(worker)
            if isinstance(error, TimeoutError):
                raise WorkerDied(f"no {self.kind} worker was ready within {START_S:g} s.") from error
            if isinstance(error, WorkerDied):
                raise WorkerDied(self.died()) from error
            raise
        return worker

    @property
    def is_wanted(self) -> bool:
        """True if a call waits for a worker."""
        return bool(self._waiting)

    def ask_now(self, frame: bytes, timeout_s: float) -> bytes:
        """Send a frame and return the content of the answer, blocking, with or without a running event loop.

        This does not wait for a free worker: if all are busy, it starts one more, even above the limit. TimeoutError if
        the answer takes longer than `timeout_s`, WorkerDied if the worker dies.
        """
        self._revive()
        with self._lock:
            idle = self._idle.pop() if self._idle else None
            self._count += idle is None
        worker, is_whole = idle or self._new_worker(), False
        try:
            content = worker.ask_now(frame, timeout_s, is_new=idle is None)
            is_whole = worker.is_silent
            return content
        except WorkerDied as error:
            raise WorkerDied(self.died()) from error
        finally:
            # Also after an interrupt: its late answer would be taken for the next caller's.
            self.release(worker) if is_whole else self.discard(worker)

    def _give(self, waiter: asyncio.Future[Worker | None], worker: Worker | None) -> None:
        """Give a worker or a slot to a call that waits in the event loop of another thread. Runs in that loop."""
        if waiter.done():  # cancelled meanwhile
            self.release(worker)
        else:
            waiter.set_result(worker)

    def _new_worker(self, log: str = "") -> Worker:
        """Start a worker in a slot that the caller has already taken."""
        try:
            self._revive()  # it may have died while this call waited for the slot
            ours, theirs = socket.socketpair()
        except OSError:  # no free file descriptors
            self.release(None)
            raise
        worker = Worker(next(self._numbers), ours, self._control)
        try:
            tell(worker.control, f"start {worker.number} {log}", theirs.fileno())
        except OSError as error:
            ours.close()
            self.release(None)
            raise WorkerDied(self.died()) from error
        finally:
            theirs.close()
        return worker

    def release(self, worker: Worker | None) -> None:
        """Give a worker to the first call that waits for one. If `worker` is None, only give its slot."""
        with self._lock:
            if worker is not None and worker.control is not self._control:  # died with the process that forked it
                worker.socket.close()
                worker = None
            if self._count > self.most and worker is None:  # the slot of one above the limit
                self._count -= 1
                return
            while self._waiting:
                thread, waiter = self._waiting.popleft()
                with suppress(RuntimeError):  # the waiter's loop is closed, so nobody waits there
                    if thread != threading.get_ident():
                        waiter.get_loop().call_soon_threadsafe(self._give, waiter, worker)
                        return
                    if not waiter.done():
                        waiter.set_result(worker)
                        return
            if worker is not None and self._count <= self.most:
                self._idle.append(worker)
                return
            self._count -= worker is None
        if worker is not None:
            self.discard(worker)

    def discard(self, worker: Worker, *, is_alone: bool = False) -> None:
        """Kill a worker and all processes it started. is_alone: True if it has reported that no child is left."""
        worker.socket.close()
        with suppress(OSError):  # the processes are gone
            tell(worker.control, f"{'end' if is_alone else 'sweep'} {worker.number}")
        self.release(None)

    def frame(self, request: Any) -> bytes:
        """Return a request as the frame for `Worker.ask`. ValueError if it exceeds MOST_REQUEST_BYTES."""
        content = pickle.dumps(request, protocol=5)
        if len(content) > MOST_REQUEST_BYTES:
            raise ValueError(
                f"a {self.kind}'s arguments take {len(content)} bytes; they may take {MOST_REQUEST_BYTES}. Keep large "
                f"things out of the prompts."
            )
        return LENGTH.pack(len(content)) + content

    def died(self) -> str:
        """Return the error message for a worker that exited unexpectedly."""
        code = self.process.poll()
        who = "a worker" if code is None else f"the service's process (exit code {code})"
        return (
            f"{who} died. Its output is in the rollout process's log. Without any, the kernel may have killed it: look "
            f"for a lack of memory, or a call of os._exit."
        )


def tell(control: socket.socket, message: str, *descriptors: int) -> None:
    """Send a command to the process that forks workers. OSError if it is gone."""
    socket.send_fds(control, [message.encode()], descriptors)


class Worker:
    """The pool's end of one worker."""

    def __init__(self, number: int, end: socket.socket, control: socket.socket) -> None:
        """control: socket of the process that forks and kills the worker."""
        self.number, self.socket, self.control = number, end, control
        end.setblocking(False)
        self._received = bytearray()
        """Bytes received from the worker that `heard` has not returned yet."""

    async def ask(self, frame: bytes) -> bytes:
        """Send a frame and return the content of the answer."""
        await self.send(frame)
        return await self.hear()

    async def send(self, frames: bytes) -> None:
        """Send one frame or several. Several frames must together fit into the socket's buffer."""
        try:
            await asyncio.get_running_loop().sock_sendall(self.socket, frames)
        except OSError as error:
            raise WorkerDied from error

    async def hear(self) -> bytes:
        """Return the content of the next frame."""
        while (content := self.heard()) is None:
            await self.receive()
        return content

    def heard(self) -> bytes | None:
        """Return the content of the next frame, or None if the frame has not arrived as a whole.

        WorkerDied if the frame exceeds MOST_ANSWER_BYTES, because the worker can no longer be trusted.
        """
        if len(self._received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._received)
        if not 0 <= length <= MOST_ANSWER_BYTES:
            raise WorkerDied(f"it announced an answer of {length} bytes")
        end = LENGTH.size + length
        if len(self._received) < end:
            return None
        content = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        return content

    async def receive(self) -> None:
        """Wait for the next bytes of an answer."""
        try:
            part = await asyncio.get_running_loop().sock_recv(self.socket, RECEIVED_BYTES)
        except OSError as error:
            raise WorkerDied from error
        if not part:
            raise WorkerDied
        self._received += part

    @property
    def is_silent(self) -> bool:
        """False if the worker has sent more bytes than its answers had. It can then no longer be trusted."""
        return not self._received

    def ask_now(self, frame: bytes, timeout_s: float, *, is_new: bool) -> bytes:
        """Send a frame and return the content of the answer, like `ask`, but block this thread until then.

        is_new: True to wait first until the worker reports that it is ready.
        """
        try:
            if is_new:
                self._hear_now(time.monotonic() + START_S)
            deadline = time.monotonic() + timeout_s
            self.socket.settimeout(timeout_s)
            self.socket.sendall(frame)
            return self._hear_now(deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise WorkerDied from error
        finally:
            self.socket.setblocking(False)

    def _hear_now(self, deadline: float) -> bytes:
        while (content := self.heard()) is None:
            # 0 would mean non-blocking, which raises another error than a timeout.
            self.socket.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self.socket.recv(RECEIVED_BYTES)
            if not part:
                raise WorkerDied
            self._received += part
        return content


Place: TypeAlias = Worker | asyncio.Future[Worker | None] | None
"""What `reserve` took: an idle worker, a place in the queue (a future), or a slot for a new worker (None)."""
