"""Computes rewards in worker processes: at most so many at a time, each really killed at its deadline.

The event loop writes to a worker's socket and waits for its answer, without a thread between. A worker whose call was
late, cancelled or made no sense is killed with all that it started, and another takes its place. The process that forks
them is replaced too where it dies, unless each dies at once.
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
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import orjson

from megatron_rl.config.import_path import refuse_while_importing
from megatron_rl.launch.start_up import python_path
from megatron_rl.rewards.faults import as_score
from megatron_rl.rewards.worker import LENGTH, Setup

logger = logging.getLogger(__name__)

START_S = 120.0
"""For a first worker, which waits for the imports of the rewards' modules."""
STOP_S = 5.0
SYNCHRONOUS_S = 60.0
"""Deadline of a reward that a workflow calls without awaiting it."""
MOST_QUICK_DEATHS, QUICK_S = 3, 60.0
"""A process that forks workers and lives less than QUICK_S is followed by another at most so many times in a row."""
WORKER_MEMORY_BYTES = 4 << 30
MOST_REQUEST_BYTES, MOST_ANSWER_BYTES = 256 << 20, 1 << 20


class RewardTimeout(RuntimeError):
    """A reward took longer than it may."""


class RewardFailed(RuntimeError):
    """A reward raised, or its process died. Never a reward of 0."""

    def __init__(self, message: str, reward: str = "", place: str = "") -> None:
        """place: file:line of the reward's own code."""
        super().__init__(message)
        self.reward, self.place = reward, place

    @classmethod
    def by(cls, error: str, reward: str, place: str) -> RewardFailed:
        """Say what a reward raised, and where."""
        return cls(f"{error} (reward {reward}{f', {place}' if place else ''})", reward, place)


class WorkersTraceback(Exception):
    """The traceback of what a worker raised: the cause of a RewardFailed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerDied(RuntimeError):
    """A worker's socket ended."""


@dataclass(frozen=True)
class Score:
    value: float | dict[str, float]
    """Or those of its parts."""
    seconds: float


