"""The catalogue: advantage estimators and policy losses by name, and a user's own by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.algo import advantage, token_losses  # noqa: F401  they enter themselves
from megatron_rl.algo.registry import ESTIMATORS, LOSSES, Estimator, Loss
from megatron_rl.import_path import resolve


def find_estimator(name: str, args: dict[str, Any], *, import_from: Sequence[str] | None = None) -> Estimator:
    """Return the entry called `name`, or what an import path `package.module:name` leads to.

    `import_from` is the config's run.import_from; None, after a check with it, allows all.

    ValueError where there is none, or where its function does not take `args`.
    """
    entry = _find(name, ESTIMATORS, import_from, key="algo.advantage")
    entry = entry if isinstance(entry, Estimator) else Estimator(entry)
    _check_arguments(entry.function, 1, args, key="algo.advantage")
    return entry


def find_loss(name: str, args: dict[str, Any], *, import_from: Sequence[str] | None = None) -> Loss:
    """The same for a loss; a plain function at the end of a path looks at rows one by one."""
    entry = _find(name, LOSSES, import_from, key="algo.loss")
    entry = entry if isinstance(entry, Loss) else Loss(entry)
    _check_arguments(entry.function, 1 if entry.fused else 2, args, key="algo.loss")
    return entry


def _find(name: str, catalogue: dict[str, Any], import_from: Sequence[str] | None, *, key: str) -> Any:
    if ":" not in name:
        if name not in catalogue:
            raise ValueError(
                f"{key} = {name!r}: must be one of {', '.join(catalogue)}, or an import path package.module:name of "
                f"your own."
            )
        return catalogue[name]
    found = resolve(name, key=key, import_from=import_from)
    if not (callable(found) or isinstance(found, Estimator | Loss)):
        raise ValueError(f"{key} = {name!r}: is a {type(found).__name__}; must be a function.")
    return found


def _check_arguments(function: Callable[..., Any], given: int, args: dict[str, Any], *, key: str) -> None:
    try:
        inspect.signature(function).bind(*[None] * given, **args)
    except TypeError as error:
        raise ValueError(
            f"{key}_args = {args}: {error}; the arguments of {key} are "
            f"{', '.join(options_of(function, given)) or 'none'}."
        ) from error


def options_of(function: Callable[..., Any], given: int) -> list[str]:
    """The function's own options, as `name=default`."""
    parameters = list(inspect.signature(function).parameters.values())[given:]
    return [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]


@dataclass(frozen=True)
class Row:
    """One line of the catalogue."""

    key: str
    """The config key that names it: algo.advantage or algo.loss."""
    name: str
    formula: str
    source: str
    options: tuple[str, ...]
    runs: str
    """How it is normalised by default, or where it runs."""


def rows() -> list[Row]:
    """The whole catalogue, estimators first."""
    table = []
    for name, entry in ESTIMATORS.items():
        how = f"mean: {entry.mean}, std: {entry.std}"
        table.append(_row("algo.advantage", name, entry.function, 1, how))
    for name, way in LOSSES.items():
        how = "fused operator" if way.fused else "torch"
        table.append(_row("algo.loss", name, way.function, 1 if way.fused else 2, how))
    return table


def _row(key: str, name: str, function: Callable[..., Any], given: int, how: str) -> Row:
    lines = inspect.getdoc(function).splitlines()  # type: ignore[union-attr]  # a test asks every entry for one
    source = next(line.removeprefix("Source: ") for line in lines if line.startswith("Source: "))
    return Row(key, name, lines[0].rstrip("."), source.rstrip("."), tuple(options_of(function, given)), how)


def table() -> str:
    """The catalogue as text for a terminal."""
    text, widest = [], max(len(row.name) for row in rows())
    for key in ("algo.advantage", "algo.loss"):
        text.append(f"{key}:")
        for row in (row for row in rows() if row.key == key):
            text.append(f"  {row.name:{widest}}  {row.formula}")
            text.append(f"  {'':{widest}}  {'; '.join([row.source, row.runs, *row.options])}")
    return "\n".join(text)
