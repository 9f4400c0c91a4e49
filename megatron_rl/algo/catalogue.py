"""Lookup of advantage estimators, policy losses and pair losses, by catalogue name or by a user's import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.algo import advantage, fused_losses, torch_losses, turn_advantage  # noqa: F401  they enter themselves
from megatron_rl.algo.preference import Pairs, PreferenceLoss
from megatron_rl.algo.registry import ESTIMATORS, LOSSES, PAIR_LOSSES, Estimator, FusedLoss, PairLoss, Rules, TorchLoss
from megatron_rl.config.import_path import described, resolve
from megatron_rl.config.users_code import call


def find_estimator(name: str, args: dict[str, Any], *, import_from: Sequence[str] | None = None) -> Estimator:
    """Return the estimator called `name`, or the one that an import path `package.module:name` points to.

    import_from: the config's run.import_from. None, for a path that was already checked, allows every path.
    Raises ValueError if there is no such estimator, or if its function does not accept `args` or one of their values.
    """
    entry = _find(name, ESTIMATORS, import_from, key="algo.advantage", kind="estimator")
    entry = entry if isinstance(entry, Estimator) else Estimator(entry)  # the path points to a plain function
    _check_arguments(entry.function, 1, args, key="algo.advantage", rules=entry.rules)
    return entry


def find_loss(name: str, args: dict[str, Any], *, import_from: Sequence[str] | None = None) -> FusedLoss | TorchLoss:
    """Return the policy loss with this name or import path. The arguments are those of `find_estimator`.

    A plain function becomes a torch loss that treats each row by itself.
    """
    entry = _find(name, LOSSES, import_from, key="algo.loss", kind="loss")
    entry = entry if isinstance(entry, FusedLoss | TorchLoss) else TorchLoss(entry)
    _check_arguments(entry.function, _values_given(entry), args, key="algo.loss", rules=entry.rules)
    return entry


def find_pair_loss(name: str, args: dict[str, Any], *, import_from: Sequence[str] | None = None) -> PreferenceLoss:
    """Return the pair loss with this name or import path, bound to `args`.

    A trial call on one pair checks its results before any process group exists. Raises ValueError as `find_estimator`.
    """
    entry = _find(name, PAIR_LOSSES, import_from, key="preference.loss", kind="loss")
    entry = entry if isinstance(entry, PairLoss) else PairLoss(entry)
    _check_arguments(entry.function, 1, args, key="preference.loss", rules=entry.rules)
    ones = torch.ones(1, 2)
    pairs, contract = Pairs(values=-ones, log_ratios=-ones, tokens=ones), "so it was for one pair, as a trial"
    result = call(entry.function, [pairs], args, key=f"preference.loss = {name!r}", contract=contract)
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(it, torch.Tensor) for it in result)):
        raise ValueError(
            f"preference.loss = {name!r}: {described(entry.function)} returned {type(result).__name__}; return two "
            f"tensors, `[P]` losses and `[P, 2]` rewards."
        )
    losses, rewards = result
    if losses.shape != (1,) or rewards.shape != (1, 2):
        raise ValueError(
            f"preference.loss = {name!r}: made {tuple(losses.shape)} losses and {tuple(rewards.shape)} rewards of one "
            f"pair; return `[P]` losses and `[P, 2]` rewards."
        )
    return PreferenceLoss(entry, args)


def _find(name: str, catalogue: dict[str, Any], import_from: Sequence[str] | None, *, key: str, kind: str) -> Any:
    if ":" not in name:
        if name not in catalogue:
            raise ValueError(
                f"{key} = {name!r}: must be one of {', '.join(catalogue)}, or an import path package.module:name of "
                f"your own."
            )
        return catalogue[name]
    found = resolve(name, key=key, kind=kind, import_from=import_from)
    if not (callable(found) or isinstance(found, Estimator | FusedLoss | TorchLoss | PairLoss)):
        raise ValueError(f"{key} = {name!r}: is a {type(found).__name__}; must be a function.")
    return found


def _values_given(loss: FusedLoss | TorchLoss) -> int:
    return 1 if isinstance(loss, FusedLoss) else 2


def _check_arguments(function: Callable[..., Any], given: int, args: dict[str, Any], *, key: str, rules: Rules) -> None:
    try:
        inspect.signature(function).bind(*[None] * given, **args)  # binds the arguments without calling the function
    except TypeError as error:
        raise ValueError(
            f"{key}_args = {args}: {error}; the arguments of {key} are "
            f"{', '.join(options_of(function, given)) or 'none'}."
        ) from error
    for name, (holds, rule) in rules.items():
        if name in args and not _holds(holds, args[name]):
            raise ValueError(f"{key}_args.{name} = {args[name]!r}: {rule}.")


def _holds(rule: Callable[[Any], bool], value: Any) -> bool:
    try:
        return rule(value)
    except TypeError:  # a string was given instead of a number
        return False


def options_of(function: Callable[..., Any], given: int) -> list[str]:
    """Return a function's own options, which follow its first `given` parameters, as `name=default`."""
    parameters = list(inspect.signature(function).parameters.values())[given:]
    return [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]


@dataclass(frozen=True)
class Row:
    """One line of the catalogue."""

    key: str  # algo.advantage, algo.loss or preference.loss
    name: str
    formula: str
    source: str
    options: tuple[str, ...]
    runs: str
    """Default normalisation of an estimator, implementation of a policy loss, or model that a pair loss trains."""


def rows() -> list[Row]:
    """Return the whole catalogue: estimators, policy losses, pair losses."""
    table = []
    for name, entry in ESTIMATORS.items():
        how = f"mean: {entry.mean}, std: {entry.std}"
        table.append(_row("algo.advantage", name, entry.function, 1, how))
    for name, way in LOSSES.items():
        how = "fused operator" if isinstance(way, FusedLoss) else "torch"
        table.append(_row("algo.loss", name, way.function, _values_given(way), how))
    for name, pairs in PAIR_LOSSES.items():
        how = "a reward model" if pairs.head == "value" else "a policy"
        table.append(_row("preference.loss", name, pairs.function, 1, how))
    return table


def _row(key: str, name: str, function: Callable[..., Any], given: int, how: str) -> Row:
    lines = inspect.getdoc(function).splitlines()  # type: ignore[union-attr]  # a test asks every entry for one
    source = next(line.removeprefix("Source: ") for line in lines if line.startswith("Source: "))
    return Row(key, name, lines[0].rstrip("."), source.rstrip("."), tuple(options_of(function, given)), how)


def table() -> str:
    """Return the catalogue as text for a terminal."""
    text, widest = [], max(len(row.name) for row in rows())
    for key in dict.fromkeys(row.key for row in rows()):
        text.append(f"{key}, d = r(chosen) - r(rejected):" if key == "preference.loss" else f"{key}:")
        for row in (row for row in rows() if row.key == key):
            text.append(f"  {row.name:{widest}}  {row.formula}")
            text.append(f"  {'':{widest}}  {'; '.join([row.source, row.runs, *row.options])}")
    return "\n".join(text)
