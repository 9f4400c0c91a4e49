"""Coefficients adapted from step to step to a measured value. Their state is checkpointed as JSON."""

from __future__ import annotations

from typing import Any

from megatron_rl.config import AlgorithmConfig


class KLController:
    """Weight of the KL penalty in the reward: fixed, or adapted to a target KL (Ziegler, arXiv 1909.08593)."""

    def __init__(self, options: AlgorithmConfig) -> None:
        self.options, self.coefficient = options, options.kl_coefficient

    def update(self, kl: float, trajectories: int) -> None:
        """Multiply the coefficient by 1 + clip(kl / target - 1, -0.2, 0.2) min(trajectories / horizon, 1).

        kl: mean per trained token. Without the min, a step longer than the horizon could make the coefficient negative.
        """
        if self.options.kl_target > 0:
            # one outlier step changes the coefficient by at most a fifth
            error = min(max(kl / self.options.kl_target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * min(trajectories / self.options.kl_horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.options.kl_target > 0:  # a fixed coefficient always comes from the config, also after a resume
            self.coefficient = state["coefficient"]


class EntropyController:
    """Weight of the entropy bonus: fixed, or adapted to keep the entropy above a target.

    Below the target the weight grows by `algo.entropy_step` per step. Above the target it shrinks by as much and is not
    applied (adaptive entropy control of Skywork-OR1, arXiv 2505.22312).
    """

    def __init__(self, options: AlgorithmConfig) -> None:
        self.options, self.value = options, options.entropy_coefficient
        self.is_below = True
        """Whether the last measured entropy was at or below the target."""

    @property
    def coefficient(self) -> float:
        return self.value if self.is_below else 0.0

    def update(self, entropy: float) -> None:
        """Adapt the weight. entropy: the step's mean per trained token, in nats."""
        if self.options.entropy_target > 0:
            self.is_below = entropy <= self.options.entropy_target
            step = self.options.entropy_step
            self.value = max(self.value + (step if self.is_below else -step), 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "is_below": self.is_below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.options.entropy_target > 0:  # a fixed weight always comes from the config, also after a resume
            self.value, self.is_below = state["value"], state["is_below"]
