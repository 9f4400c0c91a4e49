"""Validates an agent's chat-completions request and normalizes its messages.

A null field counts as absent. Code after this module does not check requests again.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from megatron_rl.config.strict_json import read_json
from megatron_rl.workflows.messages import Message


class BadRequest(Exception):
    """The agent's request is invalid or not supported. The proxy answers it with status 400."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        """The field at fault, such as messages[0].content."""


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not is_truth(value)  # in Python True == 1


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not is_truth(value) and value >= 1


def is_stop(value: Any) -> bool:
    return (is_text(value) and value != "") or (isinstance(value, list) and all(is_text(one) and one for one in value))


def is_tools(value: Any) -> bool:
    if not (isinstance(value, list) and all(map(is_object, value))):
        return False
    functions = [tool.get("function") for tool in value]
    return all(is_object(function) and is_text(function.get("name")) for function in functions)


def is_choice(value: Any) -> bool:
    if is_text(value):
        return value in ("auto", "none", "required")
    function = value.get("function") if is_object(value) else None
    return is_object(function) and is_text(function.get("name"))


def is_format(value: Any) -> bool:
    return is_object(value) and value.get("type") in ("text", "json_schema", "json_object")


def is_anything(value: Any) -> bool:
    return True


def is_empty(value: Any) -> bool:
    """Return True if a value requests nothing: 0, false, or an empty string, list or object."""
    return not value


NOT_SUPPORTED = "is not supported; leave it out"
UNKNOWN = "is no option that is known here, and may change the reply; leave it out"
Rules = dict[str, tuple[Callable[[Any], bool], str]]
"""{field: (function that checks the field's value, rule for the error message)}."""


def taken(*fields: str) -> Rules:
    """Return rules that accept any value, for fields that do not affect the reply's text or are only hints."""
    return dict.fromkeys(fields, (is_anything, ""))


def refused(*fields: str) -> Rules:
    """Return rules for fields that would change the reply and are not supported. Only empty values pass."""
    return dict.fromkeys(fields, (is_empty, NOT_SUPPORTED))


OPTIONS: Rules = {
    **taken("messages", "user", "metadata", "store", "service_tier", "seed", "prediction", "safety_identifier"),
    **taken("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "reasoning_effort", "verbosity"),
    **refused("frequency_penalty", "presence_penalty", "logit_bias", "top_logprobs", "audio", "web_search_options"),
    **refused("functions", "function_call", "moderation"),
    "model": (is_text, "must be text"),
    "max_completion_tokens": (is_count, "must be a whole number of at least 1"),
    "max_tokens": (is_count, "must be a whole number of at least 1"),
    "temperature": (is_number, "must be a number"),
    "top_p": (is_number, "must be a number"),
    "stop": (is_stop, "must be text, or a list of texts that are not empty"),
    "stream": (is_truth, "must be true or false"),
    "stream_options": (is_object, "must be an object"),
    "logprobs": (is_truth, "must be true or false"),
    "tools": (is_tools, "must be a list of objects, each with a function that has a name"),
    "n": (lambda value: value == 1, NOT_SUPPORTED),
    "modalities": (lambda value: value == ["text"], NOT_SUPPORTED),
    "parallel_tool_calls": (is_truth, "must be true or false"),
    # constrained.grammar_of decides what a workflow does with these two.
    "tool_choice": (is_choice, NOT_SUPPORTED),
    "response_format": (is_format, NOT_SUPPORTED),
}
"""Rules for all known fields of a request. Temperature and top_p are ignored: the run's values are used."""


def require(is_right: bool, field: str, value: Any, rule: str) -> None:
    if not is_right:
        raise BadRequest(field, f"{field} = {reprlib.repr(value)}: {rule}")  # a body may have megabytes


def check(body: dict[str, Any], options: Rules) -> None:
    """Raise BadRequest for an unknown field that is not empty, and for a field whose value breaks its rule."""
    for field, value in body.items():
        is_right, rule = options.get(field, (is_empty, UNKNOWN))
        require(value is None or is_right(value), field, value, rule)


def messages_of(body: dict[str, Any]) -> list[Message]:
    """Return the request's normalized messages, at least one. Raises BadRequest if any is invalid."""
    messages = body.get("messages")
    is_right = isinstance(messages, list) and bool(messages)
    require(is_right, "messages", messages, "must be a list of one message or more")
    found = [normal(message, f"messages[{number}]") for number, message in enumerate(messages or ())]
    rule = "the last one is the assistant's, and to continue it is not supported; end with a user's or a tool's message"
    require(found[-1]["role"] != "assistant", "messages", found[-1]["content"], rule)
    return found


def normal(message: Any, field: str) -> Message:
    """Return a message without the fields that clients add, so that messages of equal content have the same form."""
    require(is_object(message), field, message, "must be an object with a role and content")
    role = message.get("role")
    require(is_text(role), f"{field}.role", role, "must be text")
    # Other fields of OpenAI's objects (refusal, annotations, audio) are dropped, even if they are not null.
    found: Message = {"role": role, "content": content_of(message.get("content"), f"{field}.content")}
    for name in ("name", "tool_call_id"):
        if value := message.get(name):
            require(is_text(value), f"{field}.{name}", value, "must be text")
            found[name] = value
    if calls := message.get("tool_calls"):
        require(isinstance(calls, list), f"{field}.tool_calls", calls, "must be a list")
        found["tool_calls"] = [normal_call(call, f"{field}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return found


def content_of(content: Any, field: str) -> str:
    """Return a message's content as text, joining its parts."""
    # A message that only calls tools has null content.
    parts = content if isinstance(content, list) else [{"text": "" if content is None else content}]
    for part in parts:
        is_right = is_object(part) and is_text(part.get("text"))
        require(is_right, field, content, "must be text or a list of parts with a text; messages may hold text alone")
    return "".join(part["text"] for part in parts)


def normal_call(call: Any, field: str) -> Message:
    function = call.get("function") if is_object(call) else None
    texts = [call.get("id"), function.get("name"), function.get("arguments")] if is_object(function) else [None]
    require(all(map(is_text, texts)), field, call, "must have an id and a function with name and arguments, all text")
    identity, name, arguments = texts
    try:
        is_right = is_object(read_json(arguments))
    except (ValueError, RecursionError):
        is_right = False
    require(is_right, f"{field}.function.arguments", arguments, "must be the text of a JSON object")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
