"""Generates the reference of all options, for `megatron-rl options [SECTION]` and docs/options.md.

Names, types, defaults, rules and texts come from megatron_rl.config, so nothing about an option is written twice.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from megatron_rl.config.loading import SECTIONS
from megatron_rl.config.option_records import DescribedOption, described_options
from megatron_rl.config.resume_rules import ON_RESUME

BEGIN, END = "<!-- options -->\n", "<!-- end -->\n"
WIDTH = 120


def options_text(name: str = "") -> str:
    """Describe all options, a section's options, or the option with this dotted key. ValueError for an unknown name."""
    options = described_options()
    chosen = [option for option in options if name in ("", option.section, dotted(option))]
    if not chosen:
        sections = list(dict.fromkeys(option.section or option.key for option in options))
        near = difflib.get_close_matches(name, [*sections, *map(dotted, options)], n=1)
        hint = f"did you mean {near[0]}?" if near else f"the sections are {', '.join(sections)}."
        raise ValueError(f"options {name}: no such section or key; {hint}")
    if name == dotted(chosen[0]):
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
    """Replace the text between a page's two marks with the current options. ValueError if the marks are missing."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page}: has no lines {BEGIN.strip()} and {END.strip()}, where the options go; add them.")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{options_markdown()}\n{END}{after}", encoding="utf-8")
    return page


def by_section(options: Iterable[DescribedOption]) -> list[tuple[str, list[DescribedOption]]]:
    return [(section, list(members)) for section, members in groupby(options, key=lambda option: option.section)]


def dotted(option: DescribedOption) -> str:
    return f"{option.section}.{option.key}".lstrip(".")


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
    lines = [f"{bullet}{quote}{dotted(option)}{default}{quote} ({option.type})"]
    resume = ON_RESUME.get(dotted(option))
    parts = [option.doc, f"Rule: {option.rule}." if option.rule else "", f"Resume: {resume}." if resume else ""]
    said = " ".join(filter(None, parts))
    indent = " " * 2
    lines += textwrap.wrap(
        said, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)
