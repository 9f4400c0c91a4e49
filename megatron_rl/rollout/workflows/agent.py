"""Agents that know OpenAI's API and nothing of training: functions that are given a URL, a key and a prompt's data."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_rl.api import InferenceEngine, RolloutWorkflow
from megatron_rl.config import GenerationConfig
from megatron_rl.import_path import check_call
from megatron_rl.rollout.workflows.agent_proxy import AgentProxy, AgentSession, ProxyOptions
from megatron_rl.rollout.workflows.conversation import ChatTemplate
from megatron_rl.rollout.workflows.rlvr import sample_key
from megatron_rl.rollout.workflows.scoring import RewardCall, RewardFn
from megatron_rl.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AgentTimeout(RuntimeError):
    """An agent took longer than it may. Its requests are refused from then on, which ends most of them."""


class AgentWorkflow(RolloutWorkflow):
    """Runs `agent(base_url, api_key, data, **agent_args)` for each of `gconfig.n_samples` samples, in a thread each.

    The agent, a function or a coroutine function, returns its reward, or None to have the reward function score the
    last reply that it got. Every dialogue that it led through the proxy becomes a trajectory with that reward; all of
    them are one group. `sequence["turns"]` counts a dialogue's replies, `sequence["sample"]` numbers its sample.
    """

    IMPORT_PATHS = ("agent",)

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        agent: Callable[..., Any],
        max_tokens: int,
        agent_args: dict[str, Any] | None = None,
        agent_timeout_s: float = 1800.0,
        enable_thinking: bool = False,
        reward_timeout_s: float = 60.0,
    ) -> None:
        """max_tokens: longest dialogue, prompt and all, at most the model's context."""
        check_call(agent, 3, agent_args or {}, key="rollout.workflow_args.agent_args")
        self.agent, self.agent_args, self.agent_timeout_s = agent, agent_args or {}, agent_timeout_s
        self.n_samples = gconfig.n_samples
        template = ChatTemplate(tokenizer, enable_thinking=enable_thinking)
        self.options = ProxyOptions(tokenizer=tokenizer, gconfig=gconfig, max_tokens=max_tokens, template=template)
        self.reward = RewardCall(reward_fn, tokenizer, timeout_s=reward_timeout_s)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory] | None:
        sessions = [AgentSession(engine, self.options, sample_key(data, n)) for n in range(self.n_samples)]
        async with AgentProxy(sessions) as proxy:
            groups = await asyncio.gather(*(self._run(n, one, proxy.base_url, data) for n, one in enumerate(sessions)))
        return [trajectory for group in groups for trajectory in group] or None

    async def _run(self, sample: int, session: AgentSession, base_url: str, data: dict[str, Any]) -> list[Trajectory]:
        given = {name: value for name, value in data.items() if name != "sample_key"}
        try:
            async with asyncio.timeout(self.agent_timeout_s) as limit:
                value = await in_own_thread(
                    lambda: finished(self.agent(base_url, session.key, given, **self.agent_args))
                )
        except TimeoutError as error:
            if not limit.expired():  # it is the agent's own
                raise
            raise AgentTimeout(
                f"agent {self.agent!r}: did not end within {self.agent_timeout_s:g} s; raise the workflow's "
                f"agent_timeout_s, or let it give up earlier."
            ) from error
        if value is None and session.last_reply is None:
            return []
        reward = await self.reward(session.last_reply, data) if value is None else float(value)
        if not math.isfinite(reward):
            raise ValueError(f"agent {self.agent!r}: returned {value!r}; must be a finite number or None.")
        return session.trajectories(reward, sample=sample)


def finished(result: Any) -> Any:
    """What a function returned, or what its coroutine comes to on an event loop of this thread."""
    return asyncio.run(as_coroutine(result)) if inspect.isawaitable(result) else result


async def as_coroutine(awaitable: Any) -> Any:
    return await awaitable


async def in_own_thread(call: Callable[[], Any]) -> Any:
    """Run a call that may take long. A pool, which rewards share, would let a few agents keep all others waiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # given up
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as raised:  # goes to the one who waits
            error = raised
            # No future takes the one, and from a task the others would end the event loop with all its episodes.
            if isinstance(raised, StopIteration) or not isinstance(raised, Exception):
                error = RuntimeError(f"the agent ended by {type(raised).__name__}: {raised}")
                error.__cause__ = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await future
