"""Variants of RLVRWorkflow: selection among more replies, a greedy baseline, and the policy as its own judge."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.api import InferenceEngine, Sampler, together
from megatron_rl.config import GenerationConfig
from megatron_rl.rewards.judge import QUESTION, Grading
from megatron_rl.types import LLMRequest, LLMResponse, Trajectory
from megatron_rl.workflows.rendering import ChatTemplate
from megatron_rl.workflows.rlvr import RLVRWorkflow
from megatron_rl.workflows.scoring import RewardFn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BestOfNWorkflow(RLVRWorkflow):
    """Samples `candidates` replies and keeps `gconfig.n_samples` of them by reward; ties go to the earlier sample.

    keep: `best`, as in RAFT (arXiv 2304.06767), or `extremes`: half best, half worst. The extremes have the largest
    variance of rewards (PODS, arXiv 2504.13818, for 0/1 rewards). The group's mean is taken over the kept replies only.
    Held-out prompts are evaluated without selection, because selection would use the very rewards to be measured.

        workflow = BestOfNWorkflow(reward, GenerationConfig(n_samples=4), tokenizer, candidates=16, keep="extremes")
    """

    @classmethod
    def evaluating(cls, *, candidates: int, keep: str = "best", **arguments: Any) -> RLVRWorkflow:
        # The two parameters that RLVRWorkflow lacks are named here, so that `arguments` does not contain them.
        return RLVRWorkflow(**arguments)

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        candidates: int,
        keep: str = "best",
        enable_thinking: bool = False,
        reward_timeout_s: float = 60.0,
    ) -> None:
        if candidates < gconfig.n_samples:
            raise ValueError(
                f"candidates = {candidates}: {gconfig.n_samples} of them (generation.n_samples) are trained; raise it."
            )
        if keep not in ("best", "extremes"):
            raise ValueError(f"keep = {keep!r}: must be best or extremes.")
        super().__init__(reward_fn, gconfig.new(n_samples=candidates), tokenizer, enable_thinking, reward_timeout_s)
        self.kept, self.keep = gconfig.n_samples, keep

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        # sorted() is stable: ties go to the earlier sample.
        falling = sorted(await super().arun_episode(engine, data), key=lambda trajectory: -trajectory.reward)
        worst = self.kept // 2 if self.keep == "extremes" else 0
        return falling[: self.kept - worst] + falling[len(falling) - worst :]  # [-worst:] would be all if worst is 0


class ReMaxWorkflow(RLVRWorkflow):
    """Samples `gconfig.n_samples` replies, and a greedy reply whose reward is their baseline (arXiv 2310.10505).

    `sequence["greedy_reward"]` is the greedy reply's reward, and `sequence["greedy_tokens"]` its length, for
    length-dependent shaping. keep_greedy: also return the greedy reply as a trajectory without trained tokens, with
    `is_greedy` = 1. A reward model, which scores trajectories, can then score the greedy reply.

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
        pairs = await together(engine.sample(self.scored_reply, request, data) for request in requests)
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


class JudgedWorkflow(RLVRWorkflow):
    """Single replies that the policy itself judges (self-rewarding, arXiv 2401.10020).

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
        """question, best, attempts: as in Grading. judge_tokens: maximum number of tokens of a verdict."""
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking, reward_timeout_s)
        self.weight, self.grading = weight, Grading(question=question, best=best, attempts=attempts)
        self.judging = gconfig.new(n_samples=1, max_new_tokens=judge_tokens, min_new_tokens=0, stop=[])
        self.template = ChatTemplate(tokenizer, enable_thinking=enable_thinking)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        requests = self.sample_requests(data)
        return await together(engine.sample(self._graded_reply, request, data) for request in requests)

    async def _graded_reply(self, engine: Sampler, request: LLMRequest, data: dict[str, Any]) -> Trajectory:
        reply, reward = await self.scored_reply(engine, request, data)
        grade = await self._grade(engine, reply, request.metadata["sample_key"], data)
        return Trajectory.from_reply(reply, reward + self.weight * grade, judge_grade=grade)

    async def _grade(self, engine: Sampler, reply: LLMResponse, key: str | None, data: dict[str, Any]) -> float:
        """Return the judge's grade in [0, 1]. NoVerdict, which fails the episode, if no attempt yields a grade."""
        # Skip special tokens: in the judge's prompt, the dialogue's turn markers would act as its own.
        asked = self.tokenizer.decode(reply.input_tokens, skip_special_tokens=True)
        shown = self.tokenizer.decode(reply.output_tokens, skip_special_tokens=True)
        prompt = self.template.opening({"messages": self.grading.asked(asked, shown, data)})

        async def verdict(attempt: int) -> str:
            # Each attempt needs its own key: the same key means the same sampling seed, and the same verdict.
            metadata = {"sample_key": f"{key}/judge {attempt}"} if key is not None else {}
            request = LLMRequest(rid=uuid.uuid4().hex, input_ids=prompt, gconfig=self.judging, metadata=metadata)
            said = await engine.agenerate(request)
            return str(self.tokenizer.decode(said.output_tokens, skip_special_tokens=True))

        return await self.grading.grade(verdict)
