"""Environments that answer a policy's replies, for MultiTurnWorkflow. Environments' messages are never trained."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.api import together
from megatron_rl.workflows.tools import Rewarded, Tool, ToolCall, run_call, split_tool_calls

MOST_CALLS = 16
"""Maximum number of tool calls per reply. A reply could hold hundreds, and each may start a process or a request."""

Score = Callable[[], Awaitable[float]]
"""Function that computes the reward function's value for the current reply."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An environment's answer to one reply. A turn without messages ends the episode."""

    messages: Sequence[dict[str, Any]] = ()
    reward: float = 0.0
    """Reward for the reply that was answered. A trajectory's reward is the sum over its turns."""


class Environment(abc.ABC):
    """Base class of environments. Each sample of a prompt has its own object.

    class Guess(Environment):
        async def step(self, reply, score):
            if reply.strip() == self.data["answer"]:
                return Turn(reward=1.0)  # without messages the episode is over
            return Turn(messages=[{"role": "user", "content": "Try again."}])
    """

    SAVES: ClassVar[bool] = False
    """True if `save` and `restore` are implemented. With rollout.journal_replies, a killed run then resumes its
    dialogues."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    async def save(self) -> Any:
        """Return the state after the opening or a step as JSON data of at most 1 MiB, such as a snapshot's name."""
        raise NotImplementedError

    async def restore(self, state: Any) -> None:
        """Resume from a state that another process saved. This is called instead of `opening`."""
        raise NotImplementedError

    def opening(self) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """Return the first prompt: `messages` (and `tools`), `prompt` or `input_ids`. May be a coroutine function."""
        return self.data

    @abc.abstractmethod
    async def step(self, reply: str, score: Score) -> Turn:
        """Answer a reply. The workflow may end the episode after any turn if it runs out of turns or tokens."""

    async def ended(self) -> float:
        """Return a final reward for the last reply, added to its turn's reward. Called however the episode ended."""
        return 0.0

    async def close(self) -> None:  # noqa: B027  (most worlds have nothing to close)
        """Release resources after the episode has ended or failed."""


class SelfCorrection(Environment):
    """Tells the policy that its answer is wrong, until the answer is right.

    The reward is that of the last try, multiplied by `decay` for each earlier try.

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
        """enough: a reply with at least this reward is right. decay: factor on the reward for each earlier try."""
        super().__init__(data)
        self.feedback, self.enough, self.decay = feedback, enough, decay
        self.tries, self.earned = 0, 0.0

    async def step(self, reply: str, score: Score) -> Turn:
        value = await score()
        worth = value * self.decay**self.tries
        # A trajectory's reward sums its turns; adding only the difference makes the sum the last try's worth.
        gained, self.earned, self.tries = worth - self.earned, worth, self.tries + 1
        if value >= self.enough:
            return Turn(reward=gained)
        return Turn(messages=[{"role": "user", "content": self.feedback}], reward=gained)


class ToolUse(Environment):
    """Runs the tools that a reply calls. The reward function scores a reply without calls, which is the answer.

    A tool may also reward the reply that called it, by returning `tools.Rewarded`.
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
            # Treated like a wrong call: run_call returns the error to the policy as the result.
            calls = [*calls[:MOST_CALLS], ToolCall(name="", arguments={}, fault=fault)]
        results = await together(run_call(call, self.tools) for call in calls)
        pairs = zip(calls, results, strict=True)
        return Turn(
            messages=[{"role": "tool", "name": call.name, "content": str(result)} for call, result in pairs],
            reward=sum((result.reward for result in results if isinstance(result, Rewarded)), 0.0),
        )
