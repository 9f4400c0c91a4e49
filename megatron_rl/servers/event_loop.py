"""A thread that runs an event loop, so that a synchronous trainer can use asynchronous HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
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
        """blocking_steps: calls in `asyncio.to_thread` that may run at once, within the bounds of this module; asyncio
        itself has no more than a few for each core, and whatever waits needs none."""
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        threads = min(max(blocking_steps, LEAST_BLOCKING_STEPS), MOST_BLOCKING_STEPS)
        self.loop.set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="blocking-step"))
        self._is_stopping = False
        self._beat_at = time.monotonic()
        self._thread = process_exit.start_thread(self._main, name=name)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._beat()
        self.loop.run_forever()
        if not self._is_stopping:
            raise RuntimeError("something that ran on it has stopped its event loop")

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self.loop.call_later(BEAT_S, self._beat)

    @property
    def stands_still_s(self) -> float:
        """For how long something that runs on it has kept it from all else."""
        return max(0.0, time.monotonic() - self._beat_at - BEAT_S)

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
        self.run(self._cancel_all())
        if last is not None:
            self.run(last)
        self._is_stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
