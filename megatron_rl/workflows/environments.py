"""Worlds that answer a policy's replies, for MultiTurnWorkflow. What they say is context and never trained."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.api import together
from megatron_rl.workflows.tools import Rewarded, Tool, ToolCall, run_call, split_tool_calls

MOST_CALLS = 16
"""Most tool calls of one reply, which could hold hundreds, each a process or a request."""

Score = Callable[[], Awaitable[float]]
"""Gives the reward function's value of the reply at hand."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An environment's answer to one reply. Without messages the episode is over."""

    messages: Sequence[dict[str, Any]] = ()
    reward: float = 0.0
    """Of the reply that it answers. A trajectory's reward is the sum over its turns."""


class Environment(abc.ABC):
    """The world of one sample of one prompt.

    For example:

        class Guess(Environment):
            async def step(self, reply, score):
                if reply.strip() == self.data["answer"]:
                    return Turn(reward=1.0)  # without messages the episode is over
                return Turn(messages=[{"role": "user", "content": "Try again."}])
    """

    SAVES: ClassVar[bool] = False
    """It has `save` and `restore`: with rollout.journal_replies a killed run goes on where its dialogues were."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    async def save(self) -> Any:
        """Return its state after the opening or a step: what JSON has and at most 1 MiB, such as a snapshot's name."""
        raise NotImplementedError

    async def restore(self, state: Any) -> None:
        """Go on from what another process's object has saved. Called in place of `opening`."""
        raise NotImplementedError

    def opening(self) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """Return the prompt that the dialogue begins with: `messages` (and `tools`), `prompt` or `input_ids`.

        A world that takes its time to begin has an `async def opening`.
        """
        return self.data

    @abc.abstractmethod
    async def step(self, reply: str, score: Score) -> Turn:
        """Answer a reply. The workflow may end the episode after any turn, for want of turns or tokens."""

    async def ended(self) -> float:
        """Return what the whole dialogue has earned beside its turns, whether it or the workflow has ended it.

        It is the last reply's.
        """
        return 0.0

    async def close(self) -> None:  # noqa: B027  (most worlds have nothing to close)
        """The episode is over, or has failed."""


class SelfCorrection(Environment):
    """Tells the policy that it is wrong until it is right. The reward is the last try's, less for each try before.

    For example:

        MultiTurnWorkflow(reward, gconfig, tokenizer, SelfCorrection, max_tokens=2048, environment_args={"decay": 0.5})
    """

    def __init__(
        self,
        data: dict[str, Any],
        *,
        feedback: str = "That is not correct. Think again, and give the right answer.",
        enough: float = 1.0,
        decay: float = 1.0,
    ) -> None:
        """enough: reward of a right answer. decay: what each further try multiplies the reward by."""
        super().__init__(data)
        self.feedback, self.enough, self.decay = feedback, enough, decay
        self.tries, self.earned = 0, 0.0

    async def step(self, reply: str, score: Score) -> Turn:
        value = await score()
        worth = value * self.decay**self.tries
        # A trajectory's reward sums its turns: with the differences the sum is always the last try's worth.
        gained, self.earned, self.tries = worth - self.earned, worth, self.tries + 1
        if value >= self.enough:
            return Turn(reward=gained)
        return Turn(messages=[{"role": "user", "content": self.feedback}], reward=gained)


class ToolUse(Environment):
    """Runs the tools that a reply calls; one that calls none is the answer, which the reward function scores.

    A call may earn the reply that makes it something too, by `tools.Rewarded`.

    ToolUseWorkflow makes one for each dialogue.
    """

    def __init__(self, data: dict[str, Any], *, tools: Sequence[Tool]) -> None:
        super().__init__(data)
        self.tools = {tool.name: tool for tool in tools}

    def opening(self) -> dict[str, Any]:
        return self.data | {"tools": [tool.schema for tool in self.tools.values()]}

    async def step(self, reply: str, score: Score) -> Turn:
        _, calls = split_tool_calls(reply)
        if not calls:
            return Turn(reward=await score())
        if len(calls) > MOST_CALLS:
            fault = f"a reply has at most {MOST_CALLS} calls; those after the first {MOST_CALLS} were not run"
            # As a call that is wrong: run_call tells the policy of it in the place of a result.
            calls = [*calls[:MOST_CALLS], ToolCall(name="", arguments={}, fault=fault)]
        results = await together(run_call(call, self.tools) for call in calls)
        return Turn(
            messages=[
                {"role": "tool", "name": call.name, "content": str(result)}
                for call, result in zip(calls, results, strict=True)
            ],
            reward=sum((result.reward for result in results if isinstance(result, Rewarded)), 0.0),
        )
