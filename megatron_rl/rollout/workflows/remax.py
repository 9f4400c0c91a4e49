"""ReMax (arXiv 2310.10505): sampled replies, and one greedy reply whose reward is their baseline."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_rl.api import InferenceEngine
from megatron_rl.rollout.workflows.rlvr import RLVRWorkflow
from megatron_rl.types import LLMRequest, Trajectory


class ReMaxWorkflow(RLVRWorkflow):
    """`gconfig.n_samples` replies with the greedy one's reward in `sequence["greedy_reward"]`; it is not trained."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        requests = self.sample_requests(data)
        greedy = LLMRequest(rid=requests[0].rid, input_ids=requests[0].input_ids, gconfig=self.gconfig.new(greedy=True))
        *replies, greedy_reply = await asyncio.gather(*map(engine.agenerate, [*requests, greedy]))
        *rewards, baseline = await asyncio.gather(*(self.reward(reply, data) for reply in [*replies, greedy_reply]))
        return [
            Trajectory.from_reply(reply, reward, greedy_reward=baseline)
            for reply, reward in zip(replies, rewards, strict=True)
        ]
