"""The engine that a workflow receives. It handles the replies, samples and retries of one episode.

An executor makes one EpisodeEngine for each attempt at an episode. This table shows who retries, and what is kept:

    what fails                  who tries again                     at most                     kept
    a request to a server       SamplingClient, another server      4 times                     tokens so far
    one sample of `samples`     EpisodeEngine, this sample alone    rollout.episode_attempts    replies
    all else in a workflow      RolloutExecutor, the episode        rollout.episode_attempts    replies
    the process                 the next process, from its journal  rollout.journal_replies     whole replies, steps

When an attempt ends, its calls in flight are cancelled. Later calls are refused.
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
from megatron_rl.config import MOST_REPORTED, UNADJUSTED, GenerationConfig
from megatron_rl.types import LLMRequest, LLMResponse

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

Item = TypeVar("Item")
T = TypeVar("T")

ENDING_S = 10.0
"""Maximum time to wait for an attempt's cancelled calls when the attempt ends."""


class RunBroken(RuntimeError):
    """No episode can succeed any more. Raising this in an episode ends the run with this message."""


class AttemptOver(RuntimeError):
    """A task left over from a workflow made a call after its attempt had ended."""


class KeptReplies:
    """Complete and partial replies of one episode, kept until the episode has returned its group."""

    def __init__(self) -> None:
        self._replies: dict[str, LLMResponse] = {}
        self.since = 0
        """Policy version at the time of the first request."""

    def __len__(self) -> int:
        return len(self._replies)

    def begin(self, name: str, req: LLMRequest, *, version: int, oldest_allowed: int) -> LLMResponse:
        """Return the reply kept under `name`; an unfinished reply has the stop reason `abort`.

        If none is kept, `req.begun` is used. A reply with a token of a version below `oldest_allowed` starts over.
        """
        if not self._replies:
            self.since = version
        reply = self._replies.get(name, req.begun)
        if reply is None or (reply.output_len and int(reply.sampled.versions.values.min()) < oldest_allowed):
            reply = LLMResponse.nothing(req.input_ids)
        elif reply.stop_reason == "abort":  # copy it: an earlier attempt may still append to the original
            reply = copy.copy(reply)
            if reply.output_len >= req.gconfig.max_new_tokens:  # it was aborted at its last token
                reply.stop_reason = "length"
        self._replies[name] = reply
        return reply

    def newest(self, count: int) -> list[LLMResponse]:
        """Return the `count` most recently begun replies, newest last."""
        return list(self._replies.values())[-count:]

    def keep(self, name: str, reply: LLMResponse) -> None:
        self._replies[name] = reply

    def clear(self) -> None:
        self._replies.clear()


class EpisodeRecord(KeptSteps, Protocol):
    """One episode's part of the journal. It has entries of earlier processes, and this process adds more."""

    def take_reply(self, name: str, version: int) -> LLMResponse | None:
        """Return the reply journaled under `name`, if a trainer at `version` may still train on it.

        Each reply is returned once only.
        """

    def keep_reply(self, name: str, reply: LLMResponse) -> None: ...


@dataclasses.dataclass(kw_only=True)
class Retries:
    """Maximum number of tries of a sample, and callbacks that observe the tries."""

    most: int = 1
    before: Callable[[int, BaseException], Awaitable[None]]
    """Awaited before each retry, with the number of failures and the last error."""
    after_try: Callable[[BaseException | None], None] = lambda error: None
    """Called after each try with its error, or with None on success."""


