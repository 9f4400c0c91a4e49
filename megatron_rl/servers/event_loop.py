"""An event loop on its own thread, for use from code that is not asynchronous, and helpers for blocking work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from megatron_rl.life import process_exit
from megatron_rl.life.beat import Beat, HoldWatch

T = TypeVar("T")

LEAST_BLOCKING_STEPS, MOST_BLOCKING_STEPS = 64, 1024


class EventLoopThread:
    """An event loop that runs on a daemon thread of its own. Other threads call `run` and `submit`.

    thread = EventLoopThread("rollout")
    print(thread.run(asyncio.sleep(1, "slept")))
    thread.stop()
    """

    def __init__(self, name: str, *, blocking_steps: int = LEAST_BLOCKING_STEPS) -> None:
        """Start the thread, called `name`. blocking_steps: the count for `allow_blocking_steps`."""
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        allow_blocking_steps(self.loop, blocking_steps)
        self._is_stopping = False
        self._thread = process_exit.start_thread(self._main, name=name)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        beat = Beat(self.loop)
        beat.begin()
        watch = HoldWatch(beat)
        watch.begin()
        self.loop.run_forever()
        watch.end()
        if not self._is_stopping:  # without the loop, everyone who awaits something on it would wait forever
            raise RuntimeError("something that ran on it has stopped its event loop")

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the loop and return its result, or raise its error."""
        assert threading.current_thread() is not self._thread, "would wait for itself"
        return self.submit(coroutine).result()

    def stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel all tasks of the loop, wait until they have ended, run the coroutine `last`, and end the thread."""
        self.run(cancel_others())  # before `last`, which closes what they use
        if last is not None:
            self.run(last)
        self._is_stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def allow_blocking_steps(loop: asyncio.AbstractEventLoop, count: int) -> None:
    """Let `count` calls of `asyncio.to_thread` run concurrently on a loop.

    The count is clamped to LEAST_BLOCKING_STEPS and MOST_BLOCKING_STEPS. asyncio by default allows only a few threads
    per core. A thread is started only when all others are busy.
    """
    threads = min(max(count, LEAST_BLOCKING_STEPS), MOST_BLOCKING_STEPS)
    loop.set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="blocking-step"))


async def cancel_others() -> None:
    """Cancel every other task of this loop, and wait for them to end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)  # an error of one task must not affect the others


async def in_own_thread(call: Callable[[], T], *, name: str) -> T:
    """Return the result of a blocking call, which runs in a new thread called `name`.

    The loop's pool of threads is not used, because users' blocking steps may occupy it completely.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # also SystemExit, or the caller would wait forever
            future.set_exception(error)

    process_exit.start_thread(run, name=name)
    return await asyncio.wrap_future(future)
