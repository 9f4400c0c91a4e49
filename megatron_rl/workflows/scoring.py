"""Shared parts of workflows: calling a reward function, and adding a teacher's hint to a prompt."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from megatron_rl.api import InfrastructureFailure
from megatron_rl.config.import_path import described, resolve
from megatron_rl.rewards.faults import as_score
from megatron_rl.rewards.recipe import Recipe
from megatron_rl.rewards.reward_service import RewardFailed, RewardTimeout
from megatron_rl.telemetry.spans import span_here
from megatron_rl.types import LLMResponse, Reward
from megatron_rl.workflows.attempt import call_here
from megatron_rl.workflows.messages import content_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DECODED_HERE = 2048
"""Longest reply, in tokens, that is decoded on the event loop. Longer replies are decoded in a thread."""
PROMPT_TEXTS_KEPT = 64
RewardFn = Callable[..., float | dict[str, float]]
OWN_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids", "sample_key")
"""Names that are not passed on from the prompt's row to a reward function: its fixed arguments, and `sample_key`."""


def with_hint(data: dict[str, Any], hint: str) -> dict[str, Any]:
    """Return a prompt with the hint in front of its text or last message. ValueError for a prompt of token ids.

    `{field}` in the hint is replaced by the prompt's field of that name; ValueError if the prompt lacks it.
    """
    if not hint:
        return data
    try:
        text = hint.format_map(data)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"teacher hint {hint!r}: {type(error).__name__}: {error} for a prompt with {sorted(data)}; name its fields "
            f"in braces, and write a brace as two."
        ) from error
    if "prompt" in data:
        return data | {"prompt": text + data["prompt"]}
    if "messages" in data:
        *before, last = data["messages"]
        content = content_text(last.get("content"), "messages[-1].content")
        return data | {"messages": [*before, last | {"content": f"{text}\n\n{content}"}]}
    raise ValueError(f"teacher hint {hint!r}: a prompt of input_ids takes none; give it as prompt or as messages.")


