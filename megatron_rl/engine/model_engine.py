"""What an engine does alike on either backend: the version, which head computes what, scores, and statistics."""

from __future__ import annotations

from typing import Any, Self

from tensordict import TensorDict
from torch import Tensor

from megatron_rl.api import TrainEngine, ValueLoss
from megatron_rl.types import StepStats, TrajectoryBatch
from megatron_rl.weights.architecture import Architecture


class ModelEngine(TrainEngine):
    """An engine of the model `arch`, whose head says what it computes: a policy's log-probs, or values."""

    arch: Architecture
    version = 0

    def eval(self) -> Self:
        return self.train(False)

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self.version = version

    def score(self, data: TrajectoryBatch | TensorDict) -> Tensor:
        """Return the value at each sequence's last token, `[B]` float32: what a reward model gives a whole sequence.

        An empty sequence scores 0. All ranks call it, with their share of the data; the engine has a value head.
        """
        self.check_head("score", "value")
        longer, last = TrajectoryBatch.of(data).with_one_more_token()
        return self.forward(longer)[last]

    def check_loss(self, loss_fn: Any) -> None:
        """ValueError for a loss of the other head."""
        self.check_head("loss_fn", "value" if isinstance(loss_fn, ValueLoss) else "policy")

    def check_head(self, asked: str, head: str) -> None:
        """ValueError where `asked` needs a head that this engine has not."""
        if self.arch.head != head:
            raise ValueError(
                f"{asked}: needs an engine with head={head!r}, and this one has {self.arch.head!r}: log-probs and "
                f"logits are a policy's, values and scores those of a critic or reward model; ask the other engine."
            )


def trained_tokens(rows: TensorDict) -> Tensor:
    """The usual loss weight: the number of trained rows of a microbatch."""
    return (rows["labels"] >= 0).sum()


def step_stats(totals: dict[str, float], **rest: Any) -> StepStats:
    """totals: the global sums of loss, weight and statistics, by name."""
    loss, weight = totals.pop("loss"), totals.pop("weight")
    return StepStats(loss=loss / max(weight, 1.0), weight=weight, sums=totals, **rest)