class RewardService:
    """Worker processes that compute rewards: one call computes all of them, in their order. From any thread and loop.

    service = RewardService([("right", "megatron_rl.rewards:exact_match", {})], workers=4)
    arguments = {"prompt": "3+4=", "completions": "7", "prompt_ids": [], "completion_ids": [], "answer": "7"}
    [score] = await service.call(arguments, timeout_s=10.0)  # score.value == 1.0
    service.close()
    """

    def __init__(
        self,
        rewards: Sequence[tuple[str, str, dict[str, Any]]],
        *,
        workers: int,
        import_from: list[str] | None = None,
        stacks: int | None = None,
    ) -> None:
        """rewards: of each its name, import path and further arguments. stacks: an open file for `show_stacks`."""
        refuse_while_importing("a reward service")
        self.names = [name for name, _, _ in rewards]
        self._setup = Setup(
            rewards=list(rewards),
            import_from=import_from,
            sys_path=sys.path,
            folder=tempfile.mkdtemp(prefix="reward-"),
            memory_bytes=WORKER_MEMORY_BYTES,
        )
        self._workers, self._stacks = workers, stacks
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._waiting: deque[Future[Worker | None]] = deque()
        self._count = 0
        self._numbers = itertools.count()
        self._quick_deaths = 0
        self._is_closed = False
        self._start()

    def close(self) -> None:
        """End all workers. May be called twice."""
        self._is_closed = True
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # in a module's import
            self._process.kill()
            self._process.wait()
        self._control.close()
        for worker in self._idle:
            worker.socket.close()
        self._idle.clear()
        shutil.rmtree(self._setup.folder, ignore_errors=True)  # where it was killed

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> list[Score]:
        """Compute the rewards of one reply; the time begins when a worker does."""
        frame = self._frame(arguments)
        self._revive()
        worker = await self._acquire()
        with self._given_back(worker, timeout_s):
            async with asyncio.timeout(timeout_s):
                content = await worker.ask(frame)
        return self._scores(content)

    def call_now(self, arguments: dict[str, Any], timeout_s: float = SYNCHRONOUS_S) -> list[Score]:
        """The same without an event loop, or blocking the one that runs: then no worker can be waited for.

        One more than the bound is started where all are busy.
        """
        frame = self._frame(arguments)
        self._revive()
        with self._lock:
            worker = self._idle.pop() if self._idle else None
            self._count += worker is None
        worker = worker or self._new_worker()
        with self._given_back(worker, timeout_s):
            content = worker.ask_now(frame, timeout_s)
        return self._scores(content)

    @contextmanager
    def _given_back(self, worker: Worker, timeout_s: float) -> Iterator[None]:
        """Release a worker that has answered here, and discard any other."""
        is_whole = False
        try:
            yield
            is_whole = True
        except TimeoutError as error:
            raise self._late(timeout_s) from error
        except WorkerDied as error:
            raise RewardFailed(self._died()) from error
        finally:
            # After a cancellation too: an answer that is still on its way would be taken for the next caller's.
            self._release(worker) if is_whole else self._discard(worker)

    def show_stacks(self) -> None:
        """Have every worker write its stacks to the file `stacks`."""
        with suppress(OSError):  # they are all gone
            tell(self._control, "stacks")

    # -- workers

    def _start(self) -> None:
        """Start the process that forks workers; it removes their folder at its end."""
        shutil.rmtree(self._setup.folder, ignore_errors=True)  # what one before, which was killed, has left
        os.mkdir(self._setup.folder, 0o700)
        # A message is received as it was sent, so that a descriptor comes with the command that it belongs to.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -P: without the current folder in front of the path, which comes with the setup.
        command = [sys.executable, "-P", "-m", "megatron_rl.rewards", "--control", str(theirs.fileno())]
        command += [] if self._stacks is None else ["--stacks", str(self._stacks)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": python_path()},
            pass_fds=[theirs.fileno(), *([] if self._stacks is None else [self._stacks])],
            # A terminal's Ctrl-C is the run's to answer; this process ends with its socket.
            start_new_session=True,
        )
        theirs.close()
        self._control, self._started_s = ours, time.monotonic()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # one that died is found out by who needs it
            pipe.write(pickle.dumps(self._setup))

    def _revive(self) -> None:
        """Start the process that forks workers again where it has died; they died with it."""
        with self._lock:
            if self._is_closed or self._process.poll() is None:
                return
            lived_s = time.monotonic() - self._started_s
            self._quick_deaths = self._quick_deaths + 1 if lived_s < QUICK_S else 0
            if self._quick_deaths > MOST_QUICK_DEATHS:
                return  # who asks for a worker is told so
            logger.warning(
                "the reward service's process ended (exit code %d) after %.0f s; it is started again.",
                self._process.returncode,
                lived_s,
            )
            for worker in self._idle:
                worker.socket.close()
            # The busy ones are counted on until their callers find them dead.
            self._count -= len(self._idle)
            self._idle.clear()
            self._control.close()
            self._start()

    async def _acquire(self) -> Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            waiter: Future[Worker | None] | None = None
            if self._count < self._workers:
                self._count += 1
            else:
                waiter = Future()
                self._waiting.append(waiter)
        worker = await self._wait(waiter) if waiter is not None else None
        if worker is not None:
            return worker
        worker = self._new_worker()
        try:
            async with asyncio.timeout(START_S):
                await worker.hear()
        # A cancelled caller gives the place back too, or there would be one worker less for ever.
        except BaseException as error:
            self._discard(worker)
            if isinstance(error, TimeoutError):
                raise RewardFailed(f"no reward worker was ready within {START_S:g} s.") from error
            if isinstance(error, WorkerDied):
                raise RewardFailed(self._died()) from error
            raise
        worker.is_ready = True
        return worker

    async def _wait(self, waiter: Future[Worker | None]) -> Worker | None:
        """Return the worker that another call gives up, or None for the place of one."""
        try:
            return await asyncio.wrap_future(waiter)
        except asyncio.CancelledError:
            with self._lock:
                # Given at the moment of the cancellation, it is known to nobody else.
                is_given = waiter.done() and not waiter.cancelled()
            if is_given:
                self._release(waiter.result())
            raise

    def _new_worker(self) -> Worker:
        """Start a worker in a place that is counted already."""
        self._revive()  # it may have died while the place was waited for
        ours, theirs = socket.socketpair()
        worker = Worker(next(self._numbers), ours, self._control)
        try:
            tell(worker.control, f"start {worker.number}", theirs.fileno())
        except OSError as error:
            ours.close()
            self._release(None)
            raise RewardFailed(self._died()) from error
        finally:
            theirs.close()
        return worker

    def _release(self, worker: Worker | None) -> None:
        """Give a worker, or the place of one that is gone, to who waits first."""
        with self._lock:
            if worker is not None and worker.control is not self._control:  # dead with the process that forked it
                worker.socket.close()
                worker = None
            if self._count > self._workers and worker is None:  # one that did not wait
                self._count -= 1
                return
            while self._waiting:
                waiter = self._waiting.popleft()
                # False for one that was cancelled; later it no longer can be.
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(worker)
                    return
            if worker is not None and self._count <= self._workers:
                self._idle.append(worker)
                return
            self._count -= worker is None
        if worker is not None:
            self._discard(worker)

    def _discard(self, worker: Worker) -> None:
        """Kill a worker and all that it has started."""
        worker.socket.close()
        with suppress(OSError):  # they are all gone
            tell(worker.control, f"end {worker.number}")
        self._release(None)

    # -- words

    def _frame(self, arguments: dict[str, Any]) -> bytes:
        content = pickle.dumps(arguments, protocol=5)
        if len(content) > MOST_REQUEST_BYTES:
            raise ValueError(
                f"a reward's arguments take {len(content)} bytes; they may take {MOST_REQUEST_BYTES}. Keep large "
                f"things out of the prompts."
            )
        return LENGTH.pack(len(content)) + content

    def _late(self, timeout_s: float) -> RewardTimeout:
        return RewardTimeout(
            f"reward {', '.join(self.names)}: no reward within {timeout_s:g} s, and its worker was killed. Make it "
            f"faster, or raise the workflow's reward_timeout_s."
        )

    def _died(self) -> str:
        """Say that a worker's end came unasked."""
        code = self._process.poll()
        who = "a worker" if code is None else f"the service's process (exit code {code})"
        return (
            f"reward {', '.join(self.names)}: {who} died. Its words are in the rollout process's log; of a worker that "
            f"the kernel killed it has none: look for a lack of memory, or a call of os._exit."
        )

    def _scores(self, content: bytes) -> list[Score]:
        """Read an answer; it says what a worker found, which is no reason to believe its form."""
        try:
            answer = orjson.loads(content)
            if "error" in answer:
                name, words, where, place = map(str, answer["error"])
                raise RewardFailed.by(words, name, place) from WorkersTraceback(where)
            scores = [Score(as_score(value), float(seconds)) for value, seconds in answer["values"]]
            if len(scores) == len(self.names):
                return scores
        except (ValueError, TypeError, KeyError) as error:
            raise RewardFailed(
                f"reward {', '.join(self.names)}: its worker gave no answer that can be read."
            ) from error
        raise RewardFailed(f"reward {', '.join(self.names)}: its worker gave {len(scores)} values.")


