"""Agents that know OpenAI's or Anthropic's API and nothing of training: functions of a URL, a key and a prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_rl.agents.agent_proxy import AgentProxy, ProxyAddress
from megatron_rl.agents.agent_session import AgentSession, ProxyOptions
from megatron_rl.agents.agent_workers import AgentFailed, AgentLost, AgentWorkers
from megatron_rl.agents.constrained import CHOICES
from megatron_rl.api import ContextOutgrown, InferenceEngine, RolloutWorkflow, Sampler
from megatron_rl.config import GenerationConfig
from megatron_rl.config.import_path import check_call
from megatron_rl.types import Trajectory
from megatron_rl.workflows.rendering import ChatTemplate
from megatron_rl.workflows.rlvr import sample_key
from megatron_rl.workflows.scoring import RewardCall, RewardFn
from megatron_rl.workflows.tool_formats import tool_format as named_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class AgentWorkflow(RolloutWorkflow):
    """Runs `agent(base_url, api_key, data, **agent_args)` for each of `gconfig.n_samples` samples, in a process each.

    The agent, a function or a coroutine function, returns its reward, or None to have the reward function score the
    last reply that it got; so is one scored that fails because its dialogue has outgrown the context. Every dialogue
    that it led through the proxy becomes a trajectory with that reward; all of them are one group. A list has a reward
    for each reply, in the order in which they came, and a trajectory's is the sum of its own. `sequence["turns"]`
    counts a dialogue's replies, `sequence["sample"]` numbers its sample.

    The agent is a function of a module: its processes import it. Each is killed at the end of its run, with all that
    it started.

        def agent(base_url, api_key, data):  # chat completions and Responses; Anthropic's clients add /v1 themselves
            client = openai.OpenAI(base_url=base_url, api_key=api_key)
            client.chat.completions.create(model="policy", messages=data["messages"])
        workflow = AgentWorkflow(reward, GenerationConfig(n_samples=4), tokenizer, agent, max_tokens=4096)
    """

    IMPORT_PATHS = ("agent",)

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        agent: Callable[..., Any] | str,
        max_tokens: int,
        agent_args: dict[str, Any] | None = None,
        agent_timeout_s: float = 1800.0,
        agent_workers: int = 128,
        enable_thinking: bool = False,
        reward_timeout_s: float = 60.0,
        tool_format: str = "auto",
        proxy: dict[str, str] | None = None,
        log_folder: str = "",
        constrained: str = "refuse",
    ) -> None:
        """max_tokens: longest dialogue, prompt and all, at most the model's context. agent_workers: processes at a
        time, of all episodes; an agent's time begins with its process, and the next one waits until one is free.
        tool_format: how the model writes calls, as `tool_formats.FORMATS` names it; auto: as its chat template shows.
        proxy: the fields of a ProxyAddress, for agents that are not on this host. log_folder: for what agents print, a
        file for each sample; a config's is `agents` in run.folder. constrained: `refuse` JSON formats and tools by
        name, and sample `required` freely; or ask the server for them by a grammar and leave such replies `untrained`.
        """
        if constrained not in CHOICES:
            raise ValueError(f"constrained = {constrained!r}: must be one of {', '.join(CHOICES)}.")
        if agent_workers < 1:
            raise ValueError(f"agent_workers = {agent_workers}: must be at least 1; each agent runs in a process.")
        if not isinstance(agent, str):
            check_call(agent, 3, agent_args or {}, key="rollout.workflow_args.agent_args")
        self.workers = AgentWorkers(agent, agent_args or {}, most=agent_workers, folder=log_folder)
        self.n_samples, self.agent_timeout_s = gconfig.n_samples, agent_timeout_s
        template = ChatTemplate(tokenizer, enable_thinking=enable_thinking)
        tools = named_format(tool_format, tokenizer)
        self.options = ProxyOptions(
            tokenizer=tokenizer,
            gconfig=gconfig,
            max_tokens=max_tokens,
            template=template,
            tools=tools,
            constrained=constrained,
        )
        self.address = ProxyAddress(**(proxy or {}))
        self.reward = RewardCall(reward_fn, tokenizer, timeout_s=reward_timeout_s)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory] | None:
        async with AgentProxy(self.options.max_tokens, self.address) as proxy:
            groups = await engine.samples(lambda sampler, n: self._run(n, sampler, proxy, data), range(self.n_samples))
        return [trajectory for group in groups for trajectory in group] or None

    async def _run(self, sample: int, engine: Sampler, proxy: AgentProxy, data: dict[str, Any]) -> list[Trajectory]:
        session = AgentSession(engine, self.options, sample_key(data, sample))
        # The prompt as its file has it: `sample_key` is the run's own bookkeeping.
        given = {name: value for name, value in data.items() if name != "sample_key"}
        name = f"{data.get('sample_key', 'episode')}-{sample}"
        async with proxy.serving(session):
            try:
                value = await self.workers.run(
                    proxy.base_url, session.key, given, name=name, timeout_s=self.agent_timeout_s
                )
            except AgentFailed as error:
                # OpenAI's clients raise when they are told that the context is full: then the dialogue is over, and
                # nothing has failed.
                if session.outgrown is None or isinstance(error, AgentLost):
                    raise
                if session.last_reply is None:
                    raise ContextOutgrown(session.outgrown) from error
                logger.info("agent %s ended with its context: %s", self.workers.path, session.outgrown)
                value = None
        # Here the session is closed: nothing changes its dialogues while they are scored.
        if value is None and session.last_reply is None:
            return []
        if value is None:
            value = float(await self.reward(session.last_reply, data))
        try:
            return session.trajectories(value, sample=sample)
        except ValueError as error:
            raise ValueError(f"agent {self.workers.path}: returned {error}") from error
