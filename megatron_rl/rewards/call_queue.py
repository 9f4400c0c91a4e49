"""Calls of one event loop to a worker pool. Calls that are known to be short are sent to a worker together.

Sending a call and waiting for its answer takes longer than most rewards. A worker answers the calls of a message one
after the other, so the first one without an answer is the one that hangs or has killed the worker. The others are sent
to another worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from megatron_rl.rewards.worker_pool import Worker, WorkerDied, WorkerPool

TOGETHER_S = 0.005
"""Calls are sent together if all of them are expected to take no longer than this."""
MOST_TOGETHER = 32
MOST_TOGETHER_BYTES = 64 * 1024
"""Less than a socket holds: a worker that waits until its answers are read must not keep this end from writing."""
FORGETTING = 0.9
"""Factor on the longest call so far, with each further call."""


@dataclass(eq=False)
class Call:
    frame: bytes
    timeout_s: float
    answered: asyncio.Future[bytes]


class CallQueue:
    """Sends calls to the pool's workers, from one event loop."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._waiting: deque[Call] = deque()
        self._lanes: set[Lane] = set()
        self._longest_s = float("inf")
        """The longest of the last calls. Infinite before the first one."""

    async def ask(self, frame: bytes, timeout_s: float) -> bytes:
        """Return a worker's answer. TimeoutError if it takes longer than `timeout_s`, WorkerDied if the worker dies.

        A worker that has begun with the call is killed if the call fails or is cancelled.
        """
        call = Call(frame, timeout_s, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self.spread()
        try:
            return await call.answered
        except asyncio.CancelledError:
            for lane in self._lanes:
                lane.give_up(call)
            raise

    def note(self, seconds: float) -> None:
        """Note how long a worker took for a call."""
        is_first = self._longest_s == float("inf")
        self._longest_s = seconds if is_first else max(seconds, FORGETTING * self._longest_s)

    def spread(self) -> None:
        """Occupy one more worker, unless those that this queue has can soon begin with all waiting calls."""
        if self._waiting and len(self._lanes) < self._pool.most:
            if not self._lanes or len(self._waiting) * self._longest_s > TOGETHER_S * len(self._lanes):
                self._lanes.add(Lane(self, self._pool))

    def take(self) -> list[Call]:
        """Return the calls that a worker should get next; none if no call waits."""
        taken: list[Call] = []
        size = 0
        while self._waiting and len(taken) < MOST_TOGETHER:
            call = self._waiting[0]
            size += len(call.frame)
            if taken and ((len(taken) + 1) * self._longest_s > TOGETHER_S or size > MOST_TOGETHER_BYTES):
                break
            self._waiting.popleft()
            if not call.answered.done():  # not cancelled
                taken.append(call)
        return taken

    def give_back(self, calls: deque[Call]) -> None:
        """Put calls that a worker has not begun with at the front."""
        self._waiting.extendleft(reversed(calls))

    def end(self, lane: Lane) -> None:
        self._lanes.discard(lane)
        self.spread()


class Lane:
    """A worker's part of the waiting calls, from its first one until none waits."""

    def __init__(self, queue: CallQueue, pool: WorkerPool) -> None:
        self._queue, self._pool = queue, pool
        self._sent: deque[Call] = deque()
        """Calls that the worker has and has not answered, in order."""
        # Reserved here, so that a call which blocks the event loop cannot take the place first.
        self._place = pool.reserve()
        self._is_begun = False
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._end)

    def give_up(self, call: Call) -> None:
        """Note that a call is cancelled. If the worker has begun with it, the worker is killed."""
        if self._sent and self._sent[0] is call:
            self._task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        if not self._is_begun:  # cancelled before its first step
            self._pool.give_up(self._place)
        self._queue.end(self)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _run(self) -> None:
        self._is_begun = True
        try:
            worker = await self._pool.started(self._place)
        except (WorkerDied, OSError) as error:  # OSError: no free file descriptors
            for call in self._queue.take()[:1]:
                call.answered.set_exception(error)
            return
        is_whole = False
        try:
            while calls := self._queue.take():
                self._sent.extend(calls)
                await self._answer(worker)
                if self._pool.is_wanted:  # by another event loop
                    break
            is_whole = worker.is_silent
        except (TimeoutError, WorkerDied) as error:
            failed = self._sent.popleft()
            if not failed.answered.done():
                failed.answered.set_exception(WorkerDied(self._pool.died()) if isinstance(error, WorkerDied) else error)
        except asyncio.CancelledError:
            self._sent.popleft().answered.cancel()
            raise
        finally:
            self._queue.give_back(self._sent)
            # Also after a cancellation: its late answer would be taken for the next caller's.
            self._pool.release(worker) if is_whole else self._pool.discard(worker)

    async def _answer(self, worker: Worker) -> None:
        """Send the calls, and hand out the answers as they arrive."""
        clock = asyncio.get_running_loop().time
        await worker.send(b"".join(call.frame for call in self._sent))
        deadline = clock() + self._sent[0].timeout_s
        while self._sent:
            if (content := worker.heard()) is None:
                async with asyncio.timeout_at(deadline):
                    await worker.receive()
                continue
            call = self._sent.popleft()
            if not call.answered.done():
                call.answered.set_result(content)
            if self._sent:
                deadline = clock() + self._sent[0].timeout_s
