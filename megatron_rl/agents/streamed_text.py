"""Splits a reply's text into thoughts and content, for whole replies and for replies in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_rl.agents.tool_formats import ToolFormat
from megatron_rl.workflows.tools import BETWEEN, THINK, THOUGHT

HALF = "\ufffd"
"""Character that a tokenizer returns for an incomplete multi-byte character."""


def split_thoughts(text: str, *, is_open: bool = False) -> tuple[str | None, str]:
    """Return a reply's thoughts (or None) and its content.

    is_open: True if a thought is known to be open at the text's beginning, even if the text does not show this.
    """
    begin = text.lstrip()
    if not (is_open or begin.startswith(THINK)):
        return None, text
    # An unclosed thought was cut off.
    thoughts, _, said = begin.removeprefix(THINK).partition(THOUGHT)
    return thoughts.strip(), said.lstrip("\n")


def sure_parts(text: str, *, is_open: bool, shows_thoughts: bool, tools: ToolFormat | None) -> tuple[str | None, str]:
    """Return the beginnings of an unfinished reply's thoughts and content that no continuation can change.

    tools: the format of calls; None if the reply cannot contain any.
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
        # If a call follows, the text around it is stripped; otherwise its white space is kept.
        if text[:1].isspace():
            return thoughts, ""
        if tools.is_whole:  # a JSON object may be a call, also after a thought within the text
            for place in (0, text.find(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0):
                text = text[:place] if BETWEEN.sub("", text[place:])[:1] in ("", "{") else text
        text = up_to(text, tools.begins)
    return thoughts, text.rstrip()


def up_to(text: str, marks: Iterable[str]) -> str:
    """Return the text before the first of the marks. The beginning of a mark at the text's end counts as a mark."""
    for mark in marks:
        place = text.find(mark)
        if place < 0:
            inside = (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n]))
            place = len(text) - next(inside, 0)
        text = text[:place]
    return text


@dataclass
class Progress:
    """The part of a reply in progress that may be streamed. Text is only ever appended to it."""

    input_len: int = 0
    """Number of prompt tokens; 0 until the request is sent to a server."""
    thoughts: str | None = None
    said: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def grown(self, thoughts: str | None, said: str) -> None:
        # Decoding more tokens may change earlier text. Streamed text stays; ReplyStream.finish compares it with the
        # final text.
        if (thoughts or "").startswith(self.thoughts or "") and said.startswith(self.said):
            self.thoughts, self.said = thoughts if self.thoughts is None else thoughts or "", said
            self.changed.set()
