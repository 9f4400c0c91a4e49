"""RL with verifiable rewards: several replies to one prompt, each scored by a reward function."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

from megatron_rl.api import InferenceEngine, RolloutWorkflow, Sampler, together
from megatron_rl.config import GenerationConfig
from megatron_rl.types import LLMRequest, LLMResponse, Trajectory
from megatron_rl.workflows.rendering import prompt_ids
from megatron_rl.workflows.scoring import RewardCall, RewardFn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RLVRWorkflow(RolloutWorkflow):
    """Samples `gconfig.n_samples` replies to each prompt. Each reply gives one trajectory.

    For example:

        def reward(completions, answer, **_):
            return float(completions.strip() == answer)
        workflow = RLVRWorkflow(reward, GenerationConfig(n_samples=8), tokenizer)
        batch = engine.rollout_batch([{"prompt": "3+4=", "answer": "7"}], workflow)
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        enable_thinking: bool = False,
        reward_timeout_s: float = 60.0,
    ) -> None:
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        self.reward = RewardCall(reward_fn, tokenizer, timeout_s=reward_timeout_s)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        requests = self.sample_requests(data)
        pairs = await together([asyncio.create_task(engine.sample(self.scored_reply, it, data)) for it in requests])
        return [Trajectory.from_reply(reply, reward) for reply, reward in pairs]

    async def scored_reply(
        self, engine: Sampler, request: LLMRequest, data: dict[str, Any]
    ) -> tuple[LLMResponse, float]:
        reply = await engine.agenerate(request)
        return reply, await self.reward(reply, data)

    def sample_requests(self, data: dict[str, Any]) -> list[LLMRequest]:
        """Return one request per sample.

        All requests share one rid, so that one server gets them all and reuses the prompt's KV cache.
        """
        rid = uuid.uuid4().hex
        ids = prompt_ids(self.tokenizer, data, enable_thinking=self.enable_thinking)
        return [
            LLMRequest(rid=rid, input_ids=ids, gconfig=self.gconfig, metadata={"sample_key": sample_key(data, sample)})
            for sample in range(self.gconfig.n_samples)
        ]


def sample_key(data: dict[str, Any], sample: int) -> str | None:
    """Return a name for sample number `sample` of this episode; None if the prompt has no `sample_key`.

    The engine derives the sampling seed from this name and the run's seed.
    """
    return f"{data['sample_key']}/{sample}" if "sample_key" in data else None
