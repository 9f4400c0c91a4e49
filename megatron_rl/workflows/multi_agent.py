"""Debates: several agents of one policy answer the same question and read each other's replies."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from megatron_rl.api import ContextOutgrown, InferenceEngine, RolloutWorkflow, Sampler, together
from megatron_rl.config import GenerationConfig
from megatron_rl.types import LLMResponse, Trajectory
from megatron_rl.workflows.conversation import Conversation
from megatron_rl.workflows.rendering import ChatTemplate
from megatron_rl.workflows.rlvr import sample_key
from megatron_rl.workflows.scoring import RewardCall, RewardFn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DebateWorkflow(RolloutWorkflow):
    """Runs `gconfig.n_samples` debates per prompt, each with `rounds` rounds.

    In a round, all agents reply at the same time. Before the next round, each agent reads the others' replies. An
    agent's reward is that of its own last reply; with `shared_reward`, it is the mean over the debate's agents.
    `sequence["agent"]` is the agent's number and `sequence["sample"]` the debate's number. An agent's reward is
    compared with the mean over the prompt's debates. A text `prompt` is given to agents as a user message.

        agents = {"careful": "Work step by step.", "brief": "Answer in one sentence."}
        workflow = DebateWorkflow(reward, GenerationConfig(n_samples=4), tokenizer, agents, max_tokens=2048)
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        agents: dict[str, str],
        max_tokens: int,
        rounds: int = 2,
        shared_reward: bool = False,
        enable_thinking: bool = False,
        reward_timeout_s: float = 60.0,
    ) -> None:
        """agents: {name: system message}. max_tokens: maximum dialogue length of one agent, including the prompt."""
        if len(agents) < 2 or rounds < 1:
            raise ValueError(f"agents = {list(agents)}, rounds = {rounds}: a debate has 2 agents and 1 round at least.")
        self.gconfig, self.tokenizer, self.agents, self.rounds = gconfig, tokenizer, agents, rounds
        self.max_tokens, self.shared_reward = max_tokens, shared_reward
        self.form = ChatTemplate(tokenizer, enable_thinking=enable_thinking)
        self.reward = RewardCall(reward_fn, tokenizer, timeout_s=reward_timeout_s)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        debates = await together(engine.sample(self._debate, data, n) for n in range(self.gconfig.n_samples))
        return [trajectory for debate in debates for trajectory in debate]

    async def _debate(self, engine: Sampler, data: dict[str, Any], sample: int) -> list[Trajectory]:
        key, messages = sample_key(data, sample), messages_of(data)
        talks = [
            Conversation(self.form.opening({"messages": [{"role": "system", "content": system}, *messages]}))
            for system in self.agents.values()
        ]
        rids = [uuid.uuid4().hex for _ in talks]

        async def speak(number: int) -> LLMResponse:
            own, most = None if key is None else f"{key}/{number}", self.max_tokens
            return await talks[number].ask(engine, self.gconfig, max_tokens=most, rid=rids[number], key=own)

        if (longest := max(map(len, talks))) >= self.max_tokens:
            raise ContextOutgrown(f"max_tokens = {self.max_tokens}: the prompt alone has {longest}; raise it.")
        replies = await together(map(speak, range(len(talks))))
        for _ in range(self.rounds - 1):
            heard = [
                self.form.following(self._others(n, replies), reply.output_tokens) for n, reply in enumerate(replies)
            ]
            if any(len(talk) + len(added) >= self.max_tokens for talk, added in zip(talks, heard, strict=True)):
                for talk in talks:
                    talk.is_cut_off = True
                break  # all agents have had equally many rounds
            lengths = [len(talk) for talk in talks]
            for talk, added in zip(talks, heard, strict=True):
                talk.add(added)
            try:
                replies = await together(map(speak, range(len(talks))))
            except ContextOutgrown:  # the server's context is too short
                # Agents that replied in this round lose that reply too: rewards use `replies`, from the round before.
                for talk, length in zip(talks, lengths, strict=True):
                    talk.take_back(length)
                    talk.is_cut_off = True
                break
        rewards = await together(self.reward(reply, data) for reply in replies)
        if self.shared_reward:
            rewards = [sum(rewards) / len(rewards)] * len(rewards)
        return [talk.trajectory(rewards[number], agent=number, sample=sample) for number, talk in enumerate(talks)]

    def _others(self, number: int, replies: list[LLMResponse]) -> list[dict[str, Any]]:
        """Return a list of one user message with the other agents' replies. number: the reading agent's number."""
        said = [
            f"{name}: {self.tokenizer.decode(reply.output_tokens, skip_special_tokens=True)}"
            for other, (name, reply) in enumerate(zip(self.agents, replies, strict=True))
            if other != number
        ]
        return [{"role": "user", "content": "\n\n".join(said)}]


def messages_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in data:
        return list(data["messages"])
    if "prompt" in data:
        return [{"role": "user", "content": data["prompt"]}]
    raise ValueError(f"prompt with keys {sorted(data)}: agents talk in messages; give it messages or a prompt of text.")
