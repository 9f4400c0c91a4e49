"""A reply's text in its parts: what was thought, and what is said; whole, or as far as it is sure while it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_rl.workflows.tool_formats import ToolFormat
from megatron_rl.workflows.tools import BETWEEN, THINK, THOUGHT

HALF = "\ufffd"
"""What a tokenizer gives for a character of which not all bytes are there."""


def split_thoughts(text: str, *, is_open: bool = False) -> tuple[str | None, str]:
    """Return what was thought, or None, and what is said. is_open: it was opened, though the text may not show it."""
    begin = text.lstrip()
    if not (is_open or begin.startswith(THINK)):
        return None, text
    # One that is not ended was cut off.
    thoughts, _, said = begin.removeprefix(THINK).partition(THOUGHT)
    return thoughts.strip(), said.lstrip("\n")


def sure_parts(text: str, *, is_open: bool, shows_thoughts: bool, tools: ToolFormat | None) -> tuple[str | None, str]:
    """Return how the thoughts and the content of a reply begin whose text so far this is, however it goes on.

    tools: the form of calls, where the reply may have any.
    """
    text, thoughts = text.rstrip(HALF), None
    if shows_thoughts:
        begin = text.lstrip()
        if not is_open and THINK.startswith(begin):  # it may begin a thought
            return None, ""
        if is_open and THINK.startswith(begin):
            return "", ""
        if is_open or begin.startswith(THINK):
            inner = begin.removeprefix(THINK)
            thoughts, is_ended, text = inner.partition(THOUGHT)
            if not is_ended:
                return up_to(inner, [THOUGHT]).strip(), ""
            thoughts, text = thoughts.strip(), text.lstrip("\n")
    if tools is not None:
        # A call makes the rest another message: white space around the text goes then, and is kept without one.
        if text[:1].isspace():
            return thoughts, ""
        if tools.is_whole:  # the same behind a thought that is a part of the text
            for place in (0, text.find(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0):
                text = text[:place] if BETWEEN.sub("", text[place:])[:1] in ("", "{") else text
        text = up_to(text, tools.begins)
    return thoughts, text.rstrip()


def up_to(text: str, marks: Iterable[str]) -> str:
    """Return the text up to the first of the marks, also where it ends within one."""
    for mark in marks:
        place = text.find(mark)
        if place < 0:
            inside = (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n]))
            place = len(text) - next(inside, 0)
        text = text[:place]
    return text


@dataclass
class Progress:
    """A reply that is being generated, as far as it is sure. It only grows."""

    input_len: int = 0
    """Tokens of its prompt; 0 until it is asked for."""
    thoughts: str | None = None
    said: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def grown(self, thoughts: str | None, said: str) -> None:
        # Decoding more tokens may change what fewer gave: what was told stays, and is compared in the end.
        if (thoughts or "").startswith(self.thoughts or "") and said.startswith(self.said):
            self.thoughts, self.said = thoughts if self.thoughts is None else thoughts or "", said
            self.changed.set()
