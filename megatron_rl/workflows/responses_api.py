"""OpenAI's Responses API, as agents ask for it and are answered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from megatron_rl.workflows.agent_api import AgentApi, Answer, Event, Options, check, functions, new_id, text_of
from megatron_rl.workflows.agent_request import (
    NOT_SUPPORTED,
    is_count,
    is_number,
    is_object,
    is_text,
    is_truth,
    require,
)
from megatron_rl.workflows.conversation import Message

TEXTS = ("input_text", "output_text", "text")
OPTIONS: Options = {
    "model": (is_text, "must be text"),
    "instructions": (is_text, "must be text"),
    "previous_response_id": (is_text, "must be text"),
    "max_output_tokens": (is_count, "must be a whole number of at least 1"),
    "temperature": (is_number, "must be a number"),
    "top_p": (is_number, "must be a number"),
    "stream": (is_truth, "must be true or false"),
    "background": (lambda value: value is False, NOT_SUPPORTED),
    "conversation": (lambda value: False, NOT_SUPPORTED),
    "prompt": (lambda value: False, NOT_SUPPORTED),
    "tool_choice": (lambda value: value in ("auto", "none", "required"), NOT_SUPPORTED),
    "text": (
        lambda value: is_object(value) and (value.get("format") or {"type": "text"}).get("type") == "text",
        "only a format of type text is supported",
    ),
}
ECHOED = ("instructions", "metadata", "previous_response_id", "temperature", "top_p")


class ResponsesApi(AgentApi):
    """POST /v1/responses. A response is remembered by its id as long as its agent runs."""

    path = "/v1/responses"
    shows_thoughts = True

    def __init__(self) -> None:
        self._dialogues: dict[str, list[Message]] = {}

    def as_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        check(body, OPTIONS)
        before = []
        if (previous := body.get("previous_response_id")) is not None:
            is_known = previous in self._dialogues
            require(is_known, "previous_response_id", previous, "no response of this agent has that id")
            before = self._dialogues[previous]
        instructions = body.get("instructions")
        opening = [{"role": "system", "content": instructions}] if instructions else []
        return {
            "messages": [*opening, *before, *messages_of_input(body.get("input"))],
            "tools": functions(body.get("tools"), "parameters"),
            "tool_choice": body.get("tool_choice"),
            "max_completion_tokens": body.get("max_output_tokens"),
        }

    def result(self, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
        items = output_items(answer)
        response = self._opened(body) | {
            "status": "incomplete" if answer.is_cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut_off else None,
            "output": items,
            "usage": {
                "input_tokens": answer.reply.input_len,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answer.reply.output_len,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.reply.input_len + answer.reply.output_len,
            },
        }
        before = self._dialogues.get(body.get("previous_response_id") or "", [])
        asked = messages_of_input(body.get("input"))
        self._dialogues[response["id"]] = [*before, *asked, answer.message]
        return response

    def _opened(self, body: dict[str, Any]) -> dict[str, Any]:
        return {name: body.get(name) for name in ECHOED} | {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": body.get("model") or "policy",
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "usage": None,
        }

    def events(self, body: dict[str, Any], answer: Answer) -> Iterator[Event]:
        for number, (kind, data) in enumerate(self._events(body, answer)):
            yield kind, {"type": kind, "sequence_number": number} | data

    def _events(self, body: dict[str, Any], answer: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
        whole = self.result(body, answer)
        begun = whole | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(whole["output"]):
            place = {"item_id": item["id"], "output_index": index}
            empty = {"content": []} if "content" in item else {"arguments": ""}
            yield (
                "response.output_item.added",
                {"output_index": index, "item": item | empty | {"status": "in_progress"}},
            )
            if item["type"] == "function_call":
                yield "response.function_call_arguments.delta", place | {"delta": item["arguments"]}
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield "response.function_call_arguments.done", place | done
            for part_index, part in enumerate(item.get("content", ())):
                where, kind = place | {"content_index": part_index}, part["type"]
                yield "response.content_part.added", where | {"part": part | {"text": ""}}
                more = {"logprobs": []} if kind == "output_text" else {}
                yield f"response.{kind}.delta", where | {"delta": part["text"]} | more
                yield f"response.{kind}.done", where | {"text": part["text"]} | more
                yield "response.content_part.done", where | {"part": part}
            yield "response.output_item.done", {"output_index": index, "item": item}
        yield f"response.{whole['status']}", {"response": whole}

    def error(self, status: int, message: str, field: str | None, code: str | None) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def output_items(answer: Answer) -> list[dict[str, Any]]:
    """Return the reply as items: what was thought, what is said, and the calls."""
    items: list[dict[str, Any]] = []
    status = "incomplete" if answer.is_cut_off else "completed"
    if answer.thoughts is not None:
        content = [{"type": "reasoning_text", "text": answer.thoughts}]
        items.append({"id": new_id("rs"), "type": "reasoning", "summary": [], "content": content, "status": status})
    if answer.message["content"] or not answer.calls:
        part = {"type": "output_text", "text": answer.message["content"], "annotations": [], "logprobs": []}
        said = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": [part], "status": status}
        items.append(said)
    for call in answer.calls:
        named = {"call_id": call["id"], **call["function"]}
        items.append({"id": new_id("fc"), "type": "function_call", **named, "status": "completed"})
    return items


def messages_of_input(value: Any) -> list[Message]:
    """Return the messages that an input is. BadRequest for an item that is none."""
    if is_text(value):
        return [{"role": "user", "content": value}]
    require(isinstance(value, list) and bool(value), "input", value, "must be text, or a list of one item or more")
    messages: list[Message] = []
    for number, item in enumerate(value):
        add_item(messages, item, f"input[{number}]")
    return messages


def add_item(messages: list[Message], item: Any, field: str) -> None:
    require(is_object(item), field, item, "must be an object")
    match item.get("type") or "message":
        case "message":
            role = item.get("role")
            require(is_text(role), f"{field}.role", role, "must be text")
            content = text_of(item.get("content"), TEXTS, f"{field}.content")
            messages.append({"role": "system" if role == "developer" else role, "content": content})
        case "function_call":
            texts = [item.get(name) for name in ("call_id", "name", "arguments")]
            require(all(map(is_text, texts)), field, item, "must have call_id, name and arguments, all text")
            if not messages or messages[-1]["role"] != "assistant":  # a reply that calls and says nothing
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            require(is_text(item.get("call_id")), f"{field}.call_id", item.get("call_id"), "must be text")
            content = text_of(item.get("output"), TEXTS, f"{field}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        case "reasoning":  # the tokens that were generated are kept, with what was thought
            pass
        case kind:
            rule = "must be message, function_call, function_call_output or reasoning"
            require(False, f"{field}.type", kind, rule)
