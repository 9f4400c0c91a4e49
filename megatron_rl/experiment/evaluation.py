"""How well the policy answers the held-out prompts, greedily, and what its replies look like as text."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config import TrainConfig
from megatron_rl.rollout.groups import trained_versions
from megatron_rl.telemetry.run_log import RunLog, Sample
from megatron_rl.types import TrajectoryBatch

HELD_OUT = "held_out"


class Evaluations:
    """Those of one run, begun and logged in the order of their steps; on ranks other than 0 none is ever begun.

    Due before the first step, after the last, and between as the config says. An asynchronous run does not wait for
    those between, whose replies may be of several versions then.
    """

    def __init__(
        self,
        config: TrainConfig,
        prompts: list[dict[str, Any]],
        log_file: RunLog,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config, self.prompts, self.log_file, self.tokenizer = config, prompts, log_file, tokenizer
        self.scores: list[float] = []
        """Mean reward of each evaluation that was logged."""
        self._under_way: deque[tuple[int, Future[TrajectoryBatch]]] = deque()

    def is_due(self, step: int) -> bool:
        every = self.config.run.evaluate_every_steps
        is_end = step in (0, self.config.run.steps)
        return bool(self.prompts) and (is_end or (every > 0 and step % every == 0))

    def are_waited_for(self, step: int) -> bool:
        return self.config.rollout.max_staleness == 0 or step in (0, self.config.run.steps)

    def begin(self, step: int, replies: Future[TrajectoryBatch]) -> None:
        self._under_way.append((step, replies))

    @property
    def steps_under_way(self) -> list[int]:
        return [step for step, _ in self._under_way]

    @property
    def replies_under_way(self) -> list[Future[TrajectoryBatch]]:
        return [replies for _, replies in self._under_way]

    def log_finished(self) -> None:
        """Log the evaluations that are done, in their order. RuntimeError where one of them failed."""
        while self._under_way and self._under_way[0][1].done():
            step, replies = self._under_way.popleft()
            batch = replies.result()
            rewards = batch["rewards"]
            self.scores.append(float(rewards.mean()))
            is_right_or_wrong = bool(((rewards == 0) | (rewards == 1)).all())
            name = "accuracy" if is_right_or_wrong else "reward/mean"
            metrics = {name: float(rewards.mean()), "prompts": len(self.prompts)}
            versions = trained_versions(batch)
            if self.config.rollout.max_staleness > 0 and len(versions):
                metrics |= {"oldest_version": int(versions.min()), "newest_version": int(versions.max())}
            samples = decode_samples(self.tokenizer, batch, len(batch), self.prompts)
            self.log_file.log_evaluation(step, HELD_OUT, metrics, samples)


def decode_samples(
    tokenizer: PreTrainedTokenizerBase,
    batch: TrajectoryBatch,
    count: int,
    prompts: list[dict[str, Any]] | None = None,
) -> list[Sample]:
    """Decode the first `count` trajectories; `prompts` gives the answers where one trajectory belongs to each."""
    bounds, result = batch.cu_seqlens.tolist(), []
    for number in range(min(count, len(batch))):
        ids, mask = (batch[key][bounds[number] : bounds[number + 1]] for key in ("input_ids", "loss_mask"))
        group = int(batch["group"][number])
        answer = prompts[group].get("answer", "") if prompts and len(prompts) > group else ""
        result.append(
            Sample(
                prompt=tokenizer.decode(ids[~mask]),
                reply=tokenizer.decode(ids[mask]),
                reward=float(batch["rewards"][number]),
                answer=str(answer),
            )
        )
    return result
