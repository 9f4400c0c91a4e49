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
    found: Estimator = _find(name, args, import_from, ESTIMATORS, Estimator, key="algo.advantage", kind="estimator")
    return found


def find_loss(name: str, args: dict[str, Any], *, import_from: Sequence[str] | None = None) -> FusedLoss | TorchLoss:
    """Return the policy loss with this name or import path. Arguments and errors are those of `find_estimator`.

    A plain function becomes a torch loss that treats each row by itself.
    """
    found: FusedLoss | TorchLoss = _find(
        name, args, import_from, LOSSES, TorchLoss, FusedLoss, key="algo.loss", kind="loss"
    )
    return found


def find_pair_loss(name: str, args: dict[str, Any], *, import_from: Sequence[str] | None = None) -> PreferenceLoss:
    """Return the pair loss with this name or import path, bound to `args`.

    A trial call on one pair checks the function's results before any process group exists. Arguments and errors are
    those of `find_estimator`.
    """
    entry = _find(name, args, import_from, PAIR_LOSSES, PairLoss, key="preference.loss", kind="loss")
    ones = torch.ones(1, 2)
    pairs, contract = Pairs(values=-ones, log_ratios=-ones, tokens=ones), "so it was for one pair, as a trial"
    result = call(entry.function, [pairs], args, key=f"preference.loss = {name!r}", contract=contract)
    parts = result if isinstance(result, tuple) else (result,)
    found = [tuple(it.shape) if isinstance(it, torch.Tensor) else type(it).__name__ for it in parts]
    if found != [(1,), (1, 2)]:
        raise ValueError(
            f"preference.loss = {name!r}: {described(entry.function)} returned {found} for one pair; return two "
            f"tensors, `[P]` losses and `[P, 2]` rewards."
        )
    return PreferenceLoss(entry, args)


def _find(
    name: str,
    args: dict[str, Any],
    import_from: Sequence[str] | None,
    catalogue: dict[str, Any],
    *kinds: type,
    key: str,
    kind: str,
) -> Any:
    """Return the entry called `name` in the catalogue, or the one that an import path points to.

    kinds: the types that the entry may have. A plain function is converted to the first of them.
    """
    if ":" in name:
        entry = resolve(name, key=key, kind=kind, import_from=import_from)
        if callable(entry):
            entry = kinds[0](entry)
        elif not isinstance(entry, kinds):
            raise ValueError(f"{key} = {name!r}: is a {type(entry).__name__}; must be a function.")
    elif name in catalogue:
        entry = catalogue[name]
    else:
        raise ValueError(
            f"{key} = {name!r}: must be one of {', '.join(catalogue)}, or an import path package.module:name of your "
            f"own."
        )
    _check_arguments(entry.function, _values_given(entry), args, key=key, rules=entry.rules)
    return entry


def _values_given(entry: Any) -> int:
    """Return how many positional arguments the trainer passes to an entry's function, before the user's own options."""
    return 2 if isinstance(entry, TorchLoss) else 1


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
    """Return a function's own options as `name=default`. given: the number of parameters before them."""
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
    """For an estimator, its default normalisation. For a policy loss, its implementation. For a pair loss, the kind of
    model that it trains."""


def rows() -> list[Row]:
    """Return the whole catalogue: estimators, policy losses, pair losses."""
    table = []
    for name, estimator in ESTIMATORS.items():
        table.append(_row("algo.advantage", name, estimator, f"mean: {estimator.mean}, std: {estimator.std}"))
    for name, loss in LOSSES.items():
        table.append(_row("algo.loss", name, loss, "fused operator" if isinstance(loss, FusedLoss) else "torch"))
    for name, pairs in PAIR_LOSSES.items():
        table.append(_row("preference.loss", name, pairs, "a reward model" if pairs.head == "value" else "a policy"))
    return table


def _row(key: str, name: str, entry: Any, runs: str) -> Row:
    lines = inspect.getdoc(entry.function).splitlines()  # type: ignore[union-attr]  # a test asks every entry for one
    source = next(line.removeprefix("Source: ") for line in lines if line.startswith("Source: "))
    options = options_of(entry.function, _values_given(entry))
    return Row(key, name, lines[0].rstrip("."), source.rstrip("."), tuple(options), runs)


def table() -> str:
    text, widest = [], max(len(row.name) for row in rows())
    for key in dict.fromkeys(row.key for row in rows()):
        text.append(f"{key}, d = r(chosen) - r(rejected):" if key == "preference.loss" else f"{key}:")
        for row in (row for row in rows() if row.key == key):
            text.append(f"  {row.name:{widest}}  {row.formula}")
            text.append(f"  {'':{widest}}  {'; '.join([row.source, row.runs, *row.options])}")
    return "\n".join(text)
