"""Replies are streamed as they are generated, and only as far as nothing that may follow changes them."""

import asyncio
import dataclasses
import json
import threading
import urllib.request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.agents import AgentWorkflow
from megatron_rl.agents.streamed_text import HALF, split_thoughts, sure_parts
from megatron_rl.agents.tool_formats import FORMATS
from megatron_rl.config import GenerationConfig
from tests.kit.examples import max_examples
from tests.kit.optional import later
from tests.kit.replies import RecordingEngine
from tests.kit.waiting import until
from tests.unit.agent_relay import here
from tests.unit.agents.test_agent_proxy import QUESTION

openai = later("openai", reason="the openai client is not installed: pip install openai")
anthropic = later("anthropic", reason="the anthropic client is not installed: pip install anthropic")

WORDS = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<",
        "<tool",
        "[",
    ),
    *('{"name": "add", "arguments": {"x": 1}}', '{"name": "f", "parameters": {}}', "{", "}", '"', "add", "1", ";"),
    *(" ", "\n", "\n\n", "so", "4 < 5", HALF, "Ä", "<arg_key>x</arg_key><arg_value>1</arg_value>"),
]


def whole_parts(text, *, is_open, shows_thoughts, tools):
    """The thoughts and the content of a whole reply, as a session tells them."""
    thoughts, said = split_thoughts(text, is_open=is_open) if shows_thoughts else (None, text)
    content, calls = tools.split(said, {}) if tools is not None else (said, [])
    return thoughts, said if not calls or any(call.fault for call in calls) else content


@settings(max_examples=max_examples(150, 1500), deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), max_size=8).map("".join),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, *FORMATS]),
)
def test_what_is_sure_of_a_beginning_is_so_of_the_whole(text, is_open, shows_thoughts, name):
    options = {"is_open": is_open, "shows_thoughts": shows_thoughts, "tools": name and FORMATS[name]}
    thoughts, said = whole_parts(text, **options)
    before = (None, "")
    for length in range(len(text) + 1):
        sure = sure_parts(text[:length], **options)
        assert said.startswith(sure[1]) and (thoughts or "").startswith(sure[0] or "")
        assert sure[0] is None or thoughts is not None, "a thought that is told of is one"
        assert sure[1].startswith(before[1]) and (sure[0] or "").startswith(before[0] or ""), "it only grows"
        before = sure


@pytest.mark.parametrize("name", FORMATS)
def test_plain_text_is_told_up_to_its_last_word_whatever_calls_look_like(name):
    text = "The sum of 12 and 30 is 42."
    sure = [sure_parts(text[:n], is_open=False, shows_thoughts=True, tools=FORMATS[name])[1] for n in range(1, 28)]
    assert sure == [text[:n].rstrip() for n in range(1, 28)]


def test_thoughts_are_told_before_they_end_and_what_may_begin_a_call_is_not():
    options = {"is_open": True, "shows_thoughts": True, "tools": FORMATS["hermes"]}
    assert sure_parts("12 + 30 </th", **options) == ("12 + 30", "")
    assert sure_parts("12 + 30</think>\nSo <tool", **options) == ("12 + 30", "So")
    assert sure_parts("12 + 30</think>\nSo < 4", **options) == ("12 + 30", "So < 4")


