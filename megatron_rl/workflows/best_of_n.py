"""Sampling more replies than are trained. Only the best replies are kept, or the best and the worst."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_rl.api import InferenceEngine
from megatron_rl.config import GenerationConfig
from megatron_rl.types import Trajectory
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
