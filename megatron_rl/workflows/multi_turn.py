"""Dialogues with an environment. Each gives one trajectory, in which the environment's messages are not trained."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import math
import uuid
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_rl.api import (
    ContextOutgrown,
    InferenceEngine,
    InfrastructureFailure,
    KeptSteps,
    RolloutWorkflow,
    Sampler,
    together,
)
from megatron_rl.config import GenerationConfig
from megatron_rl.config.import_path import check_call, described
from megatron_rl.rewards.faults import shortened
from megatron_rl.types import LLMResponse, Trajectory
from megatron_rl.workflows.conversation import Conversation
from megatron_rl.workflows.environments import Environment, Score, ToolUse, Turn
from megatron_rl.workflows.rendering import form_of
from megatron_rl.workflows.rlvr import sample_key
from megatron_rl.workflows.scoring import RewardCall, RewardFn
from megatron_rl.workflows.tools import THINK, THOUGHT, Tool, decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
EDGE_TOKENS = 16  # at a prompt's end, where a thought may be opened


class EnvironmentTimeout(InfrastructureFailure):
    """An environment call exceeded its time limit. The episode fails and is retried with a new environment."""

    KIND = "world"


class MultiTurnWorkflow(RolloutWorkflow):
    """Runs `gconfig.n_samples` dialogues per prompt, each with its own environment.

    In each trajectory, `sequence["turns"]` is the dialogue's number of replies, and `tokens["turn_rewards"]` holds each
    turn's reward at the last token of the turn's reply. Each reply has at most gconfig.max_new_tokens tokens.

        workflow = MultiTurnWorkflow(
            reward, GenerationConfig(n_samples=4), tokenizer, SelfCorrection, max_tokens=2048,
            environment_args={"feedback": "That is wrong. Try again.", "decay": 0.5},
        )
    """

    IMPORT_PATHS = ("environment",)

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        environment: Callable[..., Environment],
        max_tokens: int,
        environment_args: dict[str, Any] | None = None,
        max_turns: int = 8,
        step_timeout_s: float = 300.0,
        enable_thinking: bool = False,
        reward_timeout_s: float = 60.0,
    ) -> None:
        """environment(data, **environment_args) creates the environment of one dialogue.

        max_tokens: maximum dialogue length including the prompt, at most the model's context. A dialogue that has no
        room for another reply, or has had max_turns replies, ends with the reward earned so far.
        step_timeout_s: time limit of one opening, step (including the reward function), ending or close. The limit can
        only cancel an await: an environment that blocks the event loop stalls all episodes.
        """
        check_call(environment, 1, environment_args or {}, key="rollout.workflow_args.environment_args")
        if max_turns < 1:
            raise ValueError(f"max_turns = {max_turns}: must be at least 1; a dialogue has one reply or more.")
        self.gconfig, self.tokenizer, self.enable_thinking = gconfig, tokenizer, enable_thinking
        self.environment, self.environment_args = environment, environment_args or {}
        self.max_tokens, self.max_turns, self.step_timeout_s = max_tokens, max_turns, step_timeout_s
        self.reward = RewardCall(reward_fn, tokenizer, timeout_s=reward_timeout_s)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        rid = uuid.uuid4().hex
        names = [(f"{rid}-{n}", sample_key(data, n)) for n in range(self.gconfig.n_samples)]
        return await together(engine.sample(self._play, data, *name) for name in names)

    async def _play(self, engine: Sampler, data: dict[str, Any], rid: str, key: str | None) -> Trajectory:
        environment = self.environment(data, **self.environment_args)
        if not all(hasattr(environment, name) for name in ("opening", "step", "ended", "close")):
            raise TypeError(
                f"rollout.workflow_args.environment: {described(self.environment)} returned "
                f"{type(environment).__name__}; must return an Environment."
            )
        world = World(environment, key, engine.steps)
        try:
            opening = await self._in_time(environment, "opening", world.opening())
            form = form_of(opening, self.tokenizer, enable_thinking=self.enable_thinking)
            conversation, reward = Conversation(form.opening(opening)), 0.0
            if len(conversation) >= self.max_tokens:
                raise ContextOutgrown(
                    f"max_tokens = {self.max_tokens}: the prompt alone has {len(conversation)}; raise it, or leave "
                    f"such prompts out."
                )
            length = len(conversation)  # up to the last reply: tokens added after it may have to be removed again
            while True:
                try:
                    reply = await conversation.ask(engine, self.gconfig, max_tokens=self.max_tokens, rid=rid, key=key)
                except ContextOutgrown:  # the server's context is shorter than max_tokens
                    if conversation.replies == 0:
                        raise
                    conversation.take_back(length)
                    conversation.is_cut_off = True
                    break
                length = len(conversation)
                step = world.step(conversation, self._shown(reply), lambda reply=reply: self.reward(reply, data))
                turn = await self._in_time(environment, f"step {conversation.replies}", step)
                # The turn's reward always counts; its messages count only if there is room for a reply to them.
                reward += turn.reward
                conversation.earn(turn.reward)
                if not turn.messages or conversation.replies == self.max_turns:
                    break
                added = form.following(turn.messages, reply.output_tokens)
                if len(conversation) + len(added) >= self.max_tokens:
                    conversation.is_cut_off = True
                    break
                conversation.add(added)
            at_end = await self._in_time(environment, "ending", world.ended())
            reward += at_end
            conversation.earn(at_end)
        finally:  # also runs if the sample is cancelled: an environment may hold processes or files
            await self._in_time(environment, "close", world.close())
        return conversation.trajectory(reward, turns=conversation.replies)

    async def _in_time(self, environment: Environment, what: str, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.step_timeout_s) as limit:
                return await answer
        except TimeoutError as error:
            if not limit.expired():  # raised by the environment itself
                raise
            kind = type(environment)
            raise EnvironmentTimeout(
                f"environment {kind.__module__}:{kind.__qualname__}: {what} did not end within "
                f"{self.step_timeout_s:g} s; raise rollout.workflow_args.step_timeout_s, or have it give up earlier."
            ) from error

    def _shown(self, reply: LLMResponse) -> str:
        """Return the reply's text as the environment sees it."""
        return str(self.tokenizer.decode(reply.output_tokens, skip_special_tokens=True))


