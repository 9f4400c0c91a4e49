"""Every option as a record, for `megatron-rl options` and docs/options.md: nothing about an option is written twice."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from dataclasses import dataclass

from megatron_rl.config.loading import SECTIONS
from megatron_rl.config.rules import rules_of
from megatron_rl.config.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DescribedOption:
    """One option. `f"{option.section}.{option.key}"` is its dotted key; `megatron` alone has no section."""

    section: str
    key: str
    type: str
    """The annotation as it is written, such as int or list[str]; of a section within a section its class."""
    default: str
    """The value as YAML takes it; `required` where there is none, empty for a section within a section."""
    rule: str
    """The rule and, after a semicolon, a hint; empty where any value of the type will do."""
    doc: str
    """The text below the field, as one line."""


def described_options() -> list[DescribedOption]:
    """Return all options in the order of the sections and fields. `critic.parallel` is one record, not seven."""
    sections = {name: kind for name, kind in SECTIONS.items() if "." not in name}
    found = [option for name, kind in sections.items() for option in options_of(kind, name)]
    return found + [option for option in options_of(TrainConfig, "") if option.key not in sections]


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
    """Return the string that stands below each field. Python keeps none of them, so they are read from the source."""
    [body] = [node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
    docs = {}
    # The text belongs to the field that it follows; a field without one is followed by the next field.
    for field, below in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                docs[field.target.id] = " ".join(below.value.value.split())
    return docs