class Streaming(RecordingEngine):
    """Tells its replies token by token; the last one when it is let."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.may_end = threading.Event()

    async def agenerate(self, req):
        reply = await super().agenerate(req)
        if req.on_tokens is not None:
            for length in range(1, reply.output_len):
                req.on_tokens(reply.output_tokens[:length])
                await asyncio.sleep(0)
            await until(self.may_end.is_set, "no piece came before the end")
        return reply


CALL = '<tool_call>{"name": "add", "arguments": {"x": 12}}</tool_call>'
REPLY = f"<think>what is it, and why</think>so it is said at length {CALL}<eos>"
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object"}}


def of_openai(base_url, api_key):
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def chat(base_url, api_key, data, noted):
    options = {"model": "policy", "messages": data["messages"], "tools": [{"type": "function", "function": FUNCTION}]}
    with of_openai(base_url, api_key).chat.completions.stream(**options, stream_options={"include_usage": True}) as s:
        for event in s:
            if event.type == "content.delta":
                noted(event.delta)
        final = s.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls" and final.usage.completion_tokens > 10
    return message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls]


def responses(base_url, api_key, data, noted):
    options = {"model": "policy", "input": data["messages"], "tools": [{"type": "function", **FUNCTION}]}
    thoughts = []
    with of_openai(base_url, api_key).responses.stream(**options) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                noted(event.delta)
            if event.type == "response.reasoning_text.delta":
                thoughts.append(event.delta)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert "".join(thoughts) == final.output[0].content[0].text == "what is it, and why" and len(thoughts) > 3
    assert final.usage.output_tokens > 10
    return final.output_text, [(final.output[2].name, final.output[2].arguments)]


def messages(base_url, api_key, data, noted):
    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
    tools = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
    options = {"model": "policy", "messages": data["messages"], "tools": tools}
    counted = client.messages.count_tokens(**options).input_tokens
    thoughts = []
    with client.messages.stream(max_tokens=200, **options) as stream:
        for event in stream:
            if event.type == "text":
                noted(event.text)
            if event.type == "thinking":
                thoughts.append(event.thinking)
        final = stream.get_final_message()
    assert "".join(thoughts) == final.content[0].thinking == "what is it, and why" and len(thoughts) > 3
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.usage.input_tokens == counted > 0 and final.usage.output_tokens > 10
    return final.content[1].text, [(final.content[2].name, json.dumps(final.content[2].input))]


@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_real_clients_get_the_pieces_while_the_reply_is_generated(tokenizer, ask):
    engine, told, pieces = Streaming(tokenizer, script=lambda _: REPLY), [], []

    def noted(piece):
        pieces.append(piece)
        engine.may_end.set()  # only now the reply ends

    def agent(base_url, api_key, data):
        told.append(ask(base_url, api_key, data, noted))
        return 1.0

    gconfig = GenerationConfig(max_new_tokens=200)
    workflow = AgentWorkflow(lambda **_: 0.0, gconfig, tokenizer, max_tokens=600, **here(agent))
    (streamed,) = asyncio.run(workflow.arun_episode(engine, {"messages": QUESTION, "sample_key": "k"}))
    said = "what is it, and why</think>so it is said at length" if ask is chat else "so it is said at length"
    assert told == [(said, [("add", '{"x": 12}')])] and len(pieces) > 5 and "".join(pieces) == said
    req, reply = engine.served[0]
    assert streamed.input_ids.tolist() == req.input_ids + reply.output_tokens
    assert streamed.logprobs[len(req.input_ids) :].tolist() == pytest.approx(reply.output_logprobs)


def test_a_reply_that_is_not_the_one_that_was_streamed_ends_the_stream_with_an_error(tokenizer):
    class Changing(Streaming):
        async def agenerate(self, req):
            reply = await super().agenerate(req)
            return dataclasses.replace(reply, sampled=(await RecordingEngine.agenerate(self, req)).sampled)

    replies = iter(["first one thing<eos>", "then another<eos>"])
    engine, found = Changing(tokenizer, script=lambda _: next(replies)), []
    engine.may_end.set()

    def agent(base_url, api_key, data):
        body = json.dumps({"messages": data["messages"], "stream": True}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
        with urllib.request.urlopen(request) as answer:
            found.append(answer.read().decode())
        return 1.0

    workflow = AgentWorkflow(lambda **_: 0.0, GenerationConfig(), tokenizer, max_tokens=600, **here(agent))
    asyncio.run(workflow.arun_episode(engine, {"messages": QUESTION}))
    assert "event: error" in found[0] and "is not the one that was streamed so far" in found[0]
