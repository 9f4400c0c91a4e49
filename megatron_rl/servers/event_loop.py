"""Event loops that know when something holds them up, and one on a thread, for who calls it from plain functions."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from megatron_rl.launch import process_exit

T = TypeVar("T")
BEAT_S = 1.0
LEAST_BLOCKING_STEPS, MOST_BLOCKING_STEPS = 64, 1024
"""Threads of a loop's pool; one is started when all others are busy."""


class EventLoopThread:
    """Owns one loop and its daemon thread. `run` and `submit` are for all other threads."""

    def __init__(self, name: str, *, blocking_steps: int = LEAST_BLOCKING_STEPS) -> None:
        """blocking_steps: those of `allow_blocking_steps`."""
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        allow_blocking_steps(self.loop, blocking_steps)
        self._is_stopping = False
        self._beat = Beat(self.loop)
        self._thread = process_exit.start_thread(self._main, name=name)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._beat.begin()
        self.loop.run_forever()
        if not self._is_stopping:
            raise RuntimeError("something that ran on it has stopped its event loop")

    @property
    def stands_still_s(self) -> float:
        return self._beat.stands_still_s

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the loop and return its result, or raise what it raised."""
        assert not self.is_current(), "would wait for itself"
        return self.submit(coroutine).result()

    def stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel what still runs, wait for it to end, run `last`, and end the thread."""
        self.run(cancel_others())
        if last is not None:
            self.run(last)
        self._is_stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Beat:
    """A mark that an event loop makes every second, by which other threads see when it stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._at = loop, time.monotonic()

    def begin(self) -> None:
        """Make the first mark. In the loop's thread; whether it runs already does not matter."""
        self._at = time.monotonic()
        self._loop.call_later(BEAT_S, self.begin)

    @property
    def stands_still_s(self) -> float:
        """For how long something that runs on the loop has kept it from all else."""
        return max(0.0, time.monotonic() - self._at - BEAT_S)


def allow_blocking_steps(loop: asyncio.AbstractEventLoop, count: int) -> None:
    """Let so many calls in `asyncio.to_thread` run at once, within the bounds of this module.

    asyncio itself has no more than a few for each core, and whatever waits needs none.
    """
    threads = min(max(count, LEAST_BLOCKING_STEPS), MOST_BLOCKING_STEPS)
    loop.set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="blocking-step"))


async def cancel_others() -> None:
    """Cancel every task of this loop but the caller's, and wait for them to end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_own_thread(call: Callable[[], T], *, name: str) -> T:
    """Return what a blocking call gives, from a thread for it alone: users' steps may have all threads of the pool."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    process_exit.start_thread(run, name=name)
    return await asyncio.wrap_future(future)
