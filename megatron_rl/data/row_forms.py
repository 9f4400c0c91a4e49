"""Converts rows in the formats of other trainers to the forms that prompts.py accepts.

Only columns are renamed or moved. The contents of messages are checked when they are rendered.
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
    """Return the row with its prompt in one of the FORMS.

    Forms that are None are dropped, because data frames fill absent columns with None. A `prompt` that is a list of
    messages (TRL, verl) becomes `messages`. If `chosen` and `rejected` are whole dialogues, `messages` becomes their
    common beginning.
    """
    if any(form in row and row[form] is None for form in FORMS):
        row = {name: value for name, value in row.items() if name not in FORMS or value is not None}
    if is_dialogue(row.get("prompt")) and "messages" not in row:
        row = {name: value for name, value in row.items() if name != "prompt"} | {"messages": row["prompt"]}
    chosen, rejected = (row.get(name) for name in PAIR)
    if is_dialogue(chosen) and is_dialogue(rejected) and len(chosen) > 1 and chosen[:-1] == rejected[:-1]:
        is_asked = is_dialogue(row.get("messages")) and row["messages"] != chosen[:-1]
        if not is_asked:  # otherwise they are replies of several messages, which are refused later
            others = {name: value for name, value in row.items() if name != "prompt"}
            row = others | {"messages": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}
    return row


def is_dialogue(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, dict) for entry in value)


def check_form(form: str, value: Any, where: str) -> None:
    """Raise ValueError unless a prompt is text or token ids, as its form says. Messages are checked when rendered."""
    if form == "prompt" and not isinstance(value, str):
        raise ValueError(f"{where}: prompt = {shown(value)}: must be text, or a list of messages.")
    if form == "input_ids":
        wrong = [token for token in value if not isinstance(token, Integral) or isinstance(token, bool) or token < 0]
        if wrong:
            raise ValueError(f"{where}: input_ids has {shown(wrong[0])}: must be token ids, whole numbers from 0.")


def as_reply(value: Any) -> str | Message | None:
    """Return a reply given as text, number, message, or a list of one message; None for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0]
    if isinstance(value, dict):
        return value if value.get("role", "assistant") == "assistant" and says(value) else None
    if isinstance(value, int | float):
        return None if value != value else str(value)  # NaN is a data frame's empty field
    return value if isinstance(value, str) and value.strip() else None


def says(message: Message) -> bool:
    """Return whether a message has content or tool calls."""
    content = message.get("content")
    return bool(message.get("tool_calls") or (content.strip() if isinstance(content, str) else content))
