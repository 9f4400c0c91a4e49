"""Advantage estimators, policy losses of two kinds and losses of pairs, and the decorators that enter them into the
catalogue.

A fused loss is a setting of the operator that large runs train with, a torch loss is a function that anybody can write.

A docstring's first line is the formula and its line `Source: ...` says where it is from; `megatron-rl algorithms` and
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
"""By the name of an option: whether a value is allowed, and what it must be."""


def above_0(value: Any) -> bool:
    return bool(0 < value < inf)


SHARE = (lambda value: 0 < value <= 1, "must be in (0, 1]; a share of the step's trained tokens")


@dataclass(frozen=True)
class Estimator:
    """An estimator of the advantages of a step's trajectories.

    function(batch, **algo.advantage_args) -> `[B]` float, one for all tokens of a trajectory, or `[N]`, one per token.
    `scores` `[B]` and `token_rewards` `[N]` are the shaped rewards, `group` the prompt's number, `loss_mask` says which
    tokens are trained. Numbers of trajectories are those of the whole step, on every rank; numbers of tokens those that
    the rank's replica trains: `batch.sums_of_tokens` makes each trajectory's sum of them, right for all of them on
    every rank, and all ranks call it. Several trajectories of one sample (`batch.samples`) count
    once where `[B]` results are normalised.

        @estimator(mean="group", std="group")  # algo.advantage: my_package.mine:squared
        def squared(batch: TrajectoryBatch) -> Tensor:
            return batch["scores"].square()
    """

    function: Callable[..., Tensor]
    mean: str = "none"
    std: str = "none"
    """The normalisation where the config does not say: none, group or batch."""
    compares_group: bool = False
    """Says nothing of a prompt with one reply."""
    needs: tuple[str, ...] = ()
    """The columns of tokens that it asks for beside these: `proximal_logprobs`, and `cold_logprobs`, the same at half
    the temperature, both of the policy before the step's updates."""
    rules: Rules = field(default_factory=dict)
    """Of algo.advantage_args."""


@dataclass(frozen=True)
class FusedLoss:
    """A policy loss that the operator `ops.ppo_loss` computes, with its gradient and statistics, in one pass.

    function(options, **algo.loss_args) -> the operator's PpoOptions, as far as they are the loss's own: KL and entropy
    terms and behaviour weights are set from the config afterwards.

        @fused_loss()  # algo.loss: my_package.mine:wide_clip
        def wide_clip(options: AlgorithmConfig, *, factor: float = 2.0) -> PpoOptions:
            return PpoOptions(clip_low=options.clip_low, clip_high=factor * options.clip_high)
    """

    function: Callable[..., PpoOptions]
    select: Callable[..., Tensor] | None = None
    """select(batch, **algo.loss_args) -> `[N]` bool, the tokens whose advantage counts, of a batch as an estimator has
    it, which has `proximal_logprobs` then."""
    rules: Rules = field(default_factory=dict)
    """Of algo.loss_args."""

    @property
    def chooses(self) -> bool:
        """True where tokens are chosen among all of a step's, before its updates."""
        return self.select is not None


@dataclass(frozen=True)
class TorchLoss:
    """A policy loss in plain torch, before KL and entropy terms, weights and aggregation.

    function(rows: LossRows, options, **algo.loss_args) -> `[T]`, each row's loss; `LossRows` has an example.
    """

    function: Callable[..., Tensor]
    by_sequence: bool = False
    """Looks at a row's neighbours: gets whole sequences and their bounds."""
    select: Callable[..., Tensor] | None = None
    """As a fused loss's."""
    mark: Callable[..., Tensor] | None = None
    """As select, but of tokens whose advantage stays and which the loss knows by `LossRows.marked`."""
    rules: Rules = field(default_factory=dict)
    """Of algo.loss_args."""

    @property
    def chooses(self) -> bool:
        return self.select is not None or self.mark is not None


@dataclass(frozen=True)
class PairLoss:
    """A loss of pairs of replies, of which training makes the mean small.

    function(pairs: Pairs, **preference.loss_args) -> the losses `[P]`, and by the model the replies' worth `[P, 2]`;
    `Pairs` has an example.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    head: str = "policy"
    """`policy`: of log-probabilities. `value`: of scores; the model becomes a reward model."""
    needs_reference: bool = False
    """Compares with the model as it is before the first update."""


ESTIMATORS: dict[str, Estimator] = {}
LOSSES: dict[str, FusedLoss | TorchLoss] = {}
PAIR_LOSSES: dict[str, PairLoss] = {}

Entry = TypeVar("Entry")


def _entering(
    catalogue: dict[str, Any], kind: str, name: str, make: Callable[[Callable[..., Any]], Entry]
) -> Callable[[Callable[..., Any]], Entry]:
    """Return a decorator that makes an entry of a function, and keeps it under `name` where that is given.

    From then on a config of this process may call it by that name.
    """

    def decorate(function: Callable[..., Any]) -> Entry:
        entry = make(function)
        if name:
            catalogue[name] = entry
            ENTERED[kind].add(name)
        return entry

    return decorate


def estimator(
    name: str = "",
    *,
    mean: str = "none",
    std: str = "none",
    compares_group: bool = False,
    needs: tuple[str, ...] = (),
    rules: Rules | None = None,
) -> Callable[[Callable[..., Tensor]], Estimator]:
    """Decorate an estimator's function; a name enters it into the catalogue."""
    make = partial(Estimator, mean=mean, std=std, compares_group=compares_group, needs=needs, rules=rules or {})
    return _entering(ESTIMATORS, "estimator", name, make)


def fused_loss(
    name: str = "", *, select: Callable[..., Tensor] | None = None, rules: Rules | None = None
) -> Callable[[Callable[..., PpoOptions]], FusedLoss]:
    """Decorate the function of a fused loss; a name enters it into the catalogue."""
    return _entering(LOSSES, "loss", name, partial(FusedLoss, select=select, rules=rules or {}))


def torch_loss(
    name: str = "",
    *,
    by_sequence: bool = False,
    select: Callable[..., Tensor] | None = None,
    mark: Callable[..., Tensor] | None = None,
    rules: Rules | None = None,
) -> Callable[[Callable[..., Tensor]], TorchLoss]:
    """Decorate the function of a loss in plain torch; a name enters it into the catalogue.

    A config of this process takes that name. Other processes, such as those that `megatron-rl launch` starts, know
    import paths alone: algo.loss=my_module:mine.
    """
    make = partial(TorchLoss, by_sequence=by_sequence, select=select, mark=mark, rules=rules or {})
    return _entering(LOSSES, "loss", name, make)


def pair_loss(
    name: str = "", *, head: str = "policy", needs_reference: bool = False
) -> Callable[[Callable[..., tuple[Tensor, Tensor]]], PairLoss]:
    """Decorate the function of a loss of pairs; a name enters it into the catalogue."""
    return _entering(PAIR_LOSSES, "pair_loss", name, partial(PairLoss, head=head, needs_reference=needs_reference))
