"""OpenAI's Responses API."""

from __future__ import annotations

import time
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
    is_format,
    is_number,
    is_object,
    is_text,
    is_truth,
    refused,
    require,
    taken,
)
from megatron_rl.workflows.messages import Message

TEXTS = ("input_text", "output_text", "text")
OPTIONS: Rules = {
    **taken("input", "tools", "metadata", "user", "store", "service_tier", "reasoning", "stream_options"),
    **taken("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier"),
    **taken("max_tool_calls"),  # only concerns tools that the service runs itself
    **refused("top_logprobs", "context_management", "moderation", "conversation", "prompt"),
    "model": (is_text, "must be text"),
    "instructions": (is_text, "must be text"),
    "previous_response_id": (is_text, "must be text"),
    "max_output_tokens": (is_count, "must be a whole number of at least 1"),
    "temperature": (is_number, "must be a number"),
    "top_p": (is_number, "must be a number"),
    "stream": (is_truth, "must be true or false"),
    "background": (lambda value: value is False, NOT_SUPPORTED),
    "include": (
        lambda value: isinstance(value, list) and "message.output_text.logprobs" not in value,
        "must be a list without message.output_text.logprobs",
    ),
    "truncation": (lambda value: value == "disabled", "must be disabled: nothing of a dialogue is left out"),
    "parallel_tool_calls": (is_truth, "must be true or false"),
    "tool_choice": (lambda value: is_choice(chosen(value)), NOT_SUPPORTED),
    "text": (
        lambda value: is_object(value) and is_format(value.get("format") or {"type": "text"}),
        "must have a format of type text, json_schema or json_object",
    ),
}
ECHOED = ("instructions", "metadata", "previous_response_id", "temperature", "top_p")


class ResponsesApi(AgentApi):
    """The API behind POST /v1/responses. Each response is stored by its id for as long as its agent runs."""

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
            "tool_choice": chosen(body.get("tool_choice")),
            "response_format": format_of(body.get("text")),
            "max_completion_tokens": body.get("max_output_tokens"),
            "parallel_tool_calls": body.get("parallel_tool_calls"),
        }

    def result(self, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
        return self.whole(opened(body), body, answer, {})

    def whole(
        self, opening: dict[str, Any], body: dict[str, Any], answer: Answer, ids: dict[str, str]
    ) -> dict[str, Any]:
        """Return the complete response, and store its dialogue under its id.

        opening: the response's fields that were sent when the stream began. ids: {kind: id of the item that was already
        streamed}.
        """
        items = output_items(answer, ids)
        response = opening | {
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

    def stream(self, body: dict[str, Any]) -> ReplyStream:
        return ResponsesStream(self, body)

    def error(self, status: int, message: str, field: str | None, code: str | None) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": field, "code": code}}


class ResponsesStream(ReplyStream):
    def __init__(self, api: ResponsesApi, body: dict[str, Any]) -> None:
        super().__init__()
        self._api, self._body, self._opening = api, body, opened(body)
        self._count, self._ids, self._open = 0, dict[str, str](), ""

    def _event(self, kind: str, **data: Any) -> Event:
        self._count += 1
        return kind, {"type": kind, "sequence_number": self._count - 1} | data

    def begin(self, input_len: int) -> Iterator[Event]:
        yield self._event("response.created", response=self._opening)
        yield self._event("response.in_progress", response=self._opening)

    def add_thoughts(self, text: str) -> Iterator[Event]:
        yield from self._part("reasoning")
        if text:
            yield self._event("response.reasoning_text.delta", **self._place("reasoning"), delta=text)

    def add_said(self, text: str) -> Iterator[Event]:
        yield from self._part("message")
        if text:
            yield self._event("response.output_text.delta", **self._place("message"), delta=text, logprobs=[])

    def _place(self, kind: str) -> dict[str, Any]:
        return {"item_id": self._ids[kind], "output_index": list(self._ids).index(kind), "content_index": 0}

    def _part(self, kind: str) -> Iterator[Event]:
        """Yield the events that continue the open item if it is of this kind, or else open a new item with one part."""
        if self._open == kind:
            return
        if self._open:
            yield from self._close(cut_off=False)
        self._open, self._ids[kind] = kind, new_id(PREFIXES[kind])
        place = self._place(kind)
        item = item_of(kind, self._ids[kind], "", "in_progress")
        part = item["content"][0]
        yield self._event("response.output_item.added", output_index=place["output_index"], item=item | {"content": []})
        yield self._event("response.content_part.added", **place, part=part)

    def _close(self, *, cut_off: bool) -> Iterator[Event]:
        kind, place = self._open, self._place(self._open)
        text = self._said if kind == "message" else self._thoughts or ""
        item = item_of(kind, self._ids[kind], text, "incomplete" if cut_off else "completed")
        part = item["content"][0]
        more = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{part['type']}.done", **place, text=text, **more)
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def end(self, answer: Answer) -> Iterator[Event]:
        if not (self._said or answer.calls):
            yield from self.add_said("")
        if self._open:
            yield from self._close(cut_off=answer.is_cut_off)
        whole = self._api.whole(self._opening, self._body, answer, self._ids)
        for index, item in enumerate(whole["output"]):
            if item["type"] != "function_call":
                continue
            place, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
            begun = item | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=index, item=begun)
            yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
            yield self._event("response.function_call_arguments.done", **place, arguments=arguments, name=item["name"])
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)


