"""Recognizes an agent's request as the continuation of an earlier dialogue, or says why it is not one.

Agents' clients rewrite the messages that they send back. They change arguments' spaces, key order and escapes, strip
texts, drop thoughts and replace ids. The canonical form of a dialogue does not depend on any of these.
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
"""Reasons why a request starts a new trajectory.

The usual reason is the role of the first message that no earlier dialogue has at this place; OTHER stands for a role
that is not in ROLES. TOOLS: the request's tools differ. AGAIN: the dialogue's state was already continued. NO_REPLY:
the request begins a dialogue, so it contains no reply.
"""


@dataclass(frozen=True)
class Beginning:
    """Two hashes of a dialogue's first messages: one of the exact messages, and one of their canonical form."""

    exact: str
    canonical: str


def beginnings(messages: list[Message], tools: list[Message] | None) -> list[Beginning]:
    """Return one Beginning per prefix of a dialogue: for the first message, for the first two, and so on."""
    # The template renders the tools at the dialogue's beginning, so other tools make another dialogue.
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
    """Return the canonical form of a message.

    numbers: {id of a call: the call's index in the dialogue}. This function adds the message's own calls.
    """
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
    """Normalize the numbers in a JSON value to JavaScript's form: 1.0 becomes 1."""
    match value:
        case dict():
            return {key: canonical_value(one) for key, one in value.items()}
        case list():
            return [canonical_value(one) for one in value]
        case float() if value.is_integer():
            return int(value)
    return value


class History:
    """Hashes of an agent's dialogues so far, used to find out why a request continues none of them."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._first: set[str] = set()
        """Canonical hashes of each dialogue's first message alone, without tools."""

    def add(self, names: list[Beginning], messages: list[Message]) -> None:
        self._known.update(name.canonical for name in names)
        self._first.add(name_of("", canonical_form(messages[0], {})))

    def reason(self, names: list[Beginning], messages: list[Message]) -> str:
        """Return the reason why a request continues no dialogue.

        names: the Beginnings of `messages`, as `beginnings` returns them.
        """
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
