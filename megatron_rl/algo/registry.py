"""Types and decorators for the catalogue of advantage estimators, policy losses and pair losses.

A fused loss configures the operator that large runs train with. A torch loss is a plain function that anybody can
write.

A docstring's first line is the formula, and its line `Source: ...` cites the origin. `megatron-rl algorithms` and
docs/algorithms.md show both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, TypeVar

from torch import Tensor

from megatron_rl.config.rules import ENTERED
from megatron_rl.ops import PpoOptions

Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
"""For each option of an entry's function: a check of its value, and the rule to print when the check fails."""


def above_0(value: Any) -> bool:
    return bool(0 < value < inf)


SHARE = (lambda value: 0 < value <= 1, "must be in (0, 1]; a share of the step's trained tokens")


@dataclass(frozen=True)
class Estimator:
    """Advantage estimator for the trajectories of a step.

    function(batch, **algo.advantage_args) returns floats: `[B]`, one per trajectory, or `[N]`, one per token. Its
    inputs are the shaped rewards `scores` `[B]` and `token_rewards` `[N]`, the prompt's number `group` `[B]`, and
    `loss_mask` `[N]`, which is True for trained tokens.

    `[B]` columns hold the whole step's trajectories on every rank, `[N]` columns only the tokens that this rank's
    replica trains. `batch.sums_of_tokens`, which every rank must call, sums the tokens of all trajectories. The
    trajectories of a sample (`batch.samples`) count once when `[B]` results are normalised.

        @estimator(mean="group", std="group")  # algo.advantage: my_package.mine:squared
        def squared(batch: TrajectoryBatch) -> Tensor:
            return batch["scores"].square()
    """

    function: Callable[..., Tensor]
    mean: str = "none"
    std: str = "none"
    """Default normalisation, unless the config sets one: none, group or batch."""
    compares_group: bool = False
    """Whether the estimator compares the replies to one prompt, and so needs several of them."""
    needs: tuple[str, ...] = ()
    """Further token columns that the estimator reads: `proximal_logprobs`, or `cold_logprobs`, which are at half the
    temperature. Both are the policy's before the step's updates."""
    rules: Rules = field(default_factory=dict)


@dataclass(frozen=True)
class FusedLoss:
    """Policy loss that the operator `ops.ppo_loss` computes in one pass, with its gradient and statistics.

    function(options, **algo.loss_args) returns PpoOptions with the loss's own fields set. KL terms, entropy terms and
    behaviour weights are set from the config afterwards.

        @fused_loss()  # algo.loss: my_package.mine:wide_clip
        def wide_clip(options: AlgorithmConfig, *, factor: float = 2.0) -> PpoOptions:
            return PpoOptions(clip_low=options.clip_low, clip_high=factor * options.clip_high)
    """

    function: Callable[..., PpoOptions]
    select: Callable[..., Tensor] | None = None
    """select(batch, **algo.loss_args) returns `[N]` bool: the tokens that keep their advantage. The batch has the
    estimator's columns and `proximal_logprobs`."""
    rules: Rules = field(default_factory=dict)

    @property
    def chooses(self) -> bool:
        """True if the loss selects some of a step's tokens, before the step's updates."""
        return self.select is not None


@dataclass(frozen=True)
class TorchLoss:
    """Policy loss in plain torch, before KL and entropy terms, weights and aggregation.

    function(rows: LossRows, options, **algo.loss_args) returns `[T]`, the loss of each row. `LossRows` has an example.
    """

    function: Callable[..., Tensor]
    by_sequence: bool = False
    """True if a row's loss depends on other rows of its sequence. It is then given whole sequences and their bounds."""
    select: Callable[..., Tensor] | None = None
    """select(batch, **algo.loss_args) returns `[N]` bool: the tokens that keep their advantage. The batch has the same
    columns as in `FusedLoss.select`."""
    mark: Callable[..., Tensor] | None = None
    """Function that is called like `select`, but all tokens keep their advantage. The loss reads the result as
    `LossRows.marked`."""
    rules: Rules = field(default_factory=dict)

    @property
    def chooses(self) -> bool:
        return self.select is not None or self.mark is not None


@dataclass(frozen=True)
class PairLoss:
    """Loss on pairs of replies. Training minimises its mean.

    function(pairs: Pairs, **preference.loss_args) returns the losses `[P]` and the model's implicit rewards of the
    replies `[P, 2]`. `Pairs` has an example.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    head: str = "policy"
    """The model's head. With `policy`, the loss is computed from log-probabilities. With `value`, it is computed from
    scores, and the model becomes a reward model."""
    needs_reference: bool = False
    """Whether the loss compares the model with its state before the first update."""
    rules: Rules = field(default_factory=dict)


ESTIMATORS: dict[str, Estimator] = {}
LOSSES: dict[str, FusedLoss | TorchLoss] = {}
PAIR_LOSSES: dict[str, PairLoss] = {}

Entry = TypeVar("Entry")


def _entering(
    catalogue: dict[str, Any], kind: str, name: str, make: Callable[[Callable[..., Any]], Entry]
) -> Callable[[Callable[..., Any]], Entry]:
    """Return a decorator that turns a function into an entry.

    If `name` is not empty, the entry is also added to the catalogue, and configs of this process may then name it.
    """

    def decorate(function: Callable[..., Any]) -> Entry:
        entry = make(function)
        if name:
            catalogue[name] = entry
            ENTERED[kind].add(name)
        return entry

    return decorate


def estimator(name: str = "", **fields: Any) -> Callable[[Callable[..., Tensor]], Estimator]:
    """Return a decorator that turns a function into an Estimator.

    name: if given, the estimator is in the catalogue under this name. fields: further fields of `Estimator`.
    """
    return _entering(ESTIMATORS, "estimator", name, partial(Estimator, **fields))


def fused_loss(name: str = "", **fields: Any) -> Callable[[Callable[..., PpoOptions]], FusedLoss]:
    """Return a decorator that turns a function into a FusedLoss.

    name: if given, the loss is in the catalogue under this name. fields: further fields of `FusedLoss`.
    """
    return _entering(LOSSES, "loss", name, partial(FusedLoss, **fields))


def torch_loss(name: str = "", **fields: Any) -> Callable[[Callable[..., Tensor]], TorchLoss]:
    """Return a decorator that turns a function into a TorchLoss, a loss in plain torch.

    name: if given, the loss is in the catalogue under this name, but only in this process. Other processes, such as
    those started by `megatron-rl launch`, need an import path: algo.loss=my_module:mine. fields: further fields of
    `TorchLoss`.
    """
    return _entering(LOSSES, "loss", name, partial(TorchLoss, **fields))


def pair_loss(name: str = "", **fields: Any) -> Callable[[Callable[..., tuple[Tensor, Tensor]]], PairLoss]:
    """Return a decorator that turns a function into a PairLoss.

    name: if given, the loss is in the catalogue under this name. fields: further fields of `PairLoss`.
    """
    return _entering(PAIR_LOSSES, "pair_loss", name, partial(PairLoss, **fields))