def chosen(choice: Any) -> Any:
    """Convert a request's tool_choice to the form of chat completions."""
    is_named = is_object(choice) and choice.get("type") == "function"
    return {"type": "function", "function": {"name": choice.get("name")}} if is_named else choice


def format_of(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert a request's `text.format` to chat completions' response_format, where the schema is nested deeper."""
    given = (text or {}).get("format")
    return None if not given else {"type": given["type"], "json_schema": {"schema": given.get("schema")}}


def opened(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body.get(name) for name in ECHOED} | {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": body.get("model") or "policy",
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": None,
    }


PREFIXES = {"reasoning": "rs", "message": "msg"}
"""{kind of item: prefix of the item's id}."""


def item_of(kind: str, identity: str, text: str, status: str) -> dict[str, Any]:
    """Return an output item with a single part, which contains `text`."""
    if kind == "reasoning":
        content = [{"type": "reasoning_text", "text": text}]
        return {"id": identity, "type": kind, "summary": [], "content": content, "status": status}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": identity, "type": kind, "role": "assistant", "content": [part], "status": status}


def output_items(answer: Answer, ids: dict[str, str]) -> list[dict[str, Any]]:
    """Return the reply as output items: thoughts, text, and calls."""
    items: list[dict[str, Any]] = []
    status = "incomplete" if answer.is_cut_off else "completed"
    if answer.thoughts is not None:
        items.append(item_of("reasoning", ids.get("reasoning") or new_id("rs"), answer.thoughts, status))
    if answer.message["content"] or not answer.calls:
        items.append(item_of("message", ids.get("message") or new_id("msg"), answer.message["content"], status))
    for call in answer.calls:
        named = {"call_id": call["id"], **call["function"]}
        items.append({"id": new_id("fc"), "type": "function_call", **named, "status": "completed"})
    return items


def messages_of_input(value: Any) -> list[Message]:
    """Convert a request's input to chat-completions messages. Raises BadRequest for an unsupported item."""
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
            if not messages or messages[-1]["role"] != "assistant":  # a reply that only calls tools
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            require(is_text(item.get("call_id")), f"{field}.call_id", item.get("call_id"), "must be text")
            content = text_of(item.get("output"), TEXTS, f"{field}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        case "reasoning":  # ignored: the generated tokens are kept, thoughts included
            pass
        case kind:
            rule = "must be message, function_call, function_call_output or reasoning"
            require(False, f"{field}.type", kind, rule)
