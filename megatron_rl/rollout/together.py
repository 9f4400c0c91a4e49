"""The samples of an episode beside each other: one that fails is tried again alone, and none outlives another's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from megatron_rl.rollout.attempts import AttemptOver, RunBroken, ask_anew, attempt_here
from megatron_rl.rollout.server_client import RequestRefused

T = TypeVar("T")


async def together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Await all at once and return their results in order.

    Where one fails the others are cancelled, and have ended when its error is raised. (asyncio.gather would let them go
    on, and asyncio.TaskGroup before Python 3.13 leaves its own task marked as cancelled.)
    """
    failures: list[BaseException] = []

    async def one(awaitable: Awaitable[T]) -> T:
        try:
            return await awaitable
        except BaseException as error:
            failures.append(error)
            raise

    tasks = [asyncio.ensure_future(one(awaitable)) for awaitable in awaitables]
    if not tasks:
        return []
    try:
        pending: set[asyncio.Task[T]] = set(tasks)
        while pending and not failures:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if failures:
            raise failures[0]
        return [task.result() for task in tasks]
    finally:
        under_way = [task for task in tasks if not task.done()]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # is known


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
            return await make()
        except (RequestRefused, RunBroken, AttemptOver):
            raise
        except Exception as error:  # a reward's, an environment's or an agent's: users' code may raise anything
            task, failures = asyncio.current_task(), failures + 1
            if attempt is None or attempt.before_retry is None or (task is not None and task.cancelling()):
                raise
            if failures >= attempt.tries:
                attempt.is_lost = True
                raise
            await attempt.before_retry(failures, error)
