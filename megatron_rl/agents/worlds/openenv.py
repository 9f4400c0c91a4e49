"""OpenEnv environments over HTTP: each dialogue has its own session on a server. The environment gives the rewards.

The policy sees the errors of its actions. If a server cannot be reached, fails, dies or hangs, the sample fails and is
retried; the failure never becomes a reward.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from megatron_rl.agents.worlds.openenv_session import Session
from megatron_rl.workflows.environments import Score, ToolUse, Turn
from megatron_rl.workflows.tools import Rewarded, Tool, ToolError, middle_left_out


class OpenEnv(ToolUse):
    """An OpenEnv environment. An action is a reply's text, a JSON object in it, or a call of an environment's tool.

    For example:

        MultiTurnWorkflow(reward, gconfig, tokenizer, OpenEnv, max_tokens=4096, environment_args={
            "url": "http://127.0.0.1:8000", "action": "message", "shown": "echoed_message"})
    """

    def __init__(
        self,
        data: dict[str, Any],
        *,
        url: str,
        action: str = "",
        shown: str = "",
        with_tools: bool = False,
        session_timeout_s: float = 120.0,
        call_timeout_s: float = 60.0,
        characters: int = 4000,
    ) -> None:
        """data["reset"]: arguments of the environment's reset, such as a seed.

        action: the action's field that takes the reply's text; if empty, the reply contains the action as a JSON
        object.
        with_tools: if true, actions are calls of the environment's tools, and a reply without a call ends the episode.
        shown: the observation's field that the policy reads; if empty, the policy reads the whole observation.
        session_timeout_s: maximum wait for a free session.
        characters: maximum number of characters of one observation shown to the policy.
        """
        super().__init__(data, tools=())
        if with_tools and action:
            raise ValueError(
                f"action = {action!r} and with_tools = true: its actions are calls; leave one of them out."
            )
        self.action, self.shown, self.with_tools, self.characters = action, shown, with_tools, characters
        self.session = Session(url, session_timeout_s=session_timeout_s, call_timeout_s=call_timeout_s)
        self.is_done, self._one_at_a_time = False, asyncio.Lock()

    async def opening(self) -> dict[str, Any]:
        """Reset the environment and return the prompt, with the first observation as its last message."""
        found = await self.session.reset(self.data.get("reset", {}))
        opening = self.data | {"messages": [*self.data["messages"], self._message(found)]}
        if not self.with_tools:
            return opening
        listed = (await self.act({"type": "list_tools"}))["observation"]["tools"]
        self.tools = {tool["name"]: EnvironmentTool(self, tool) for tool in listed}
        return opening | {"tools": [tool.schema for tool in self.tools.values()]}

    async def act(self, action: dict[str, Any]) -> dict[str, Any]:
        """Take one action and return its result.

        Raises ToolError if the action does not match the schema, or if the episode is over.
        """
        async with self._one_at_a_time:
            if self.is_done:
                raise ToolError("the episode is over")
            found = await self.session.step(action)
            self.is_done = bool(found["done"])
        return found

    async def step(self, reply: str, score: Score) -> Turn:
        if self.with_tools:
            turn = await super().step(reply, no_score)
            return Turn(messages=() if self.is_done else turn.messages, reward=turn.reward)
        try:
            found = await self.act({self.action: reply} if self.action else object_in(reply))
        except ToolError as error:
            return Turn(messages=[{"role": "user", "content": f"error: {error}"}])
        return Turn(messages=() if self.is_done else (self._message(found),), reward=float(found["reward"] or 0.0))

    def _message(self, found: dict[str, Any]) -> dict[str, Any]:
        observation = found["observation"]
        # The observation of a reset may have fewer fields than that of a step.
        value = observation.get(self.shown, "") if self.shown else observation
        text = value if isinstance(value, str) else json.dumps(value)
        return {"role": "user", "content": middle_left_out(text, self.characters)}

    async def close(self) -> None:
        await self.session.close()


class EnvironmentTool(Tool):
    """A tool of an environment. Calling it is an action."""

    def __init__(self, environment: OpenEnv, tool: dict[str, Any]) -> None:
        self.name, self.description, self.parameters = tool["name"], tool["description"], tool["input_schema"]
        self.environment = environment

    async def __call__(self, **arguments: Any) -> str:
        found = await self.environment.act({"type": "call_tool", "tool_name": self.name, "arguments": arguments})
        observation = found["observation"]
        if observation.get("error"):
            raise ToolError(observation["error"]["message"])
        result = observation.get("result")
        parts = (result.get("content") or ()) if isinstance(result, dict) else ({"text": str(result)},)
        text = middle_left_out("\n".join(str(part.get("text", "")) for part in parts), self.environment.characters)
        if isinstance(result, dict) and result.get("is_error"):
            raise ToolError(text)
        return Rewarded(text, float(found["reward"] or 0.0))


def object_in(reply: str) -> dict[str, Any]:
    """Return the JSON object in a reply. Raises ToolError if there is none."""
    try:
        return dict(json.loads(reply[reply.find("{") : reply.rfind("}") + 1]))
    except ValueError as error:
        raise ToolError("the reply has no JSON object") from error


async def no_score() -> float:
    return 0.0  # the environment's rewards are used
