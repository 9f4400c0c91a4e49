"""Rewards from a server, such as a reward model, requested over HTTP in batches. docs/workflows.md specifies the
form."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from megatron_rl.rewards.recipe import AwaitedReward
from megatron_rl.rewards.reward_servers import RemoteFailure, RemoteRefusal, Servers


@dataclass
class Asked:
    """A reply waiting for its score."""

    item: orjson.Fragment
    score: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RemoteReward(AwaitedReward):
    """Reward computed by servers. A part of rollout.recipe with `args: {urls: [..]}`.

    remote = RemoteReward(["http://127.0.0.1:8000/score"])
    score = await remote("2+2=", "It is 4.", [], [], answer="4")  # the server's score of prompt, reply and answer
    await remote.close()
    """

    def __init__(
        self,
        urls: Sequence[str],
        most_items: int = 32,
        patience_s: float = 0.005,
        concurrent: int = 4,
        timeout_s: float = 30.0,
        token_file: str = "",
        columns: Sequence[str] = ("answer",),
    ) -> None:
        """most_items: maximum size of a batch. patience_s: seconds that a reply waits for others to join its batch.

        concurrent: maximum number of simultaneous batches per server. timeout_s: time limit of one batch; the recipe's
        deadline holds, too.
        columns: columns of the prompt's row to send in addition to prompt and reply.
        """
        if isinstance(columns, str) or {"prompt", "reply"} & set(columns):
            raise ValueError(
                f"args.columns = {columns!r}: must list columns of the row. Prompt and reply are always sent; leave "
                f"them out."
            )
        self._columns = list(columns)
        self._servers = Servers(urls, concurrent=concurrent, timeout_s=timeout_s, token_file=token_file)
        self._most_items, self._patience_s = most_items, patience_s
        self._waiting: list[Asked] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float:
        # Serialised now, so that an error fails only this reply and not its batch.
        item = {"prompt": prompt, "reply": completions} | {name: data.get(name) for name in self._columns}
        asked = Asked(orjson.Fragment(orjson.dumps(item, default=str)))
        self._waiting.append(asked)
        if len(self._waiting) >= self._most_items:
            self._send()
        elif len(self._waiting) == 1:
            # Not cancelled if the batch fills up first. It then sends a later batch early, which does no harm.
            asyncio.get_running_loop().call_later(self._patience_s, self._send)
        return await asked.score

    async def reach(self, patience_s: float) -> bool:
        await self._servers.reach(patience_s)
        return True

    async def close(self) -> None:
        for task in self._sending:
            task.cancel()
        await self._servers.close()

    def _send(self) -> None:
        """Send the waiting replies as one batch, except those whose callers have stopped waiting."""
        waiting, self._waiting = [asked for asked in self._waiting if not asked.score.done()], []
        if waiting:
            # The event loop holds only a weak reference to a task.
            task = asyncio.get_running_loop().create_task(self._score(waiting))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _score(self, batch: list[Asked]) -> None:
        def read(answer: Any) -> list[float]:
            scores = [float(score) for score in answer["scores"]]
            if len(scores) != len(batch) or not all(map(math.isfinite, scores)):
                raise ValueError(f"{len(scores)} scores for {len(batch)} items, or one that is not finite")
            return scores

        def is_wanted() -> bool:
            return not all(asked.score.done() for asked in batch)

        try:
            scores = await self._servers.ask({"items": [asked.item for asked in batch]}, read, is_wanted)
        except RemoteFailure as error:
            if isinstance(error, RemoteRefusal) and len(batch) > 1:  # one item may be too long, or the batch too large
                half = len(batch) // 2
                await asyncio.gather(self._score(batch[:half]), self._score(batch[half:]))
                return
            for asked in batch:
                if not asked.score.done():
                    # A separate exception each: one raised in several tasks would accumulate all of their tracebacks.
                    asked.score.set_exception(type(error)(str(error)))
            return
        for asked, score in zip(batch, scores, strict=True):
            if not asked.score.done():
                asked.score.set_result(score)
