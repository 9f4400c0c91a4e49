"""The engine as one attempt at an episode sees it.

Nothing that an attempt asked for outlives it: calls that are under way when it ends are cancelled, and later ones are
refused. What it was answered is kept for the episode's next attempt, which so has generated anew only what is missing.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.types import LLMRequest, LLMResponse

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatron_rl.api import Sampler

ENDING_S = 10.0
"""Longest that the end of an attempt waits for the calls that it has cancelled."""

_attempt: ContextVar[Attempt | None] = ContextVar("attempt", default=None)
_asked: ContextVar[Counter[str] | None] = ContextVar("asked", default=None)


class RunBroken(RuntimeError):
    """No episode can go well any more: one that raises this ends the run with these words."""


class AttemptOver(RuntimeError):
    """A task that a workflow left behind asked for something after its attempt had ended."""


class KeptReplies:
    """The replies and rewards of one episode, whole or in part, until it has its group."""

    def __init__(self) -> None:
        self._replies: dict[str, LLMResponse] = {}
        self.since = 0
        """Policy version when the first of them was asked for."""

    def __len__(self) -> int:
        return len(self._replies)

    def begin(self, name: str, req: LLMRequest, *, version: int, oldest_allowed: int) -> LLMResponse:
        """Return the reply of that name as far as it has come; an unfinished one has the stop reason `abort`.

        What `req.begun` brings is taken where there is none yet. One with a token older than `oldest_allowed` begins
        anew.
        """
        if not self._replies:
            self.since = version
        reply = self._replies.get(name, req.begun)
        if reply is None or (reply.output_len and int(reply.sampled.versions.values.min()) < oldest_allowed):
            reply = LLMResponse.nothing(req.input_ids)
        elif reply.stop_reason == "abort":  # whatever still adds to this one, it is another's
            reply = copy.copy(reply)
            if reply.output_len >= req.gconfig.max_new_tokens:  # it was ended in the last moment
                reply.stop_reason = "length"
        self._replies[name] = reply
        return reply

    def newest(self, count: int) -> list[LLMResponse]:
        """Return the last replies that were begun, the newest last."""
        return list(self._replies.values())[-count:]

    def keep(self, name: str, reply: LLMResponse) -> None:
        self._replies[name] = reply

    def clear(self) -> None:
        self._replies.clear()


class Attempt:
    """Has an engine's other methods, too. `async with` is the attempt."""

    def __init__(
        self,
        engine: Sampler,
        kept: KeptReplies,
        *,
        tries: int = 1,
        before_retry: Callable[[int, BaseException], Awaitable[None]] | None = None,
        after_try: Callable[[BaseException | None], None] = lambda error: None,
        oldest_allowed: Callable[[], int] = lambda: 0,
    ) -> None:
        """tries: of a sample, each after the first behind `before_retry(number of failures, the last one)`.
        after_try: is told how each ended, None where it went well. oldest_allowed: version of a kept reply's oldest
        token."""
        self._engine, self._kept, self._oldest_allowed = engine, kept, oldest_allowed
        self.tries, self.before_retry, self._after_try = tries, before_retry, after_try
        self._noted: BaseException | None = None
        self._has_noted = False
        self.is_lost = False
        """A sample has failed in all its tries: another attempt would begin them again."""
        self._is_over = False
        self._asked: Counter[str] = Counter()
        self._calls: dict[object, tuple[asyncio.Task[Any], asyncio.AbstractEventLoop]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def __aenter__(self) -> Attempt:
        _attempt.set(self)  # in the attempt's own task, and those that it starts
        _asked.set(Counter())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel what is under way, and see it ended."""
        self._is_over = True
        here, cancelled = asyncio.get_running_loop(), []
        for task, loop in list(self._calls.values()):
            if loop is here:
                task.cancel()
                cancelled.append(task)
            elif not loop.is_closed():  # a workflow's own, of another thread
                loop.call_soon_threadsafe(task.cancel)
        if cancelled:
            await asyncio.wait(cancelled, timeout=ENDING_S)

    @contextmanager
    def call(self) -> Iterator[None]:
        """End with the attempt whatever the current task does in this block."""
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

    def note(self, error: BaseException | None, *, of_sample: bool = False) -> None:
        """Tell how a try of a sample ended, or how the whole attempt did where that says more: nothing twice."""
        is_known = self._has_noted and (error is None or error is self._noted)
        if of_sample or not is_known:
            self._noted, self._has_noted = error, True
            self._after_try(error)

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Return a reply that this episode has already, or generate what is missing of it."""
        name, version = numbered(request_name(req), self._asked), self._engine.get_version()
        with self.call():
            reply = self._kept.begin(name, req, version=version, oldest_allowed=self._oldest_allowed())
            if reply.stop_reason == "abort":
                reply = await self._engine.agenerate(dataclasses.replace(req, begun=reply))
                self._kept.keep(name, reply)
            return reply


class KeptSteps(Protocol):
    """The steps that an unfinished episode's world did, in this process and in the one that was killed before it."""

    def take(self, name: str) -> dict[str, Any] | None:
        """Return what an earlier process kept under that name."""

    def keep(self, name: str, step: dict[str, Any]) -> None: ...


steps_here: ContextVar[KeptSteps | None] = ContextVar("steps", default=None)
"""The place in which the episode of this code keeps them."""


def call_here() -> AbstractContextManager[None]:
    """End the block together with the attempt that this code runs in, if it runs in one."""
    attempt = _attempt.get()
    return nullcontext() if attempt is None else attempt.call()


def attempt_here() -> Attempt | None:
    """Return the attempt that this code runs in."""
    return _attempt.get()


def ask_anew() -> None:
    """Requests of this task, and of those that it starts, are numbered from the first on: it does something again."""
    _asked.set(Counter())


def numbered(name: str, otherwise: Counter[str], who: str = "") -> str:
    """Tell requests of one name apart by how many came before in this attempt, or this try of a sample.

    who: asks, of several that number the same requests. otherwise: counts those that come from outside, as of a
    thread of the workflow's own.
    """
    asked = _asked.get()
    asked, key = otherwise if asked is None else asked, f"{who} {name}"
    asked[key] += 1
    return f"{name} {asked[key]}"


def request_name(req: LLMRequest) -> str:
    """Sum up what a reply is sampled from, and which sample of the episode it is for."""
    options = [dataclasses.asdict(req.gconfig), req.metadata.get("sample_key")]
    options += [] if req.grammar is None else [req.grammar]
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    digest.update(array("q", req.input_ids).tobytes())
    return digest.hexdigest()[:32]
