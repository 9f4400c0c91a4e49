"""Converts chat messages and tool schemas from data rows to the form that chat templates take.

Fields that a data frame filled with None are dropped, a call's arguments are read if they are text, and content in
parts is joined. Anything else is rejected, and the error names the field.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from megatron_rl.config.strict_json import read_json

Message = dict[str, Any]
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which a message may carry its author's reasoning."""


def normal_messages(messages: Any, field: str = "messages") -> list[Message]:
    """Return messages in the form that chat templates take. ValueError names the first invalid field."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"{field} = {shown(messages)}: must be a list of one message or more.")
    return [normal_message(message, f"{field}[{number}]") for number, message in enumerate(messages)]


def normal_message(message: Any, field: str = "message") -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{field} = {shown(message)}: must be an object with a role and content.")
    found = without_none(message)
    for name in ("image", "images", "audio", "audios", "video", "videos"):
        if found.pop(name, None):
            raise ValueError(f"{field}.{name}: is no text, and the trainer reads text alone; leave the row out.")
    for name in THOUGHTS:
        if not isinstance(found.get(name, ""), str):
            raise ValueError(f"{field}.{name} = {shown(found[name])}: must be text.")
    calls = found.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError(f"{field}.tool_calls = {shown(calls)}: must be a list of calls.")
    if calls:
        found["tool_calls"] = [normal_call(call, f"{field}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return found | {"content": content_text(found.get("content"), f"{field}.content")}


def content_text(content: Any, field: str) -> str:
    """Return a message's content as text, joining its parts. Empty for a message that only calls tools."""
    parts = content if isinstance(content, list) else [{"text": "" if content is None else content}]
    for number, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            place = f"{field}[{number}]" if isinstance(content, list) else field
            raise ValueError(
                f"{place} = {shown(part if isinstance(content, list) else content)}: must be text, or a part "
                f"{{'type': 'text', 'text': ...}}; the trainer reads text alone, so leave other parts out."
            )
    return "".join(part["text"] for part in parts)


def normal_call(call: Any, field: str) -> Message:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{field} = {shown(call)}: must have a function with a name and arguments.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):  # still a string, so it is rejected below
            arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{field}.function.arguments = {shown(arguments)}: must be an object, or the text of a JSON object."
        )
    own = {} if function is call else {name: value for name, value in call.items() if name != "function"}
    return {"type": "function"} | own | {"function": function | {"arguments": arguments}}


def normal_tools(tools: Any, field: str = "tools") -> list[Message] | None:
    """Return the tools' schemas from a list or its JSON text; None if there are none. ValueError for anything else.

    A bare function schema, as some trainers write it, is wrapped in {"type": "function", ...}.
    """
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"{field} = {shown(tools)}: is no JSON ({error}); write a list of schemas.") from error
    if tools is None or tools == "" or tools == []:
        return None
    found = []
    for number, tool in enumerate(tools if isinstance(tools, list | tuple) else [None]):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{field} = {shown(tools)}: entry {number} must be an object with a function that has a name, "
                f"description and parameters."
            )
        schema = without_none(tool)
        found.append(schema if "function" in schema else {"type": "function", "function": schema})
    return found


def without_none(value: Any) -> Any:
    """Return a copy of a JSON value in which no dict, at any depth, has entries that are None. Lists keep None."""
    if isinstance(value, dict):
        return {name: without_none(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [without_none(entry) for entry in value]
    return value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
