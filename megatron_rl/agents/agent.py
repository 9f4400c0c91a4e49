"""Workflow for agents that call OpenAI's or Anthropic's API. An agent is a function of a URL, a key and a prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_rl.agents.agent_proxy import AgentProxy, ProxyAddress
from megatron_rl.agents.agent_session import AgentSession, ProxyOptions
from megatron_rl.agents.agent_workers import AgentFailed, AgentLost, AgentWorkers
from megatron_rl.agents.constrained import CHOICES
from megatron_rl.agents.tool_formats import tool_format as named_format
from megatron_rl.api import ContextOutgrown, InferenceEngine, RolloutWorkflow, Sampler, together
from megatron_rl.config import MOST_REPORTED, GenerationConfig
from megatron_rl.config.import_path import check_call
from megatron_rl.types import Trajectory
from megatron_rl.workflows.rendering import ChatTemplate
from megatron_rl.workflows.rlvr import sample_key
from megatron_rl.workflows.scoring import RewardCall, RewardFn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class AgentWorkflow(RolloutWorkflow):
    """Runs `agent(base_url, api_key, data, **agent_args)` once per sample, in a process of its own.

    There are `gconfig.n_samples` samples per prompt. The agent is a function or coroutine function. It returns its
    reward, or None to let the reward function score the last reply that it received. The reward function also scores
    the last reply of an agent that fails because its dialogue outgrew the context.

    Every dialogue of the agent becomes a trajectory with that reward, and all trajectories form one group. If the
    agent returns a list, the list must have one reward per reply, in the order received. A trajectory's reward is then
    the sum over its replies. `sequence["turns"]` is the number of replies in a dialogue, and `sequence["sample"]` is
    the index of its sample.

    The agent must be a module-level function, because worker processes import it. When an agent's run ends, its process
    is killed, with all processes that it started. `base_url` ends in /v1. Anthropic's clients append /v1 themselves, so
    an agent must remove it for them.

        def agent(base_url, api_key, data):
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
        """Configure the workflow.

        max_tokens: maximum dialogue length including the prompt, at most the model's context.
        agent_workers: maximum number of agent processes over all episodes. Further agents wait. An agent's time limit
        (agent_timeout_s) starts with its process.
        tool_format: the model's format for calls, a key of `tool_formats.FORMATS`, or auto to detect it from the chat
        template.
        proxy: fields of a ProxyAddress; needed for agents on other hosts.
        log_folder: folder for the agents' output, one file per sample. If a config sets up the workflow, the default is
        `agents` in run.folder.
        constrained: what to do if an agent demands a JSON format, a tool by name or any tool (`required`). `refuse`
        rejects JSON formats and tools by name, and samples freely for `required`. `untrained` enforces all three by a
        grammar on the server and does not train the replies. `trained` trains them too, and needs generation.top_k.
        """
        if constrained not in CHOICES:
            raise ValueError(f"constrained = {constrained!r}: must be one of {', '.join(CHOICES)}.")
        if constrained == "trained" and not gconfig.support_size:
            raise ValueError(
                f"constrained = 'trained': with generation.top_k = {gconfig.top_k} no server reports which tokens a "
                f"grammar had left, over which log-probabilities are needed; set generation.top_k from 2 to "
                f"{MOST_REPORTED}, or constrained=untrained."
            )
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
            # The proxy must not be closed while an agent still runs.
            groups = await together(engine.sample(self._run, n, proxy, data) for n in range(self.n_samples))
        return [trajectory for group in groups for trajectory in group] or None

    async def _run(self, engine: Sampler, sample: int, proxy: AgentProxy, data: dict[str, Any]) -> list[Trajectory]:
        session = AgentSession(engine, self.options, sample_key(data, sample))
        # The prompt as in its file: `sample_key` is internal.
        given = {name: value for name, value in data.items() if name != "sample_key"}
        name = f"{data.get('sample_key', 'episode')}-{sample}"
        async with proxy.serving(session):
            try:
                value = await self.workers.run(
                    proxy.base_url, session.key, given, name=name, timeout_s=self.agent_timeout_s
                )
            except AgentFailed as error:
                # OpenAI's clients raise when the context is full. The dialogue is then complete, and nothing has
                # failed.
                if session.outgrown is None or isinstance(error, AgentLost):
                    raise
                if session.last_reply is None:
                    raise ContextOutgrown(session.outgrown) from error
                logger.info("agent %s ended with its context: %s", self.workers.path, session.outgrown)
                value = None
        # The session is closed now: its dialogues cannot change while they are scored.
        if value is None and session.last_reply is None:
            return []
        if value is None:
            value = float(await self.reward(session.last_reply, data))
        try:
            return session.trajectories(value, sample=sample)
        except ValueError as error:
            raise ValueError(f"agent {self.workers.path}: returned {error}") from error