class EpisodeEngine(Sampler):
    """One attempt at an episode, from `start` to `end`.

    For example:

        engine = EpisodeEngine(client, KeptReplies(), Retries(before=wait))
        try:
            group = await engine.start(lambda: workflow.arun_episode(engine, data))
        finally:
            await engine.end()

    Identical requests are told apart by a running count. Each sample counts separately, so that its retry gets the
    replies of its previous try.
    """

    def __init__(
        self,
        engine: Sampler,
        kept: KeptReplies,
        retries: Retries,
        *,
        record: EpisodeRecord | None = None,
        oldest_allowed: Callable[[], int] = lambda: 0,
        is_training: bool = False,
        trained_as: GenerationConfig | None = None,
    ) -> None:
        """kept: replies of the episode's earlier attempts.

        record: the episode's part of the journal; None without a journal. oldest_allowed(): the oldest policy version
        whose tokens a reused reply may contain. is_training: refuse replies whose probabilities the trainer could not
        compute. trained_as: the run's sampling options, if known.
        """
        self._engine, self._kept, self._record, self.steps = engine, kept, record, record
        self._retries, self._oldest_allowed, self._is_training = retries, oldest_allowed, is_training
        self._trained_as = trained_as
        self._attempt = Attempt()
        self._asked: Counter[str] = Counter()

    def start(self, episode: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Start the episode in a task of its own, because a workflow may leave its task marked as cancelled."""
        context = contextvars.copy_context()
        context.run(_attempt.set, self._attempt)
        return context.run(asyncio.ensure_future, context.run(episode))

    async def end(self) -> None:
        """Cancel the attempt's calls that are still in flight, and wait at most ENDING_S for them."""
        await self._attempt.end()

    def get_version(self) -> int:
        return self._engine.get_version()

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Return the reply if the episode already has it; otherwise generate it, or the part that is missing."""
        if self._is_training:
            check_sampling(req, self._trained_as)
            req = copy.copy(req)
            req.changed_size = (self._trained_as or req.gconfig).changed_size
        name, version = self._number(request_name(req)), self._engine.get_version()
        with self._attempt.call():
            restored = self._record.take_reply(name, version) if self._record is not None else None
            if restored is not None:
                req = continuing(req, restored)
            reply = self._kept.begin(name, req, version=version, oldest_allowed=self._oldest_allowed())
            if reply.stop_reason == "abort":
                reply = await self._engine.agenerate(continuing(req, reply))
                self._kept.keep(name, reply)
                if self._record is not None:
                    self._record.keep_reply(name, reply)
            return reply

    def samples(
        self, make: Callable[[Sampler, Item], Awaitable[T]], items: Iterable[Item]
    ) -> Coroutine[Any, Any, list[T]]:
        """Make one sample for each item, all concurrently. A sample that fails is retried alone.

        If a sample fails in its last try, its error is raised and the other samples are cancelled.
        """
        return together([self._sample(make, item) for item in items])

    async def _sample(self, make: Callable[[Sampler, Item], Awaitable[T]], item: Item) -> T:
        failures = 0
        while True:
            sampler = self._counting_anew()
            try:
                found = await make(sampler, item)
            except (RequestRefused, RunBroken, AttemptOver):
                raise
            except Exception as error:  # user code (reward, environment, agent) may raise anything
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

    def _counting_anew(self) -> EpisodeEngine:
        """Return this engine with a running count of its own for each request."""
        engine = object.__new__(type(self))  # copy.copy takes five times as long
        engine.__dict__ = self.__dict__ | {"_asked": Counter()}
        return engine

    @property
    def is_lost(self) -> bool:
        """True if a sample has failed in all its tries. Another attempt at the episode would only repeat them."""
        return self._attempt.is_lost

    def note(self, error: BaseException | None, *, of_sample: bool = False) -> None:
        """Report to `after_try` how a try of a sample, or the whole attempt, ended.

        The attempt's end is not reported if it only repeats what a sample's end has already reported.
        """
        attempt = self._attempt
        is_known = attempt.has_noted and (error is None or error is attempt.noted)
        if of_sample or not is_known:
            attempt.noted, attempt.has_noted = error, True
            self._retries.after_try(error)

    def _number(self, name: str) -> str:
        self._asked[name] += 1
        return f"{name} {self._asked[name]}"


class Attempt:
    """The calls that an attempt at an episode has in flight, and how its samples' tries ended."""

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
        """Cancel the calls in flight and wait at most ENDING_S for them."""
        self._is_over = True
        here, cancelled = asyncio.get_running_loop(), []
        for task, loop in list(self._calls.values()):
            if loop is here:
                task.cancel()
                cancelled.append(task)
            elif not loop.is_closed():  # on another thread, started by a workflow
                loop.call_soon_threadsafe(task.cancel)
        if cancelled:
            await asyncio.wait(cancelled, timeout=ENDING_S)


_attempt: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar("attempt", default=None)


def call_here() -> AbstractContextManager[None]:
    """Return a context manager whose block is cancelled when the current attempt ends.

    Outside an attempt it does nothing.
    """
    attempt = _attempt.get()
    return nullcontext() if attempt is None else attempt.call()


def check_sampling(req: LLMRequest, trained_as: GenerationConfig | None = None) -> None:
    """Raise RequestRefused for a request that cuts the vocabulary or changes logits without a report of supports.

    A greedy reply passes: workflows make it for comparison, and do not train it. If the trainer computes supports, it
    does so with the run's options `trained_as`, which must then be the request's.
    """
    options = req.gconfig
    if options.greedy or options.support_size:
        return
    if options.computed_size or (trained_as is not None and trained_as.computed_size):
        check_cut(options, trained_as or options)
        return
    for name, everything in (("top_k", -1), ("top_p", 1.0), ("min_p", 0.0)):
        if (value := getattr(options, name)) != everything:
            raise RequestRefused(
                f"gconfig.{name} = {value}: the reply would be sampled from a part of the vocabulary, and trained with "
                f"log-probabilities over all of it; set gconfig.top_k from 2 to {MOST_REPORTED} too, so that servers "
                f"report which tokens they sampled from, or set it to {everything}."
            )
    known = trained_as or options
    if known.adjustment_size == options.adjustment_size:
        return
    for name, nothing in UNADJUSTED.items():
        if ((value := getattr(options, name)) != nothing) != ((run := getattr(known, name)) != nothing):
            raise RequestRefused(
                f"gconfig.{name} = {value}: all replies of a run have changed logits, or none, and generation.{name} = "
                f"{run}; set both, or both to {nothing}."
            )


def check_cut(options: GenerationConfig, trained_as: GenerationConfig) -> None:
    """Raise RequestRefused if a request excludes other tokens than those that the trainer computes."""
    for name in ("supports", "temperature", "top_k", "top_p", "min_p"):
        if (value := getattr(options, name)) != (known := getattr(trained_as, name)):
            raise RequestRefused(
                f"gconfig.{name} = {value}: the trainer computes which tokens a reply was sampled from with the run's "
                f"options, and generation.{name} = {known}; ask with that."
            )
    for name, nothing in {"min_new_tokens": 0, **UNADJUSTED}.items():
        if (value := getattr(options, name)) != nothing:
            raise RequestRefused(
                f"gconfig.{name} = {value}: with generation.supports = computed the trainer computes only what top_k, "
                f"top_p and min_p exclude; set it to {nothing}."
            )


def continuing(req: LLMRequest, begun: LLMResponse) -> LLMRequest:
    """Return a request for the rest of a reply."""
    req = copy.copy(req)  # dataclasses.replace would check the prompt's tokens again
    req.begun = begun
    return req


SORTED_JSON = json.JSONEncoder(sort_keys=True)


def request_name(req: LLMRequest) -> str:
    """Return a hash of everything that determines how a reply is sampled, including the `sample_key` of its sample."""
    options = [vars(req.gconfig), req.metadata.get("sample_key")]
    options += [] if req.grammar is None else [req.grammar]
    digest = hashlib.sha256(SORTED_JSON.encode(options).encode())
    digest.update(array("q", req.input_ids).tobytes())
    return digest.hexdigest()[:32]