class World:
    """Wrapper of an environment that journals its steps, if it can save its state and the episode has a journal.

    The results of steps that an earlier, killed process completed come from the journal. Before the first new step, the
    environment's state is restored to that saved after the last journaled step.
    """

    def __init__(self, environment: Environment, key: str | None, steps: KeptSteps | None) -> None:
        self._environment, self._key = environment, key
        self._steps = steps if environment.SAVES and key is not None else None
        self._state: Any = None
        self._is_behind = False

    async def opening(self) -> dict[str, Any]:
        async def begin() -> dict[str, Any]:
            found = self._environment.opening()
            found = await found if inspect.isawaitable(found) else found
            if not isinstance(found, Mapping):
                raise self._wrong("opening", found, "a prompt: a dict with messages, prompt or input_ids")
            return dict(found)

        return await self._kept("opening", begin)

    async def step(self, conversation: Conversation, reply: str, score: Score) -> Turn:
        async def step() -> dict[str, Any]:
            return dataclasses.asdict(self._turn(await self._do("step", reply, score)))

        # The key covers the whole dialogue so far: if replies differ from the journal's, no journaled step is used.
        ids = hashlib.sha256(array("q", conversation.ids).tobytes()).hexdigest()
        return Turn(**await self._kept(ids, step))

    async def ended(self) -> float:
        await self._catch_up()
        found = await self._do("ended")
        if not is_number(found):
            wanted = "a number: the reward that the dialogue has earned in addition to its turns' rewards"
            raise self._wrong("ended", found, wanted)
        return float(found)

    async def close(self) -> None:
        await self._do("close")

    async def _do(self, name: str, *given: Any) -> Any:
        """Call and await one of the environment's methods. TypeError if the method's result cannot be awaited."""
        found = getattr(self._environment, name)(*given)
        if not inspect.isawaitable(found):
            raise self._wrong(name, found, f"what can be awaited: make it a coroutine function, async def {name}")
        return await found

    def _turn(self, found: Any) -> Turn:
        """Check that a step's result is a valid Turn and return it. TypeError if it is not."""
        if not isinstance(found, Turn):
            raise self._wrong("step", found, "a Turn(messages=[...], reward=...), without messages at the end")
        if not is_number(found.reward):
            raise self._wrong("step", found.reward, "a number", part="Turn.reward = ")
        is_list = isinstance(found.messages, Sequence) and not isinstance(found.messages, str)
        if not (is_list and all(isinstance(message, Mapping) for message in found.messages)):
            raise self._wrong("step", found.messages, "a list of messages, each a dict", part="Turn.messages = ")
        return found

    def _wrong(self, name: str, found: Any, wanted: str, *, part: str = "") -> TypeError:
        where = described(getattr(self._environment, name))
        return TypeError(f"{where} returned {part}{shortened(found)}, a {type(found).__name__}; must return {wanted}.")

    async def _kept(self, name: str, do: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        if self._steps is None:
            return await do()
        if (kept := self._steps.take_step(f"{self._key} {name}")) is not None:
            self._state, self._is_behind = kept["state"], True
            return dict(kept["did"])
        await self._catch_up()
        did = await do()
        self._steps.keep_step(f"{self._key} {name}", {"did": did, "state": await self._do("save")})
        return did

    async def _catch_up(self) -> None:
        if self._is_behind:
            self._is_behind = False
            await self._do("restore", self._state)


def is_number(value: Any) -> bool:
    """Return whether a value is one finite number. NumPy numbers and one-element tensors count."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


class ToolUseWorkflow(MultiTurnWorkflow):
    """Dialogues in which the policy calls tools.

    `tools` maps each tool's class, or in a config its import path, to its arguments. The tokenizer's chat template must
    show the tools and ask for calls in the form <tool_call>{"name": ..., "arguments": ...}</tool_call>.

        workflow = ToolUseWorkflow(reward, GenerationConfig(), tokenizer, {Calculator: {}}, max_tokens=4096)
        # rollout.workflow_args: {max_tokens: 4096, tools: {"megatron_rl.workflows.tools:Calculator": {}}}
    """

    IMPORT_PATHS = ("tools",)

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        tools: dict[Callable[..., Tool], dict[str, Any]],
        max_tokens: int,
        max_turns: int = 8,
        step_timeout_s: float = 300.0,
        enable_thinking: bool = False,
        reward_timeout_s: float = 60.0,
    ) -> None:
        """step_timeout_s: time limit for all calls of a reply together, or for the reward function without calls."""
        for make, args in tools.items():
            check_call(make, 0, args, key=f"rollout.workflow_args.tools: the arguments of {make.__name__}")

        # Create new tools for each dialogue: a tool may keep state.
        def environment(data: dict[str, Any]) -> ToolUse:
            return ToolUse(data, tools=[make(**args) for make, args in tools.items()])

        super().__init__(
            reward_fn,
            gconfig,
            tokenizer,
            environment,
            max_tokens,
            max_turns=max_turns,
            step_timeout_s=step_timeout_s,
            enable_thinking=enable_thinking,
            reward_timeout_s=reward_timeout_s,
        )

    def _shown(self, reply: LLMResponse) -> str:
        """Return the reply's whole text, prefixed with `<think>` if the prompt has opened a thought."""
        text = decoded(self.tokenizer, reply.output_tokens, keeps=(THINK, THOUGHT))
        opened = self.tokenizer.decode(reply.input_tokens[-EDGE_TOKENS:]).rstrip().endswith(THINK)
        return f"{THINK}{text}" if opened else text