class RewardCall:
    """A reward function with decoding and checks. Its errors propagate: a crash is not a reward of 0.

        reward = RewardCall(my_reward, tokenizer, timeout_s=60.0)
        value = await reward(reply, {"prompt": "3+4=", "answer": "7"})

    A config's rewards form a Recipe, whose worker processes are killed at the deadline. Any other function runs in a
    thread, which cannot be stopped.
    """

    def __init__(
        self, reward_fn: RewardFn | str, tokenizer: PreTrainedTokenizerBase | None, *, timeout_s: float
    ) -> None:
        if isinstance(reward_fn, str):
            reward_fn = resolve(reward_fn, key="reward_fn", kind="reward", import_from=None)
        if not callable(reward_fn):
            raise ValueError(f"reward_fn = {reward_fn!r}: is a {type(reward_fn).__name__}; must be a function.")
        self.function: RewardFn = reward_fn
        self.tokenizer, self.timeout_s = tokenizer, timeout_s
        self._under_way: set[object] = set()
        self._texts: dict[bytes, str] = {}
        self._warned: set[tuple[str, str]] = set()
        is_plain = isinstance(self.function, FunctionType)
        self.name = f"{self.function.__module__}:{self.function.__qualname__}" if is_plain else repr(self.function)
        if isinstance(self.function, Recipe):
            self.name = self.function.name
            self.function.check_deadline(timeout_s)

    async def __call__(self, reply: LLMResponse, data: dict[str, Any]) -> float:
        """Return a reply's reward, which is a `Reward` if it has several parts.

        An aborted reply has no reward: InfrastructureFailure is raised, so that the episode is retried.
        """
        if reply.stop_reason == "abort":
            words = f"the reply was aborted after {reply.output_len} tokens and not continued; it has no reward."
            raise InfrastructureFailure(words, kind="server")
        # The data's `prompt` would collide with the argument of the same name, which holds the same text.
        others = {name: value for name, value in data.items() if name not in OWN_ARGUMENTS}
        ids = reply.output_tokens
        prompt, completion = "", reply.text
        if self.tokenizer is not None:
            prompt = self._prompt_text(reply.input_tokens)
            # Decode the tensor: a list would be checked entry by entry. Decoding does not hold the GIL.
            decode = partial(self.tokenizer.decode, reply.sampled.ids, skip_special_tokens=True)
            completion = str(await asyncio.to_thread(decode) if reply.output_len > DECODED_HERE else decode())
        arguments = {"prompt": prompt, "completions": completion, **others}
        arguments |= {"prompt_ids": reply.input_tokens, "completion_ids": ids}
        # Cancelled with the attempt at its episode: afterwards nobody reads the value.
        with call_here():
            if isinstance(self.function, Recipe):
                return await self._served(self.function, arguments)
            value = await self._in_a_thread(arguments)
        try:
            score = as_score(value)
        except ValueError as error:
            raise ValueError(f"reward_fn {self.name}, {described(self.function)}: {error}") from error
        return Reward(sum(score.values()), score) if isinstance(score, dict) else score

    def _prompt_text(self, ids: list[int]) -> str:
        """Decode a prompt. The text is cached for the prompt's other samples."""
        assert self.tokenizer is not None
        text = self._texts.pop(key := array("q", ids).tobytes(), None)
        if text is None:
            text = str(self.tokenizer.decode(ids))
            if len(self._texts) >= PROMPT_TEXTS_KEPT:
                self._texts.pop(next(iter(self._texts)))
        self._texts[key] = text
        return text

    async def _served(self, recipe: Recipe, arguments: dict[str, Any]) -> float:
        """Score by a recipe, recording each part's value and duration as metrics of the span."""
        with span_here("rewards", self.name) as span:
            try:
                scored = await recipe.score(arguments, self.timeout_s)
            except RewardFailed as failure:
                self._warn_once(failure)
                if span is not None and failure.reward:
                    span.args["metrics"] = {f"rollout/reward_failed/{failure.reward}": 1.0}
                raise
            if span is not None:
                # Record zeros for rewards that did not fail: a step's metric is the mean over its replies.
                metrics = {f"rollout/reward/{name}": value for name, value in scored.parts.items()}
                metrics |= {f"rollout/reward_s/{name}": seconds for name, seconds in scored.seconds.items()}
                span.args["metrics"] = metrics | {f"rollout/reward_failed/{name}": 0.0 for name in scored.seconds}
        return scored.value

    def _warn_once(self, failure: RewardFailed) -> None:
        """Log a failure once per place in the code. Nobody would see it otherwise if a later attempt succeeds."""
        if failure.reward and (failure.reward, failure.place) not in self._warned:
            self._warned.add((failure.reward, failure.place))
            logger.warning(
                "%s; the reply has no reward and its episode is tried again. Counted as rollout/reward_failed/%s.",
                failure,
                failure.reward,
            )

    async def _in_a_thread(self, arguments: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await asyncio.to_thread(self._timed, **arguments)
        except TimeoutError as error:
            if not limit.expired():  # raised by the reward itself
                raise
            raise RewardTimeout(
                f"reward_fn {self.name}: no reward within {self.timeout_s:g} s; {len(self._under_way)} of its calls "
                f"still run, each in a thread that no other reward can have. Let it stop by itself, or raise the "
                f"workflow's reward_timeout_s."
            ) from error

    def _timed(self, **arguments: Any) -> Any:
        """Run the function in a span that lasts until the function returns, even after the caller has timed out."""
        call = object()
        self._under_way.add(call)
        try:
            with span_here("rewards", self.name):
                return self.function(**arguments)
        except (SystemExit, StopIteration) as error:  # a future accepts no StopIteration, and SystemExit ends the loop
            raise RuntimeError(f"reward_fn {self.name}: ended by {type(error).__name__}: {error}") from error
        finally:
            self._under_way.discard(call)
