"""The samples of an episode beside each other: one that fails is tried again alone, and none outlives another's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from megatron_rl.api import RequestRefused, together
from megatron_rl.workflows.attempts import AttemptOver, RunBroken, ask_anew, attempt_here

T = TypeVar("T")


async def samples(makers: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """The same of an episode's samples, each of which is tried as often as an episode is.

    A sample's requests to the engine are those of its first try as long as they ask for the same: it is given the
    replies that it had.
    """
    return await together([tried(make) for make in makers])


async def tried(make: Callable[[], Awaitable[T]]) -> T:
    attempt, failures = attempt_here(), 0
    while True:
        ask_anew()
        try:
            found = await make()
        except (RequestRefused, RunBroken, AttemptOver):
            raise
        except Exception as error:  # a reward's, an environment's or an agent's: users' code may raise anything
            task, failures = asyncio.current_task(), failures + 1
            if attempt is None or attempt.before_retry is None or (task is not None and task.cancelling()):
                raise
            attempt.note(error, of_sample=True)
            if failures >= attempt.tries:
                attempt.is_lost = True
                raise
            await attempt.before_retry(failures, error)
        else:
            if attempt is not None:
                attempt.note(None, of_sample=True)
            return found
