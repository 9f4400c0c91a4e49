"""Replies scored by the policy itself in addition to the reward function (self-rewarding, arXiv 2401.10020)."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

from megatron_rl.api import InferenceEngine, Sampler
from megatron_rl.config import GenerationConfig
from megatron_rl.rewards.grading import QUESTION, Grading
from megatron_rl.types import LLMRequest, LLMResponse, Trajectory
from megatron_rl.workflows.rendering import ChatTemplate
from megatron_rl.workflows.rlvr import RLVRWorkflow
from megatron_rl.workflows.scoring import RewardFn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class JudgedWorkflow(RLVRWorkflow):
    """Single replies that the policy itself judges.

    A reply's reward is the reward function's value plus `weight` * grade / `best`. The judge sees the question and the
    reply's text. The judge's own replies are not trained. To use another model as the judge, use the reward
    rewards.judge:Judge instead of this workflow.

        workflow = JudgedWorkflow(reward, GenerationConfig(n_samples=8), tokenizer, weight=0.5)
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        weight: float = 1.0,
        question: str = QUESTION,
        best: float = 10.0,
        judge_tokens: int = 512,
        attempts: int = 3,
        enable_thinking: bool = False,
        reward_timeout_s: float = 60.0,
    ) -> None:
        """question, best, attempts: see Grading. judge_tokens: maximum tokens of a verdict."""
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking, reward_timeout_s)
        self.weight, self.grading = weight, Grading(question=question, best=best, attempts=attempts)
        self.judging = gconfig.new(n_samples=1, max_new_tokens=judge_tokens, min_new_tokens=0, stop=[])
        self.template = ChatTemplate(tokenizer, enable_thinking=enable_thinking)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        requests = self.sample_requests(data)
        return await asyncio.gather(*(engine.sample(self._graded_reply, request, data) for request in requests))

    async def _graded_reply(self, engine: Sampler, request: LLMRequest, data: dict[str, Any]) -> Trajectory:
        reply = await engine.agenerate(request)
        reward = await self.reward(reply, data)
        grade = await self._grade(engine, reply, request.metadata["sample_key"], data)
        return Trajectory.from_reply(reply, reward + self.weight * grade, judge_grade=grade)

    async def _grade(self, engine: Sampler, reply: LLMResponse, key: str | None, data: dict[str, Any]) -> float:
        """Return the judge's grade in [0, 1].

        If no attempt yields a grade, NoVerdict is raised, which fails the episode.
        """
        # Skip special tokens: in the judge's prompt, the dialogue's turn markers would act as its own.
        asked = self.tokenizer.decode(reply.input_tokens, skip_special_tokens=True)
        shown = self.tokenizer.decode(reply.output_tokens, skip_special_tokens=True)
        prompt = self.template.opening({"messages": self.grading.asked(asked, shown, data)})
        # Each attempt needs its own key: the same key means the same sampling seed, and the same verdict.
        for attempt in range(self.grading.attempts):
            metadata = {"sample_key": f"{key}/judge {attempt}"} if key is not None else {}
            request = LLMRequest(rid=uuid.uuid4().hex, input_ids=prompt, gconfig=self.judging, metadata=metadata)
            verdict = await engine.agenerate(request)
            text = self.tokenizer.decode(verdict.output_tokens, skip_special_tokens=True)
            if (grade := self.grading.grade_of(text)) is not None:
                return grade
        raise self.grading.no_verdict
