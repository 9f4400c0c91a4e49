"""Threads for agents, which may block: at most so many at a time, and of those that never end the run hears."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from megatron_rl.workflows.attempts import RunBroken

logger = logging.getLogger(__name__)

MOST_ABANDONED = 64
"""Threads that go on after their agents' time; with more of them the run ends, before its host is out of threads."""


class AgentTimeout(RuntimeError):
    """An agent took longer than it may. Its requests are refused from then on, which ends most of them."""


class AgentThreads:
    """The agents' threads of one workflow. Rewards and tools have another pool, as a few agents would block it."""

    def __init__(self, name: str, most: int) -> None:
        self.name = name
        self._free = asyncio.Semaphore(most)
        self._abandoned: set[threading.Thread] = set()

    @property
    def abandoned(self) -> int:
        """How many threads go on though nobody waits for them any more."""
        self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
        return len(self._abandoned)

    async def run(self, call: Callable[[], Any], *, timeout_s: float) -> Any:
        """Return what the call returns, at most `timeout_s` after it has begun.

        AgentTimeout after that; the thread goes on until it ends by itself. RunBroken where too many do.
        """
        async with self._free:
            if (count := self.abandoned) > MOST_ABANDONED:
                raise RunBroken(
                    f"agent {self.name}: {count} of its threads have not ended, though their time is over and their "
                    f"requests are refused. Nothing can end a thread: let the agent give up what it waits for."
                )
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Any] = loop.create_future()
            thread = threading.Thread(target=run_and_tell, args=(call, loop, future), name="agent", daemon=True)
            thread.start()
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    return await future
            except TimeoutError as error:
                if not limit.expired():  # it is the agent's own
                    raise
                raise AgentTimeout(
                    f"agent {self.name}: did not end within {timeout_s:g} s ({self.abandoned} threads go on though "
                    f"their time was over before); raise the workflow's agent_timeout_s, or let it give up earlier."
                ) from error
            finally:
                if thread.is_alive():  # its last lines, or for ever
                    self._abandoned.add(thread)


def run_and_tell(call: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
    """In the thread."""

    def set_outcome(value: Any, error: BaseException | None) -> None:
        if future.done():  # given up
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    value, error = None, None
    try:
        value = call()
    except BaseException as raised:  # goes to the one who waits
        error = raised
        # No future takes the one, and from a task the others would end the event loop with all its episodes.
        if isinstance(raised, StopIteration) or not isinstance(raised, Exception):
            error = RuntimeError(f"the agent ended by {type(raised).__name__}: {raised}")
            error.__cause__ = raised
    if not loop.is_closed():
        loop.call_soon_threadsafe(set_outcome, value, error)
