"""Rows as data sets of other trainers write them, brought into the forms that prompts.py knows.

Their columns are renamed and nothing is guessed: what a dialogue's messages say is checked where they are rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from megatron_rl.workflows.messages import Message, shown

Row = dict[str, Any]
FORMS = ("input_ids", "prompt", "messages")
PAIR = ("chosen", "rejected")


def as_prompt(row: Row) -> Row:
    """Return a row with its prompt in one of the FORMS.

    A form that is None is left out, as data frames fill absent columns. A `prompt` that is a list of messages (TRL,
    verl) becomes `messages`. So does what chosen and rejected dialogues have in common, if they are given whole.
    """
    if any(form in row and row[form] is None for form in FORMS):
        row = {name: value for name, value in row.items() if name not in FORMS or value is not None}
    if is_dialogue(row.get("prompt")) and "messages" not in row:
        row = {name: value for name, value in row.items() if name != "prompt"} | {"messages": row["prompt"]}
    chosen, rejected = (row.get(name) for name in PAIR)
    if is_dialogue(chosen) and is_dialogue(rejected) and len(chosen) > 1 and chosen[:-1] == rejected[:-1]:
        is_asked = is_dialogue(row.get("messages")) and row["messages"] != chosen[:-1]
        if not is_asked:  # otherwise they are replies of several messages, which are refused as such
            others = {name: value for name, value in row.items() if name != "prompt"}
            row = others | {"messages": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}
    return row


def is_dialogue(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, dict) for entry in value)


def check_form(form: str, value: Any, where: str) -> None:
    """Raise ValueError unless a prompt is text or token ids, as its form says; messages are checked when rendered."""
    if form == "prompt" and not isinstance(value, str):
        raise ValueError(f"{where}: prompt = {shown(value)}: must be text, or a list of messages.")
    if form == "input_ids":
        wrong = [token for token in value if not isinstance(token, Integral) or isinstance(token, bool) or token < 0]
        if wrong:
            raise ValueError(f"{where}: input_ids has {shown(wrong[0])}: must be token ids, whole numbers from 0.")


def as_reply(value: Any) -> str | Message | None:
    """Return a reply that is given as text, a number, a message, or a list of one; None for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0]
    if isinstance(value, dict):
        return value if value.get("role", "assistant") == "assistant" and says(value) else None
    if isinstance(value, int | float):
        return None if value != value else str(value)  # NaN is a data frame's empty field
    return value if isinstance(value, str) and value.strip() else None


def says(message: Message) -> bool:
    """Return whether a message has content or calls."""
    content = message.get("content")
    return bool(message.get("tool_calls") or (content.strip() if isinstance(content, str) else content))
