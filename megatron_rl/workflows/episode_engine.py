"""The engine that a workflow is given: one episode's replies, samples and retries.

An executor makes one EpisodeEngine for each attempt at an episode. Who tries again, and what is kept:

    what fails                  who tries again                     at most                     kept
    a request to a server       SamplingClient, another server      4 times                     tokens so far
    one sample of `samples`     EpisodeEngine, this sample alone    rollout.episode_attempts    replies
    all else in a workflow      RolloutExecutor, the episode        rollout.episode_attempts    replies
    the process                 the next process, from its journal  rollout.journal_replies     whole replies, steps

Nothing that an attempt asked for outlives it: calls that are under way when it ends are cancelled, and later ones are
refused.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import dataclasses
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megatron_rl.api import KeptSteps, RequestRefused, Sampler, together
from megatron_rl.types import LLMRequest, LLMResponse

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

Item = TypeVar("Item")
T = TypeVar("T")

ENDING_S = 10.0
"""Longest that the end of an attempt waits for the calls that it has cancelled."""


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


class EpisodeRecord(KeptSteps, Protocol):
    """One episode's part of a journal: what an earlier process had of it, and what this one adds."""

    def take_reply(self, name: str, version: int) -> LLMResponse | None:
        """Return the reply of that name, once, if a trainer at `version` may still train it."""

    def keep_reply(self, name: str, reply: LLMResponse) -> None: ...


@dataclasses.dataclass(kw_only=True)
class Retries:
    """How often a sample is tried, and who is told."""

    most: int = 1
    before: Callable[[int, BaseException], Awaitable[None]]
    """Awaited before each further try, with the number of failures and the last one."""
    after_try: Callable[[BaseException | None], None] = lambda error: None
    """Told how each try ended; None: it went well."""


class EpisodeEngine(Sampler):
    """One attempt at an episode, from `start` to `end`.

    engine = EpisodeEngine(client, KeptReplies(), Retries(before=wait))
    try:
        group = await engine.start(lambda: workflow.arun_episode(engine, data))
    finally:
        await engine.end()

    Equal requests are told apart by how many came before. A sample has a numbering of its own, so that its next try
    is given the replies that the last one had.
    """

    def __init__(
        self,
        engine: Sampler,
        kept: KeptReplies,
        retries: Retries,
        *,
        record: EpisodeRecord | None = None,
        oldest_allowed: Callable[[], int] = lambda: 0,
    ) -> None:
        """kept: the episode's replies of earlier attempts. oldest_allowed() is the version of a kept reply's oldest
        token. record: the journal's, where it keeps replies."""
        self._engine, self._kept, self._record, self.steps = engine, kept, record, record
        self._retries, self._oldest_allowed = retries, oldest_allowed
        self._attempt = Attempt()
        self._asked: Counter[str] = Counter()

    def start(self, episode: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Start the episode in a task of its own: a workflow may leave that marked as cancelled."""
        context = contextvars.copy_context()
        context.run(_attempt.set, self._attempt)
        return context.run(lambda: asyncio.ensure_future(episode()))

    async def end(self) -> None:
        """Cancel whatever the attempt has left behind, and see it ended."""
        await self._attempt.end()

    def get_version(self) -> int:
        return self._engine.get_version()

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Return a reply that this episode has already, or generate what is missing of it."""
        name, version = self._number(request_name(req)), self._engine.get_version()
        with self._attempt.call():
            restored = self._record.take_reply(name, version) if self._record is not None else None
            if restored is not None:
                req = dataclasses.replace(req, begun=restored)
            reply = self._kept.begin(name, req, version=version, oldest_allowed=self._oldest_allowed())
            if reply.stop_reason == "abort":
                reply = await self._engine.agenerate(dataclasses.replace(req, begun=reply))
                self._kept.keep(name, reply)
                if self._record is not None:
                    self._record.keep_reply(name, reply)
            return reply

    def samples(
        self, make: Callable[[Sampler, Item], Awaitable[T]], items: Iterable[Item]
    ) -> Coroutine[Any, Any, list[T]]:
        """Make one sample of each item, all at the same time; one that fails is tried again alone.

        Where one has failed for good, the others are cancelled and its error is raised.
        """
        return together([self._sample(make, item) for item in items])

    async def _sample(self, make: Callable[[Sampler, Item], Awaitable[T]], item: Item) -> T:
        failures = 0
        while True:
            sampler = copy.copy(self)
            sampler._asked = Counter()
            try:
                found = await make(sampler, item)
            except (RequestRefused, RunBroken, AttemptOver):
                raise
            except Exception as error:  # a reward's, an environment's or an agent's: users' code may raise anything
                task, failures = asyncio.current_task(), failures + 1
                if task is not None and task.cancelling():
                    raise
                self.note(error, of_sample=True)
                if failures >= self._retries.most:
                    self._attempt.is_lost = True
                    raise
                await self._retries.before(failures, error)
            else:
                self.note(None, of_sample=True)
                return found

    @property
    def is_lost(self) -> bool:
        """A sample has failed in all its tries: another attempt would begin them again."""
        return self._attempt.is_lost

    def note(self, error: BaseException | None, *, of_sample: bool = False) -> None:
        """Tell how a try of a sample ended, or how the whole attempt did if that says more: nothing twice."""
        attempt = self._attempt
        is_known = attempt.has_noted and (error is None or error is attempt.noted)
        if of_sample or not is_known:
            attempt.noted, attempt.has_noted = error, True
            self._retries.after_try(error)

    def _number(self, name: str) -> str:
        self._asked[name] += 1
        return f"{name} {self._asked[name]}"


class Attempt:
    """The calls that an attempt at an episode has under way, and how its tries ended."""

    def __init__(self) -> None:
        self.is_lost = self.has_noted = False
        self.noted: BaseException | None = None
        self._is_over = False
        self._calls: dict[object, tuple[asyncio.Task[Any], asyncio.AbstractEventLoop]] = {}

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

    async def end(self) -> None:
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


_attempt: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar("attempt", default=None)


def call_here() -> AbstractContextManager[None]:
    """End the block together with the attempt that this code runs in, if it runs in one."""
    attempt = _attempt.get()
    return nullcontext() if attempt is None else attempt.call()


def request_name(req: LLMRequest) -> str:
    """Sum up what a reply is sampled from, and which sample of the episode it is for."""
    options = [dataclasses.asdict(req.gconfig), req.metadata.get("sample_key")]
    options += [] if req.grammar is None else [req.grammar]
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    digest.update(array("q", req.input_ids).tobytes())
    return digest.hexdigest()[:32]
