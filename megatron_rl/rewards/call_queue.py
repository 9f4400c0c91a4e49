"""Sends the calls of one event loop to a worker pool, several short calls in one message.

Sending a call and waiting for its answer takes longer than most rewards. A worker answers the calls of a message one
after the other, so the first call without an answer is the one that hangs or has killed the worker. The others are sent
to another worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from megatron_rl.rewards.worker_pool import Worker, WorkerDied, WorkerPool

TOGETHER_S = 0.005
"""Calls are sent together if all of them are expected to take no longer than this."""
HELD_S = 1.0
"""If a worker does not answer a call for this long, the calls sent to it after that one are given to other workers."""
MOST_TOGETHER = 32
MOST_TOGETHER_BYTES = 64 * 1024
"""Maximum size of calls that are sent together. It is smaller than a socket's buffer. Otherwise this process could wait
for the worker to read calls, while the worker waits for this process to read answers."""
FORGETTING = 0.9
"""Each answered call multiplies `_longest_s` by this factor, unless the call took longer than that."""


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
        """Duration of the longest recent call in seconds; infinite before the first call is answered."""
        self._look: asyncio.TimerHandle | None = None

    async def ask(self, frame: bytes, timeout_s: float) -> bytes:
        """Return a worker's answer to a call.

        TimeoutError if the answer takes longer than `timeout_s`, WorkerDied if the worker dies. If the call fails or is
        cancelled after a worker has begun with it, this worker is killed.
        """
        call = Call(frame, timeout_s, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        try:
            self.spread()
        except OSError:  # no free file descriptors
            self._waiting.remove(call)
            raise
        try:
            return await call.answered
        except asyncio.CancelledError:
            for lane in self._lanes:
                lane.give_up(call)
            raise

    def note(self, seconds: float) -> None:
        """Record how long a worker took to answer a call."""
        is_first = self._longest_s == float("inf")
        self._longest_s = seconds if is_first else max(seconds, FORGETTING * self._longest_s)

    def spread(self) -> None:
        """Use one more worker if the present workers would need longer than TOGETHER_S for the waiting calls.

        A worker that has been silent for longer than TOGETHER_S is not counted as present, because it may hang. Each
        worker that is still starting will take at least one call. So if there are no more calls than such workers, none
        is added.
        """
        if not self._waiting or not self.has_room:
            return
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(TOGETHER_S, self._look_again)
        if len(self._waiting) <= sum(lane.is_starting for lane in self._lanes):
            return
        ready = sum(lane.is_starting or lane.silent_s <= TOGETHER_S for lane in self._lanes)
        if not ready or len(self._waiting) * self._longest_s > TOGETHER_S * ready:
            self._lanes.add(Lane(self, self._pool))

    @property
    def has_room(self) -> bool:
        """True if this queue could use one more worker."""
        return len(self._lanes) < self._pool.most

    def _look_again(self) -> None:
        self._look = None
        with suppress(OSError):  # no free file descriptors; the next look may find some
            self.spread()

    def take(self, most: int = MOST_TOGETHER) -> list[Call]:
        """Remove and return the calls that a worker should get next, at most `most`; [] if no call waits."""
        taken: list[Call] = []
        size = 0
        while self._waiting and len(taken) < most:
            call = self._waiting[0]
            size += len(call.frame)
            if taken and ((len(taken) + 1) * self._longest_s > TOGETHER_S or size > MOST_TOGETHER_BYTES):
                break
            self._waiting.popleft()
            if not call.answered.done():  # not cancelled
                taken.append(call)
        return taken

    def give_back(self, calls: deque[Call]) -> None:
        """Put calls back at the front of the queue, because the worker that had them has not begun with them."""
        self._waiting.extendleft(reversed(calls))

    def end(self, lane: Lane) -> None:
        self._lanes.discard(lane)
        with suppress(OSError):
            self.spread()


class Lane:
    """Sends the queue's calls to one worker, until no call waits or another event loop needs the worker."""

    def __init__(self, queue: CallQueue, pool: WorkerPool) -> None:
        self._queue, self._pool = queue, pool
        self._sent: deque[Call] = deque()
        """Calls sent to the worker that it has not answered, oldest first."""
        # Reserved here, so that a call which blocks the event loop cannot take the place first.
        self._place = pool.reserve()
        self.is_starting = not isinstance(self._place, Worker)
        self._is_begun = self._is_late = False
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        """Time of the worker's last answer or, if later, of sending calls to the worker."""
        self._look: asyncio.TimerHandle | None = None
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    @property
    def silent_s(self) -> float:
        """Seconds since the worker's last answer or, if later, since calls were sent."""
        return self._loop.time() - self._heard_s

    def give_up(self, call: Call) -> None:
        """Handle the cancellation of a call. If this lane's worker has begun with the call, kill the worker."""
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
            for call in self._queue.take(1):
                call.answered.set_exception(error)
            return
        is_whole = self.is_starting = False
        try:
            while calls := self._queue.take():
                self._sent.extend(calls)
                await self._answer(worker)
                if self._is_late or self._pool.is_wanted:  # by another event loop
                    break
            is_whole = worker.is_silent and not self._is_late
        except (TimeoutError, WorkerDied) as error:
            failed = self._sent.popleft()
            if isinstance(error, TimeoutError):
                self._queue.note(failed.timeout_s)  # so that others like it do not wait for each other
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
        """Send the calls in `_sent`, and give each its answer as soon as the answer arrives."""
        self._heard_s = self._loop.time()
        async with asyncio.timeout_at(self._heard_s + self._sent[0].timeout_s):
            await worker.send(b"".join(call.frame for call in self._sent))
        self._look = self._loop.call_at(self._heard_s + HELD_S, self._let_go) if len(self._sent) > 1 else None
        try:
            while self._sent:
                if (content := worker.heard()) is None:
                    async with asyncio.timeout_at(self._heard_s + self._sent[0].timeout_s):
                        await worker.receive()
                    continue
                call, self._heard_s = self._sent.popleft(), self._loop.time()
                if not call.answered.done():
                    call.answered.set_result(content)
        finally:
            if self._look is not None:
                self._look.cancel()

    def _let_go(self) -> None:
        """Give back all calls but the first, if that takes too long and the queue may use another worker.

        This worker has already received the calls that are given back, so it is discarded after the first call.
        """
        if len(self._sent) < 2:
            return
        if self.silent_s >= HELD_S and self._queue.has_room:
            first, *others = self._sent
            self._queue.give_back(deque(others))
            self._sent, self._is_late = deque([first]), True
            self._queue.spread()
        else:
            self._look = self._loop.call_later(HELD_S, self._let_go)
