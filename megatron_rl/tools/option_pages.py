"""Generates the reference of all options, for `megatron-rl options [SECTION]` and docs/options.md.

Names, types, defaults, rules and texts come from megatron_rl.config, so nothing about an option is written twice.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.loading import SECTIONS
from megatron_rl.config.resume_rules import ON_RESUME
from megatron_rl.config.rules import rules_of
from megatron_rl.config.train_config import TrainConfig

BEGIN, END = "<!-- options -->\n", "<!-- end -->\n"
WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class DescribedOption:
    """One option of the config. `section` is empty only for the option `megatron`."""

    section: str
    key: str
    type: str
    """The field's annotation as written, such as int or list[str]. A nested section has the name of its class."""
    default: str
    """The default value as YAML. `required` if there is no default, empty for a nested section."""
    rule: str
    """The rule for valid values and, after a semicolon, a hint; empty if every value of the type is valid."""
    doc: str
    """The docstring below the field, joined into one line."""

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.key}".lstrip(".")


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


def options_text(name: str = "") -> str:
    """Describe all options, or those of the section `name`, or the option with the dotted key `name`.

    ValueError for an unknown name.
    """
    options = described_options()
    chosen = [option for option in options if name in ("", option.section, option.dotted)]
    if not chosen:
        sections = list(dict.fromkeys(option.section or option.key for option in options))
        near = difflib.get_close_matches(name, [*sections, *(option.dotted for option in options)], n=1)
        hint = f"did you mean {near[0]}?" if near else f"the sections are {', '.join(sections)}."
        raise ValueError(f"options {name}: no such section or key; {hint}")
    if name == chosen[0].dotted:
        return entry(chosen[0])
    return "\n\n".join(
        "\n".join([heading(section), *about(section), *(entry(option) for option in members)])
        for section, members in by_section(chosen)
    )


def options_markdown() -> str:
    """Return the generated part of docs/options.md."""
    parts = []
    for section, members in by_section(described_options()):
        lines = [f"## {heading(section)}", ""]
        if text := about(section):
            lines += [*text, ""]
        parts.append("\n".join([*lines, *(entry(option, quote="`", bullet="- ") for option in members)]))
    return "\n\n".join(parts) + "\n"


def rewrite(page: Path) -> Path:
    """Replace the text between BEGIN and END in a page with the current options. ValueError if one is missing."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page}: has no lines {BEGIN.strip()} and {END.strip()}, where the options go; add them.")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{options_markdown()}\n{END}{after}", encoding="utf-8")
    return page


def by_section(options: Iterable[DescribedOption]) -> list[tuple[str, list[DescribedOption]]]:
    return [
        (section, list(members)) for section, members in itertools.groupby(options, key=lambda option: option.section)
    ]


def heading(section: str) -> str:
    return section or "without a section"


def about(section: str) -> list[str]:
    """Return the section's docstring as wrapped lines."""
    kind = SECTIONS.get(section)
    # A dataclass without a docstring has its signature as __doc__: skip it.
    text = "" if kind is None or not kind.__doc__ or kind.__doc__.startswith(f"{kind.__name__}(") else kind.__doc__
    return textwrap.wrap(" ".join(text.split()), WIDTH)


def entry(option: DescribedOption, *, quote: str = "", bullet: str = "") -> str:
    """Describe one option: key, default and type on the first line, then its text, its rule and its resume behavior."""
    default = f" = {option.default}" if option.default else ""
    lines = [f"{bullet}{quote}{option.dotted}{default}{quote} ({option.type})"]
    resume = ON_RESUME.get(option.dotted)
    parts = [option.doc, f"Rule: {option.rule}." if option.rule else "", f"Resume: {resume}." if resume else ""]
    said = " ".join(filter(None, parts))
    indent = " " * 2
    lines += textwrap.wrap(
        said, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)
