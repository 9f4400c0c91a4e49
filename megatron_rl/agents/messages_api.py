"""Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_rl.agents.agent_api import (
    AgentApi,
    Answer,
    Event,
    ReplyStream,
    functions,
    new_id,
    text_of,
)
from megatron_rl.agents.agent_request import (
    NOT_SUPPORTED,
    Rules,
    check,
    is_choice,
    is_count,
    is_number,
    is_object,
    is_text,
    is_truth,
    refused,
    require,
    taken,
)
from megatron_rl.workflows.messages import Message


def keeps_all(value: Any) -> bool:
    """Return True if a request's context edits keep the whole context."""
    edits = value.get("edits") or [] if is_object(value) else [None]
    return all(is_object(edit) and edit.get("keep") == "all" for edit in edits)


OPTIONS: Rules = {
    **taken("messages", "system", "tools", "metadata", "service_tier", "cache_control", "inference_geo", "speed"),
    **taken("user_profile_id", "workspace_id", "billing_policy", "betas", "diagnostics", "fallbacks"),
    **taken("fallback_credit_token"),
    **refused("top_k", "container", "mcp_servers", "output_format", "compaction", "thread"),
    "model": (is_text, "must be text"),
    "max_tokens": (is_count, "must be a whole number of at least 1"),
    "temperature": (is_number, "must be a number"),
    "top_p": (is_number, "must be a number"),
    "stream": (is_truth, "must be true or false"),
    "stop_sequences": (
        lambda value: isinstance(value, list) and all(is_text(one) and one for one in value),
        "must be a list of texts that are not empty",
    ),
    "thinking": (is_object, "must be an object"),
    "context_management": (keeps_all, "must keep all of the context; leave it out"),
    "output_config": (
        lambda value: is_object(value) and not value.get("format"),
        "must be an object without a format, which is not supported",
    ),
    "tool_choice": (lambda value: is_object(value) and is_choice(chosen(value)), NOT_SUPPORTED),
}
ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 503: "overloaded_error"}
SIGNATURE = "none"
THOUGHTS = ("thinking", "redacted_thinking")


