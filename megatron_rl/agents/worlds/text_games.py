"""Games of the textarena package, played alone or with the policy in all seats. The game gives the rewards.

Each game runs in its own process, because games use the global random state and parse untrusted text. These processes
are forked from a process that has imported the package. If a game raises, dies or hangs, its sample fails.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import TYPE_CHECKING, Any

from megatron_rl.api import (
    ContextOutgrown,
    InferenceEngine,
    InfrastructureFailure,
    RolloutWorkflow,
    Sampler,
    together,
)
from megatron_rl.config import GenerationConfig
from megatron_rl.rewards import game_worker
from megatron_rl.rewards.worker_pool import Worker, WorkerDied, WorkerPool
from megatron_rl.types import LLMResponse, Trajectory
from megatron_rl.workflows.conversation import Conversation
from megatron_rl.workflows.rendering import ChatTemplate
from megatron_rl.workflows.rlvr import sample_key
from megatron_rl.workflows.scoring import RewardFn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GameFailed(InfrastructureFailure):
    """A game raised an exception, its process died, or it did not answer in time."""

    KIND = "game"


def game_prompts(
    count: int, first: int = 0, text: str = "Play this game. Answer with your move."
) -> list[dict[str, Any]]:
    """Return `count` prompts with game seeds first, first + 1, and so on. Use this as data.train."""
    return [{"messages": [{"role": "system", "content": text}], "seed": first + number} for number in range(count)]


class TextGames(RolloutWorkflow):
    """Plays `gconfig.n_samples` games per prompt, all with the prompt's seed.

    Each seat yields a trajectory with its own reward. `sequence["agent"]` is the number of the seat, and
    `sequence["sample"]` the number of the game. If a game runs out of turns or tokens, all its rewards are 0.

        workflow = TextGames(reward, GenerationConfig(n_samples=4), tokenizer, "TicTacToe-v0", max_tokens=2048, seats=2)
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        game: str,
        max_tokens: int,
        seats: int = 1,
        game_args: dict[str, Any] | None = None,
        max_turns: int = 32,
        games_at_once: int = 128,
        move_timeout_s: float = 60.0,
        enable_thinking: bool = False,
    ) -> None:
        """max_tokens, max_turns: limits of one seat's dialogue, including the prompt.

        games_at_once: maximum number of games over all episodes; further games wait. reward_fn is not used, because the
        game gives the reward.
        """
        if seats < 1 or max_turns < 1 or games_at_once < 1:
            raise ValueError(
                f"seats = {seats}, max_turns = {max_turns}, games_at_once = {games_at_once}: at least 1 each."
            )
        self.gconfig, self.tokenizer, self.max_tokens, self.max_turns = gconfig, tokenizer, max_tokens, max_turns
        self.game, self.seats, self.move_timeout_s = game, seats, move_timeout_s
        self.form = ChatTemplate(tokenizer, enable_thinking=enable_thinking)
        self._given, self._most = {"game": game, "args": game_args or {}, "seats": seats}, games_at_once
        self._pool: WorkerPool | None = None

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        games = await together(engine.sample(self._play, data, n) for n in range(self.gconfig.n_samples))
        return [trajectory for game in games for trajectory in game]

    async def _play(self, engine: Sampler, data: dict[str, Any], sample: int) -> list[Trajectory]:
        if self._pool is None:
            self._pool = WorkerPool("game", f"{game_worker.__name__}:playing", self._given, workers=self._most)
        talks: dict[int, Conversation] = {}
        rid, key = uuid.uuid4().hex, sample_key(data, sample)
        try:
            table = await self._pool.acquire()
        except WorkerDied as error:
            raise GameFailed(f"game {self.game}: {error}") from error
        try:
            found = await self._ask(table, {"seed": data["seed"]})
            while "rewards" not in found:
                seat, told = found["seat"], {"role": "user", "content": found["text"]}
                if seat not in talks:
                    talks[seat], added = Conversation(()), self.form.opening({"messages": [*data["messages"], told]})
                else:
                    added = self.form.following([told], talks[seat].last_reply)
                reply = await self._reply(engine, talks[seat], added, f"{rid}-{seat}", key and f"{key}/{seat}")
                if reply is None:
                    break
                text = self.tokenizer.decode(reply.output_tokens, skip_special_tokens=True)
                found = await self._ask(table, {"move": text})
        finally:
            self._pool.discard(table)
        rewards = found.get("rewards", {})
        return [
            talk.trajectory(rewards.get(str(seat), 0.0), turns=talk.replies, agent=seat, sample=sample)
            for seat, talk in talks.items()
        ]

    async def _ask(self, table: Worker, request: dict[str, Any]) -> dict[str, Any]:
        assert self._pool is not None
        try:
            async with asyncio.timeout(self.move_timeout_s):
                found = dict(json.loads(await table.ask(self._pool.frame(request))))
        except TimeoutError as error:
            raise GameFailed(f"game {self.game}: a move took longer than {self.move_timeout_s:g} s.") from error
        except WorkerDied as error:
            raise GameFailed(f"game {self.game}: {self._pool.died()}") from error
        if "error" in found:
            raise GameFailed(f"game {self.game}: {found['error']}")
        return found

    def close(self) -> None:
        """Stop all games. Without this call they stop when this process exits."""
        if self._pool is not None:
            self._pool.close()

    async def _reply(
        self, engine: Sampler, talk: Conversation, added: list[int], rid: str, key: str | None
    ) -> LLMResponse | None:
        """Return a seat's reply; None if the seat has no turns or tokens left."""
        length = len(talk)
        if talk.replies and (talk.replies == self.max_turns or length + len(added) >= self.max_tokens):
            return None
        talk.add(added)
        if len(talk) >= self.max_tokens:
            raise ContextOutgrown(f"max_tokens = {self.max_tokens}: the prompt alone has {len(talk)}; raise it.")
        try:
            return await talk.ask(engine, self.gconfig, max_tokens=self.max_tokens, rid=rid, key=key)
        except ContextOutgrown:  # the server's context is too short
            if talk.replies == 0:
                raise
            talk.take_back(length)
            return None
