"""Validation rules of config fields, which are declared next to the fields' defaults.

    @dataclass(kw_only=True)
    class BatchConfig(Section, name="batch"):
        prompts_per_step: int = at_least(1, default=64)

`BatchConfig(prompts_per_step=0)` raises "batch.prompts_per_step = 0: must be at least 1." A section's `__post_init__`
checks rules between fields, after the parent's.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, NoReturn


class Rule(NamedTuple):
    text: str
    """The rule in words and, after a semicolon, the fix or an example."""
    holds: Callable[[Any], bool]


class Section:
    """A section of the config: a dataclass in which each field may have a rule from the functions below."""

    section: ClassVar[str]

    def __init_subclass__(cls, *, name: str) -> None:
        cls.section = name

    def __post_init__(self) -> None:
        """Raise ValueError for the first field whose value breaks its own rule."""
        for key, rule in rules_of(type(self)).items():
            if not rule.holds(getattr(self, key)):
                self.refuse(key, rule.text)

    def refuse(self, key: str, rule: str) -> NoReturn:
        """Raise ValueError for a field of this section. `rule` states the rule and, after a semicolon, the fix."""
        refuse(f"{self.section}.{key}", getattr(self, key), rule)


def rules_of(section: Any) -> dict[str, Rule]:
    """Return the rules of a section's fields, by field name. Fields that accept any value have none."""
    return {f.name: f.metadata["rule"] for f in dataclasses.fields(section) if "rule" in f.metadata}


def ruled(rule: str, holds: Callable[[Any], bool], *, default: Any, hint: str = "") -> Any:
    """Return a dataclass field whose value must satisfy `holds`; `rule` describes that in words."""
    metadata = {"rule": Rule(f"{rule}; {hint}" if hint else rule, holds)}
    if isinstance(default, list | dict):  # each section gets its own copy
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def at_least(lowest: int, unit: str = "", *, default: Any, hint: str = "") -> Any:
    rule = f"must be at least {lowest} {unit}".rstrip()
    return ruled(rule, lambda value: value >= lowest, default=default, hint=hint)


def above(bound: int, unit: str = "", *, default: Any, hint: str = "") -> Any:
    rule = f"must be above {bound} {unit}".rstrip()
    return ruled(rule, lambda value: value > bound, default=default, hint=hint)


def within(interval: str, *, default: Any, hint: str = "") -> Any:
    """Return a dataclass field for a number in an interval.

    The interval is in mathematical notation: "(0, 1]" excludes 0.
    """
    low, high = map(float, interval[1:-1].split(","))

    def holds(value: float) -> bool:
        is_open_end = (value == low and interval[0] == "(") or (value == high and interval[-1] == ")")
        return low <= value <= high and not is_open_end

    return ruled(f"must be in {interval}", holds, default=default, hint=hint)


def one_of(*choices: str, default: str) -> Any:
    *first, last = (choice or "empty" for choice in choices)
    return ruled(f"must be {', '.join(first)} or {last}", lambda it: it in choices, default=default)


def import_path(*, default: str) -> Any:
    return ruled("must be an import path package.module:name", is_import_path, default=default)


ENTERED: dict[str, set[str]] = {"estimator": set(), "loss": set(), "pair_loss": set()}
"""Names that users have registered with the decorators of megatron_rl.algo.registry, by kind."""


def name_or_import_path(names: tuple[str, ...], *, kind: str, default: str) -> Any:
    """Return a dataclass field for a name, an import path, or the default.

    The name is one of `names`, or one that users have registered. kind: key of ENTERED.
    """

    def holds(value: str) -> bool:
        return value in names or value in ENTERED[kind] or is_import_path(value) or value == default

    rule = f"must be one of {', '.join(names)}, or an import path package.module:name of your own"
    return ruled(rule, holds, default=default)


def is_import_path(text: str) -> bool:
    module, _, name = text.partition(":")
    return bool(module and name)


def refuse(key: str, value: object, rule: str) -> NoReturn:
    """Raise ValueError with the dotted key and the value. rule: the rule and, after a semicolon, the fix."""
    raise ValueError(f"{key} = {value!r}: {rule}.")


@contextmanager
def as_part_of(name: str) -> Iterator[None]:
    """In messages of ValueErrors that the `with` block raises, replace a section's short name by its full name.

    name: the full name, such as `critic.parallel`, whose short name is `parallel`.
    """
    short = name.rpartition(".")[2]
    try:
        yield
    except ValueError as error:
        # The short name is not replaced after a dot or within a word: the message may already have the full name.
        raise ValueError(re.sub(rf"(?<![\w.]){short}(?=[.:])", name, str(error))) from error