class MessagesApi(AgentApi):
    """The API behind POST /v1/messages."""

    path = "/v1/messages"
    shows_thoughts = True

    def as_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        check(body, OPTIONS)
        messages: list[Message] = []
        if system := body.get("system"):
            messages.append({"role": "system", "content": text_of(system, ("text",), "system")})
        given = body.get("messages")
        require(isinstance(given, list) and bool(given), "messages", given, "must be a list of one message or more")
        for number, message in enumerate(given or ()):
            messages += chat_messages(message, f"messages[{number}]")
        return {
            "messages": messages,
            "tools": functions(body.get("tools"), "input_schema"),
            "tool_choice": chosen(body.get("tool_choice") or {}),
            "max_tokens": body.get("max_tokens"),
            "stop": body.get("stop_sequences"),
            "parallel_tool_calls": not (body.get("tool_choice") or {}).get("disable_parallel_tool_use"),
        }

    def result(self, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
        return opened(body, answer.reply.input_len) | {
            "content": blocks_of(answer),
            "stop_reason": stop_reason_of(answer),
            "stop_sequence": stop_sequence_of(answer),
            "usage": {"input_tokens": answer.reply.input_len, "output_tokens": answer.reply.output_len},
        }

    def stream(self, body: dict[str, Any]) -> ReplyStream:
        return MessagesStream(body)

    def error(self, status: int, message: str, field: str | None, code: str | None) -> dict[str, Any]:
        if code == "context_length_exceeded":  # the wording by which clients recognize this error
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": ERRORS.get(status, "api_error"), "message": message}}


class MessagesStream(ReplyStream):
    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__()
        self._body, self._open, self._index = body, "", -1

    def begin(self, input_len: int) -> Iterator[Event]:
        yield event("message_start", message=opened(self._body, input_len))

    def add_thoughts(self, text: str) -> Iterator[Event]:
        yield from self._block("thinking", {"thinking": "", "signature": ""})
        if text:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def add_said(self, text: str) -> Iterator[Event]:
        yield from self._block("text", {"text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def end(self, answer: Answer) -> Iterator[Event]:
        if not (self._said or answer.calls):
            yield from self._block("text", {"text": ""})
        for call in answer.calls:
            function = call["function"]
            yield from self._block("tool_use", {"id": call["id"], "name": function["name"], "input": {}}, is_new=True)
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        yield from self._close()
        delta = {"stop_reason": stop_reason_of(answer), "stop_sequence": stop_sequence_of(answer)}
        yield event("message_delta", delta=delta, usage={"output_tokens": answer.reply.output_len})
        yield event("message_stop")

    def _block(self, kind: str, content: dict[str, Any], *, is_new: bool = False) -> Iterator[Event]:
        """Yield the events that continue the open block if it is of this kind, or else open a new block."""
        if self._open == kind and not is_new:
            return
        yield from self._close()
        self._open, self._index = kind, self._index + 1
        yield event("content_block_start", index=self._index, content_block={"type": kind} | content)

    def _delta(self, delta: dict[str, Any]) -> Event:
        return event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open:
            yield event("content_block_stop", index=self._index)


def chosen(choice: dict[str, Any]) -> Any:
    """Convert a request's tool_choice to the form of chat completions."""
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "required" if choice.get("type") == "any" else choice.get("type")


def event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind} | data


def opened(body: dict[str, Any], input_len: int) -> dict[str, Any]:
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "policy",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": input_len, "output_tokens": 0},
    }


def stop_reason_of(answer: Answer) -> str:
    if answer.calls:
        return "tool_use"
    return "max_tokens" if answer.is_cut_off else "end_turn" if answer.stop is None else "stop_sequence"


def stop_sequence_of(answer: Answer) -> str | None:
    return None if answer.calls else answer.stop


def blocks_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the reply as content blocks: thoughts, text, and calls."""
    blocks: list[dict[str, Any]] = []
    if answer.thoughts is not None:
        blocks.append({"type": "thinking", "thinking": answer.thoughts, "signature": SIGNATURE})
    if answer.message["content"] or not answer.calls:
        blocks.append({"type": "text", "text": answer.message["content"]})
    for call in answer.calls:
        function = call["function"]
        given = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def chat_messages(message: Any, field: str) -> list[Message]:
    """Convert one message to the form of chat completions, in which each tool result is a separate message."""
    role = message.get("role") if is_object(message) else None
    require(role in ("user", "assistant", "system"), f"{field}.role", role, "must be user, assistant or system")
    content = message.get("content")
    if is_text(content):
        return [{"role": role, "content": content}]
    require(isinstance(content, list), f"{field}.content", content, "must be text or a list of blocks")
    results: list[Message] = []
    texts: list[str] = []
    calls: list[Message] = []
    for number, block in enumerate(content):
        where = f"{field}.content[{number}]"
        require(is_object(block), where, block, "must be an object")
        match block.get("type"):
            case "text":
                texts.append(text_of([block], ("text",), where))
            case "tool_use" if role == "assistant":
                calls.append(call_of(block, where))
            case "tool_result" if role == "user":
                results.append(result_of(block, where))
            case kind if kind in THOUGHTS:  # ignored: the generated tokens are kept, thoughts included
                pass
            case kind:
                require(False, f"{where}.type", kind, "is not supported; must be text, tool_use or tool_result")
    if role == "assistant":
        return [{"role": role, "content": "".join(texts)} | ({"tool_calls": calls} if calls else {})]
    return [*results, *([{"role": role, "content": "".join(texts)}] if texts or not results else [])]


def call_of(block: dict[str, Any], field: str) -> Message:
    is_right = is_text(block.get("id")) and is_text(block.get("name")) and is_object(block.get("input"))
    require(is_right, field, block, "must have an id, a name and an input that is an object")
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}


def result_of(block: dict[str, Any], field: str) -> Message:
    require(is_text(block.get("tool_use_id")), f"{field}.tool_use_id", block.get("tool_use_id"), "must be text")
    content = block.get("content")
    text = "" if content is None else text_of(content, ("text",), f"{field}.content")
    if block.get("is_error"):
        text = f"error: {text}"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}
