"""Describes every option as a record, for `megatron-rl options` and docs/options.md."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
from dataclasses import dataclass

from megatron_rl.config.loading import SECTIONS
from megatron_rl.config.rules import rules_of
from megatron_rl.config.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DescribedOption:
    """One option. Its dotted key is `f"{option.section}.{option.key}"`; only `megatron` has an empty section."""

    section: str
    key: str
    type: str
    """The field's annotation as written, such as int or list[str]. A nested section has the name of its class."""
    default: str
    """The default value as YAML. `required` if there is no default, empty for a nested section."""
    rule: str
    """The rule and, after a semicolon, a hint; empty if every value of the type is valid."""
    doc: str
    """The docstring below the field, joined into one line."""


def described_options() -> list[DescribedOption]:
    """Return all options in the order of sections and fields. A nested section is one record."""
    sections = {name: kind for name, kind in SECTIONS.items() if "." not in name} | {"": TrainConfig}
    found = [option for name, kind in sections.items() for option in options_of(kind, name)]
    return [option for option in found if option.section or option.key not in sections]


def options_of(kind: type, section: str) -> list[DescribedOption]:
    docs, rules = docs_of_fields(kind), rules_of(kind)
    return [
        DescribedOption(
            section=section,
            key=field.name,
            type=str(field.type),
            default=default_of(field),
            rule=rules[field.name].text if field.name in rules else "",
            doc=docs.get(field.name, ""),
        )
        for field in dataclasses.fields(kind)
    ]


def default_of(field: dataclasses.Field[object]) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if dataclasses.is_dataclass(value):
        return ""
    return "required" if value == "???" else json.dumps(value)


def docs_of_fields(kind: type) -> dict[str, str]:
    """Return the docstring below each field. Python does not keep such docstrings, so they are read from the source."""
    [body] = [node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
    docs = {}
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs
