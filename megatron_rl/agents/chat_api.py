"""OpenAI's chat completions API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_rl.agents.agent_api import AgentApi, Answer, Event, ReplyStream
from megatron_rl.types import LLMResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatApi(AgentApi):
    """The API behind POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    last_line = b"data: [DONE]\n\n"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """tokenizer: gives the texts of tokens if a request asks for log-probabilities."""
        self.tokenizer = tokenizer

    def as_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def result(self, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
        choice = {"index": 0, "message": answer.message, "finish_reason": finish_of(answer)}
        choice["logprobs"] = self.logprobs(body, answer)
        return head(body) | {"object": "chat.completion", "choices": [choice], "usage": usage_of(answer.reply)}

    def logprobs(self, body: dict[str, Any], answer: Answer) -> dict[str, Any] | None:
        return {"content": token_logprobs(self.tokenizer, answer.reply)} if body.get("logprobs") else None

    def stream(self, body: dict[str, Any]) -> ReplyStream:
        return ChatStream(self, body)

    def error(self, status: int, message: str, field: str | None, code: str | None) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": field, "code": code}}


class ChatStream(ReplyStream):
    def __init__(self, api: ChatApi, body: dict[str, Any]) -> None:
        super().__init__()
        self._head = head(body) | {"object": "chat.completion.chunk"}
        self._api, self._body = api, body

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> Event:
        return None, self._head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    def begin(self, input_len: int) -> Iterator[Event]:
        yield self._chunk({"role": "assistant", "content": ""})

    def add_said(self, text: str) -> Iterator[Event]:
        yield self._chunk({"content": text})

    def end(self, answer: Answer) -> Iterator[Event]:
        if answer.calls:
            yield self._chunk({"tool_calls": [{"index": number} | call for number, call in enumerate(answer.calls)]})
        name, chunk = self._chunk({}, finish_of(answer))
        chunk["choices"][0]["logprobs"] = self._api.logprobs(self._body, answer)
        yield name, chunk
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield None, self._head | {"choices": [], "usage": usage_of(answer.reply)}


def head(body: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.get("model") or "policy"}


def finish_of(answer: Answer) -> str:
    return "tool_calls" if answer.calls else "length" if answer.is_cut_off else "stop"


def usage_of(reply: LLMResponse) -> dict[str, int]:
    return {
        "prompt_tokens": reply.input_len,
        "completion_tokens": reply.output_len,
        "total_tokens": reply.input_len + reply.output_len,
    }


def token_logprobs(tokenizer: PreTrainedTokenizerBase, reply: LLMResponse) -> list[dict[str, Any]]:
    pairs = zip(reply.output_tokens, reply.output_logprobs, strict=True)
    texts = [(tokenizer.decode([token]), logprob) for token, logprob in pairs]
    return [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in texts]