def tell(control: socket.socket, message: str, *descriptors: int) -> None:
    """Say something to the process that forks workers. OSError where it is gone."""
    socket.send_fds(control, [message.encode()], descriptors)


class Worker:
    """The service's end of one worker."""

    def __init__(self, number: int, end: socket.socket, control: socket.socket) -> None:
        """control: of the process that forked it, which ends it."""
        self.number, self.socket, self.control, self.is_ready = number, end, control, False
        end.setblocking(False)

    async def ask(self, frame: bytes) -> bytes:
        """Return the content of the answer."""
        try:
            await asyncio.get_running_loop().sock_sendall(self.socket, frame)
        except OSError as error:
            raise WorkerDied from error
        return await self.hear()

    async def hear(self) -> bytes:
        """Return the content of the next frame."""
        loop, frame = asyncio.get_running_loop(), bytearray()
        while (missing := missing_bytes(frame)) > 0:
            frame += await received(loop.sock_recv(self.socket, missing))
        return bytes(frame[LENGTH.size :])

    def ask_now(self, frame: bytes, timeout_s: float) -> bytes:
        """Blocking. A worker that is new says first that it is ready."""
        try:
            if not self.is_ready:
                self._hear_now(time.monotonic() + START_S)
                self.is_ready = True
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
        frame = bytearray()
        while (missing := missing_bytes(frame)) > 0:
            # 0 would be non-blocking, and its error not a timeout's.
            self.socket.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self.socket.recv(missing)
            if not part:
                raise WorkerDied
            frame += part
        return bytes(frame[LENGTH.size :])


async def received(receiving: Awaitable[bytes]) -> bytes:
    try:
        part = await receiving
    except OSError as error:
        raise WorkerDied from error
    if not part:
        raise WorkerDied
    return part


def missing_bytes(frame: bytearray) -> int:
    """Return how many bytes to ask for next; 0 where the frame is whole. A frame has the next one not before an answer.

    WorkerDied for one that is longer than an answer may be: its worker is not to be listened to any more.
    """
    if len(frame) < LENGTH.size:
        # With its length a small answer has come as a whole: one call of the system instead of two.
        return 1 << 16
    (length,) = LENGTH.unpack_from(frame)
    if length > MOST_ANSWER_BYTES:
        raise WorkerDied(f"it announced an answer of {length} bytes")
    return max(0, LENGTH.size + length - len(frame))
