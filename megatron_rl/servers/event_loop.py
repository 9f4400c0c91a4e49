"""An event loop on a thread, for who calls it from plain functions, and what is awaited on such loops."""

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
"""Threads of a loop's pool; one is started when all others are busy."""


class EventLoopThread:
    """Owns one loop and its daemon thread. `run` and `submit` are for all other threads.

    thread = EventLoopThread("rollout")
    print(thread.run(asyncio.sleep(1, "slept")))
    thread.stop()
    """

    def __init__(self, name: str, *, blocking_steps: int = LEAST_BLOCKING_STEPS) -> None:
        """blocking_steps: those of `allow_blocking_steps`."""
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
        if not self._is_stopping:  # to go on without a loop would leave everyone waiting who has asked for something
            raise RuntimeError("something that ran on it has stopped its event loop")

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the loop and return its result, or raise what it raised."""
        assert threading.current_thread() is not self._thread, "would wait for itself"
        return self.submit(coroutine).result()

    def stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel what still runs, wait for it to end, run `last`, and end the thread."""
        self.run(cancel_others())  # before `last`, which closes what these would still use
        if last is not None:
            self.run(last)
        self._is_stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


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
    await asyncio.gather(*tasks, return_exceptions=True)  # one that fails while it ends keeps no other from ending


async def in_own_thread(call: Callable[[], T], *, name: str) -> T:
    """Return what a blocking call gives, from a thread for it alone: users' steps may have all threads of the pool."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # also SystemExit: who awaits it would wait for ever
            future.set_exception(error)

    process_exit.start_thread(run, name=name)
    return await asyncio.wrap_future(future)
