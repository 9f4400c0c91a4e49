"""Coefficients that follow a measurement from step to step. Their state goes into checkpoints as JSON."""

from __future__ import annotations

from typing import Any

from megatron_rl.config import AlgorithmConfig


class KLController:
    """The weight of the KL penalty in the reward, fixed or steered to a target (Ziegler, arXiv 1909.08593)."""

    def __init__(self, options: AlgorithmConfig) -> None:
        self.options, self.coefficient = options, options.kl_coefficient

    def update(self, kl: float, trajectories: int) -> None:
        """coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) min(trajectories / horizon, 1).

        kl: mean per trained token. A step that is longer than the horizon would turn the penalty's sign otherwise.
        """
        if self.options.kl_target > 0:
            error = min(max(kl / self.options.kl_target - 1.0, -0.2), 0.2)  # one odd step moves it by a fifth at most
            self.coefficient *= 1.0 + error * min(trajectories / self.options.kl_horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.options.kl_target > 0:  # else the option says what it is, also in a resumed run
            self.coefficient = state["coefficient"]


class EntropyController:
    """The weight of the entropy bonus, fixed or steered to keep the entropy above a target.

    Below the target the weight grows by `algo.entropy_step` a step, above it shrinks as much and is not applied
    (adaptive entropy control of Skywork-OR1, arXiv 2505.22312).
    """

    def __init__(self, options: AlgorithmConfig) -> None:
        self.options, self.value = options, options.entropy_coefficient
        self.is_below = True
        """The entropy, when it was last measured."""

    @property
    def coefficient(self) -> float:
        return self.value if self.is_below else 0.0

    def update(self, entropy: float) -> None:
        """entropy: the step's mean per trained token, in nats."""
        if self.options.entropy_target > 0:
            self.is_below = entropy <= self.options.entropy_target
            step = self.options.entropy_step
            self.value = max(self.value + (step if self.is_below else -step), 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "is_below": self.is_below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.options.entropy_target > 0:  # else the option says what it is, also in a resumed run
            self.value, self.is_below = state["value"], state["is_below"]
