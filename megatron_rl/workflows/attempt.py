"""The samples and calls that an attempt at an episode has in flight. They are cancelled when the attempt ends."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

ENDING_S = 10.0
"""Maximum time to wait for an attempt's cancelled calls when the attempt ends."""


class RunBroken(RuntimeError):
    """No episode can succeed any more. Raising this in an episode ends the run with this message."""


class AttemptOver(RuntimeError):
    """A task left over from a workflow made a call after its attempt had ended."""


class Attempt:
    """The samples and calls that an attempt at an episode has in flight, and the last outcome of its samples."""

    def __init__(self) -> None:
        self.is_lost = self.has_noted = False
        self.noted: BaseException | None = None
        self._is_over = False
        self._calls: dict[object, tuple[asyncio.Task[Any], asyncio.AbstractEventLoop]] = {}

    @contextmanager
    def call(self) -> Iterator[None]:
        """Register the current task for the duration of the block, so that the attempt's end cancels it."""
        if self._is_over:
            raise AttemptOver(
                "the attempt at the episode that this call belongs to has ended, by another task's error or the "
                "workflow's return; await in arun_episode all that it asks for."
            )
        task, key = asyncio.current_task(), object()
        assert task is not None
        self._calls[key] = task, asyncio.get_running_loop()
        try:
            yield
        finally:
            del self._calls[key]

    async def end(self) -> None:
        """Cancel the samples and calls in flight, and wait at most ENDING_S for them to end.

        A task that is being cancelled already, as by asyncio.gather, is cancelled again only after that time: a second
        cancellation would interrupt its cleaning up.
        """
        self._is_over = True
        here, cancelled = asyncio.get_running_loop(), []
        for task, loop in dict.fromkeys(self._calls.values()):  # a sample's task occurs again for its call
            if loop is here:
                if not task.cancelling():
                    task.cancel()
                cancelled.append(task)
            elif not loop.is_closed():  # on another thread, started by a workflow
                loop.call_soon_threadsafe(task.cancel)
        if cancelled:
            _, left = await asyncio.wait(cancelled, timeout=ENDING_S)
            for task in left:
                task.cancel()


current_attempt: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar("attempt", default=None)


def call_here() -> AbstractContextManager[None]:
    """Return a context manager whose block is cancelled when the current attempt ends.

    Outside an attempt, the context manager does nothing.
    """
    attempt = current_attempt.get()
    return nullcontext() if attempt is None else attempt.call()
