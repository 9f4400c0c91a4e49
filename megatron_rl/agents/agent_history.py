"""How an agent's request is recognised as the continuation of an earlier one, and why it is not.

Agents' clients write a history anew: with other spaces, key order and escapes in arguments, stripped texts, without
thoughts, with ids of their own. The canonical form of a dialogue is the same for all of these.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from megatron_rl.workflows.messages import Message
from megatron_rl.workflows.tools import THINK, THOUGHT, ends_a_thought

NO_REPLY, TOOLS, AGAIN, OTHER = "", "tools", "again", "other"
ROLES = ("system", "user", "assistant", "tool")
"""Reasons for a new trajectory: other tools, a state that was continued before, or the first message that differs. With
NO_REPLY it is the first of its dialogue."""


@dataclass(frozen=True)
class Beginning:
    """The name of a dialogue's first messages."""

    exact: str
    canonical: str


def beginnings(messages: list[Message], tools: list[Message] | None) -> list[Beginning]:
    """Return a name for each beginning of a dialogue: of the first message, of the first two, and so on."""
    # The template renders the tools into the dialogue's beginning: with others it is another dialogue.
    exact = canonical = name_of("", tools or None)
    names, numbers = [], dict[str, int]()
    for message in messages:
        exact = name_of(exact, message)
        canonical = name_of(canonical, canonical_form(message, numbers))
        names.append(Beginning(exact, canonical))
    return names


def name_of(before: str, value: Any) -> str:
    return hashlib.sha256((before + json.dumps(value, sort_keys=True)).encode()).hexdigest()


def canonical_form(message: Message, numbers: dict[str, int]) -> Any:
    """Return what a message says. numbers: of the calls before it, by their ids; those of this one are added."""
    content = message["content"]
    if message["role"] == "assistant" and THOUGHT in content:
        if content.lstrip().startswith(THINK) or ends_a_thought(content):
            content = content.partition(THOUGHT)[2]
    calls = []
    for call in message.get("tool_calls", ()):
        numbers[call["id"]] = len(numbers)
        function = call["function"]
        calls.append([function["name"], canonical_value(json.loads(function["arguments"]))])
    answered = message.get("tool_call_id")
    return [message["role"], message.get("name"), content.strip(), calls, numbers.get(answered or "", answered)]


def canonical_value(value: Any) -> Any:
    """Return a JSON value with numbers as JavaScript writes them: 1.0 is 1."""
    match value:
        case dict():
            return {key: canonical_value(one) for key, one in value.items()}
        case list():
            return [canonical_value(one) for one in value]
        case float() if value.is_integer():
            return int(value)
    return value


class History:
    """The dialogues that an agent has led so far, to say why a request continues none of them."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._first: set[str] = set()
        """Of the first messages alone, whatever the tools."""

    def add(self, names: list[Beginning], messages: list[Message]) -> None:
        self._known.update(name.canonical for name in names)
        self._first.add(name_of("", canonical_form(messages[0], {})))

    def reason(self, names: list[Beginning], messages: list[Message]) -> str:
        """Return what keeps a request from continuing a dialogue; `NO_REPLY` if it holds no reply yet."""
        last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        if last < 0:
            return NO_REPLY
        other = next((n for n in range(last + 1) if names[n].canonical not in self._known), None)
        if other is None:
            return AGAIN
        if other == 0 and name_of("", canonical_form(messages[0], {})) in self._first:
            return TOOLS
        role = messages[other]["role"]
        return str(role) if role in ROLES else OTHER
