"""ReMax (arXiv 2310.10505): the reward of one greedy reply is the baseline of the sampled replies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.api import InferenceEngine
from megatron_rl.config import GenerationConfig
from megatron_rl.types import LLMRequest, Trajectory
from megatron_rl.workflows.rlvr import RLVRWorkflow
from megatron_rl.workflows.scoring import RewardFn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ReMaxWorkflow(RLVRWorkflow):
    """Samples `gconfig.n_samples` replies, and generates a greedy reply that is not trained.

    `sequence["greedy_reward"]` is the greedy reply's reward, and `sequence["greedy_tokens"]` its length, for
    length-dependent shaping. keep_greedy: also return the greedy reply as a trajectory, with `is_greedy` = 1. A reward
    model, which scores trajectories, can then score it.

        workflow = ReMaxWorkflow(reward, GenerationConfig(n_samples=1), tokenizer)
        actor = PolicyActor(engine, AlgorithmConfig(advantage="remax"), temperature=1.0)
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        enable_thinking: bool = False,
        reward_timeout_s: float = 60.0,
        keep_greedy: bool = False,
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking, reward_timeout_s)
        self.keep_greedy = keep_greedy

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        requests = self.sample_requests(data)
        greedy = LLMRequest(rid=requests[0].rid, input_ids=requests[0].input_ids, gconfig=self.gconfig.new(greedy=True))
        requests.append(greedy)
        pairs = await asyncio.gather(*(engine.sample(self.scored_reply, request, data) for request in requests))
        greedy_reply, greedy_reward = pairs[-1]
        baseline = {"greedy_reward": greedy_reward, "greedy_tokens": greedy_reply.output_len}
        trajectories = [Trajectory.from_reply(reply, reward, **baseline) for reply, reward in pairs]
        *sampled, greedy_one = trajectories
        if not self.keep_greedy:
            return sampled
        greedy_one.loss_mask = torch.zeros_like(greedy_one.loss_mask)
        for trajectory in trajectories:
            trajectory.sequence["is_greedy"] = float(trajectory is greedy_one)
        return trajectories
