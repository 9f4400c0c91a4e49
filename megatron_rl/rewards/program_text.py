"""Finds the program in a reply: the code block that the prompt's tests can run.

markdown-it-py finds code blocks as CommonMark defines them. This module never runs the model's text.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import re
import symtable
import sys
import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from textwrap import dedent

from markdown_it import MarkdownIt
from markdown_it.token import Token

from megatron_rl.rewards import THINK, THOUGHT, answer_of

PYTHON = frozenset({"py", "py3", "python", "python3", "ipython", "ipython3", "pypy", "pypy3"})
LANGUAGE = re.compile(r"[\s{.]*(?:lang(?:uage)?-)?([A-Za-z][A-Za-z0-9-]*)?")
"""Matches the language in a fence's info string: `python`, `{.python .numberLines}`, `python3.11`, `python:main.py`."""
FENCE = "```"
READS = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\(\s*0|\bfileinput\b")
FAR_FENCE = re.compile(r"^[ \t]{4,}(?=`{3}|~{3})", re.MULTILINE)
ITEM = re.compile(r"^[ \t]*(?:[-*+]|[0-9]{1,3}[.)])[ \t]+(?=`{3}|~{3})", re.MULTILINE)
LONGEST_PROGRAM = 100_000
"""Length in characters above which a text is not compiled, and so not recognized as a program."""
MOST_CHARACTERS, MOST_BLOCKS = 200_000, 50
"""Code blocks are searched for in at most MOST_CHARACTERS at a reply's end, and only the last MOST_BLOCKS of them
count."""


@dataclass(frozen=True)
class Block:
    """A code block of a reply.

    language: None if the block's fence names no language. is_closed: True if a fence ends the block. lines: indices in
    the text of the block's first line (the fence) and of the line after the block.
    """

    source: str
    language: str | None = None
    is_closed: bool = True
    lines: tuple[int, int] = (0, 0)


def find_program(reply: str, names: Collection[str] = (), *, prompt: str = "", reads_input: bool = False) -> str:
    """Return the reply if it compiles, or else its fittest code block, or else its text after the thoughts.

    names: names that the program should define. prompt: the prompt's text, which may have opened the reply's thought.
    """
    is_thought = prompt.rstrip().endswith(THINK) and THOUGHT not in reply
    if not is_thought and len(reply) <= LONGEST_PROGRAM and compiles(reply):
        return reply  # including any fences in its strings
    text = after_thoughts(re.sub("\r\n?", "\n", reply), prompt)
    blocks = [block for block in blocks_of(text[-MOST_CHARACTERS:])[-MOST_BLOCKS:] if block.source.strip()]
    if not blocks:
        return text
    # Ties go to the last block.
    place = max(range(len(blocks)), key=lambda it: (fitness(blocks[it], names, reads_input=reads_input), it))
    return blocks[place].source


def fitness(block: Block, names: Collection[str], *, reads_input: bool) -> tuple[int, ...]:
    """Return the block's rank as a candidate for the program: a tuple of criteria, most important first.

    Higher values are better. names: names that the program should define. reads_input: True if the program should read
    its input.
    """
    is_python = block.language is None or block.language in PYTHON
    facts = facts_of(block.source)
    if facts is None:
        return (False, 0, is_python)
    return (
        True,
        len(facts.defined.intersection(names)),
        is_python,
        facts.does_something,
        block.is_closed,
        not facts.missing,
        not reads_input or bool(READS.search(block.source)),
        block.language is not None,
    )


@dataclass(frozen=True)
class Facts:
    """Properties of a program's text. missing: global names that the program reads but does not define."""

    defined: frozenset[str]
    missing: frozenset[str]
    does_something: bool


@functools.lru_cache(maxsize=64)
def facts_of(source: str) -> Facts | None:
    """Return the properties of a program; None if it does not compile."""
    if len(source) > LONGEST_PROGRAM or not compiles(source):
        return None
    tree, table = ast.parse(source), symtable.symtable(source, "program", "exec")
    defined = {it.get_name() for it in table.get_symbols() if it.is_assigned() or it.is_namespace()}
    imported, has_star = set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                has_star |= alias.name == "*"
                imported.add((alias.asname or alias.name).partition(".")[0])
                # A usage example may import a name from an assumed file, which does not define the name.
                if (module or alias.name).partition(".")[0] in sys.stdlib_module_names:
                    defined.add(alias.asname or alias.name)
    missing = set() if has_star else global_names(table) - defined - imported - set(vars(builtins)) - {"__file__"}
    # Output such as `3` or `[1, 2]` is valid Python without any effect.
    acts = any(isinstance(node, ast.Call | ast.FunctionDef | ast.ClassDef | ast.Import) for node in ast.walk(tree))
    return Facts(frozenset(defined), frozenset(missing), acts or bool(defined))


def global_names(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that a program reads."""
    names, tables = set(), [table]
    while tables:
        each = tables.pop()
        symbols = [it for it in each.get_symbols() if it.is_referenced()]
        names |= {it.get_name() for it in symbols if it.is_global() or each is table}
        tables += each.get_children()
    return names


def compiles(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the model's escape sequences and comparisons
            compile(source, "program", "exec", dont_inherit=True)
    # compile raises all of these for some text: a null byte, half a character, many operators in a row.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def after_thoughts(reply: str, prompt: str) -> str:
    """Return the text after a reply's thoughts. Thought tags inside a program are part of the program."""
    if THOUGHT not in reply and THINK not in reply:
        return answer_of(prompt, reply)
    begin, end = reply[:-MOST_CHARACTERS], reply[-MOST_CHARACTERS:]
    lines = end.split("\n")
    hidden = list(lines)
    for block in blocks_of(end)[-MOST_BLOCKS:]:
        if block.is_closed and ("think>" in block.source) and compiles(block.source):
            for place in range(*block.lines):
                hidden[place] = lines[place].replace("think>", "......")
    rest = answer_of(prompt, begin + "\n".join(hidden))
    return reply[len(reply) - len(rest) :] if rest else ""


def blocks_of(text: str) -> list[Block]:
    """Return the code blocks of a text, in order."""
    # A block that begins on the line of a list item is indented like the rest of the item.
    text = ITEM.sub(lambda mark: " " * len(mark[0]), text)
    found = [block_of(token) for token in parser().parse(text) if token.type in ("fence", "code_block")]
    if FAR_FENCE.search(text):
        # After four spaces, CommonMark takes a fence as text or indented code. Models mean a fence.
        blocks = [block_of(it) for it in parser().parse(FAR_FENCE.sub("", text)) if it.type == "fence"]
        found = [replace(block, source=dedent(block.source)) for block in blocks] + found
    if not any(block.source.strip() and compiles(block.source[:LONGEST_PROGRAM]) for block in found):
        found += split_blocks(text)
    return [*rejoined(found, text.split("\n")), *found]


def split_blocks(text: str) -> list[Block]:
    """Return the blocks between fences at any position, because some models write fences that CommonMark ignores.

    CommonMark ignores a fence that follows other text on its line or directly follows another fence, and two fences on
    one line.
    """
    parts = text.split(FENCE)
    found = []
    for place in range(1, len(parts), 2):
        first, newline, rest = parts[place].partition("\n")
        if not (newline and first.strip().lower() in PYTHON | {""}):
            first, _, rest = parts[place].lstrip().partition(" ")
        name, is_closed = first.strip().lower(), place + 1 < len(parts)
        has_name = name in PYTHON or not name
        found.append(Block(rest if has_name else parts[place], name if name in PYTHON else None, is_closed))
    return found


def block_of(token: Token) -> Block:
    begin, end = token.map or [0, 0]
    if token.type == "code_block":
        return Block(token.content, is_closed=False, lines=(begin, end))
    language = LANGUAGE.match(token.info)
    name = (language[1] or "").lower() if language else ""
    name = name if name in PYTHON else name.rstrip("0123456789")  # python311
    is_closed = end - begin == len(io.StringIO(token.content).readlines()) + 2
    return Block(token.content, name or None, is_closed, (begin, end))


def rejoined(blocks: list[Block], lines: list[str]) -> list[Block]:
    """Return the Python blocks that a fence inside a string has cut off, extended to the text's last fence.

    blocks: the blocks that were found. lines: the text's lines.
    """
    ends = [number for number, line in enumerate(lines) if re.fullmatch(r"\s*(?:`{3,}|~{3,})\s*", line)]
    cut = [it for it in blocks if it.language in PYTHON][-4:]
    cut = [it for it in cut if not compiles(it.source[:LONGEST_PROGRAM])]
    whole = [Block("\n".join(lines[it.lines[0] + 1 : ends[-1]]), it.language) for it in cut if ends]
    return [it for it in whole if it.source.count("\n")]


@functools.cache
def parser() -> MarkdownIt:
    """Return a parser that finds only code blocks."""
    # Lists are disabled: a block inside an item is found by its fence, and long lists take seconds to parse.
    return MarkdownIt("commonmark").disable(["inline", "html_block", "reference", "lheading", "list"])
