"""What an advantage estimator and a policy loss are, and the decorators that enter them into the catalogue.

A docstring's first line is the formula and its line `Source: ...` says where it is from; `megatron-rl algorithms` and
docs/algorithms.md show both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Estimator:
    """How the advantages of a step's trajectories are found.

    function(batch, **algo.advantage_args) -> `[B]` float, one for all tokens of a trajectory, or `[N]`, one per token.
    The batch is the whole step's: `scores` `[B]` and `token_rewards` `[N]` are the shaped rewards, `group` the prompt's
    number, `loss_mask` says which tokens are trained.
    """

    function: Callable[..., Tensor]
    mean: str = "none"
    std: str = "none"
    """How the result is normalised where the config does not say: none, group or batch."""
    compares_group: bool = False
    """Says nothing of a prompt with one reply."""


@dataclass(frozen=True)
class Loss:
    """What the policy's loss is, before KL and entropy terms, weights and aggregation.

    A fused loss runs in the operator `ops.ppo_loss`: function(options, **algo.loss_args) -> fields of its PpoOptions.
    Any other is plain torch: function(rows: LossRows, options, **algo.loss_args) -> `[T]`, each row's loss.
    """

    function: Callable[..., Any]
    fused: bool = False
    by_sequence: bool = False
    """Looks at a row's neighbours: gets whole sequences and their bounds."""
    select: Callable[..., Tensor] | None = None
    """select(batch, **algo.loss_args) -> `[N]` bool, the tokens whose advantage counts, from the whole step's batch,
    which has `proximal_logprobs` then."""


ESTIMATORS: dict[str, Estimator] = {}
LOSSES: dict[str, Loss] = {}


def estimator(
    name: str = "", *, mean: str = "none", std: str = "none", compares_group: bool = False
) -> Callable[[Callable[..., Tensor]], Estimator]:
    """Decorate an estimator's function; a name enters it into the catalogue."""

    def decorate(function: Callable[..., Tensor]) -> Estimator:
        entry = Estimator(function, mean, std, compares_group)
        if name:
            ESTIMATORS[name] = entry
        return entry

    return decorate


def loss(
    name: str = "", *, fused: bool = False, by_sequence: bool = False, select: Callable[..., Tensor] | None = None
) -> Callable[[Callable[..., Any]], Loss]:
    """Decorate a loss's function; a name enters it into the catalogue."""

    def decorate(function: Callable[..., Any]) -> Loss:
        entry = Loss(function, fused, by_sequence, select)
        if name:
            LOSSES[name] = entry
        return entry

    return decorate
