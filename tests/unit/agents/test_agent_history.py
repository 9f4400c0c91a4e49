"""Sessions without a process: what an agent is told of a reply, and which of its requests continue a dialogue."""

import asyncio
import importlib
import json

import pytest

from megatron_rl.agents import agent_request, messages_api, responses_api
from megatron_rl.agents.agent_request import BadRequest
from megatron_rl.agents.agent_session import AgentSession, ProxyOptions
from megatron_rl.agents.chat_api import ChatApi
from megatron_rl.agents.messages_api import MessagesApi
from megatron_rl.agents.responses_api import ResponsesApi
from megatron_rl.agents.streamed_text import Progress
from megatron_rl.agents.tool_formats import tool_format
from megatron_rl.api import ContextOutgrown
from megatron_rl.config import GenerationConfig
from megatron_rl.rollout.groups import without_cut_off
from megatron_rl.workflows.rendering import ChatTemplate
from tests.kit.replies import RecordingEngine
from tests.kit.tokenizers import CHAT_TEMPLATE, make_tokenizer

QUESTION = {"role": "user", "content": "What is 12 + 30?"}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "number"}, "note": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": PARAMETERS}}
CALL = '<tool_call>{"name": "add", "arguments": {"x": 12, "note": "é <b>"}}</tool_call>'
DRAFT = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'


def session_of(tokenizer, *replies, form="auto", max_tokens=2000):
    rest = iter(replies)
    engine = RecordingEngine(tokenizer, script=lambda _: next(rest))
    options = ProxyOptions(
        tokenizer=tokenizer,
        gconfig=GenerationConfig(),
        max_tokens=max_tokens,
        template=ChatTemplate(tokenizer),
        tools=tool_format(form, tokenizer),
    )
    return AgentSession(engine, options, "k")


def ask(session, api, body, progress=None):
    """The body of the answer to a request's body."""

    async def asking():
        asked = api.as_chat(body)
        return api.result(body, await session.answer(asked, shows_thoughts=api.shows_thoughts, progress=progress))

    return asyncio.run(asking())


def body_of(name, content="What is 12 + 30?", tools=True, **fields):
    """A request of one of the three APIs, which has a tool."""
    function = TOOL["function"]
    if name == "messages":
        tool = {"name": "add", "description": "", "input_schema": PARAMETERS}
        return {"max_tokens": 50, "messages": [{"role": "user", "content": content}], "tools": [tool]} | fields
    if name == "responses":
        return {"input": content, "tools": [{"type": "function", **function}]} | fields
    return {"messages": [{"role": "user", "content": content}], "tools": [TOOL]} | fields


def apis(tokenizer):
    return {"chat": ChatApi(tokenizer), "messages": MessagesApi(), "responses": ResponsesApi()}


def calls_in(name, result):
    if name == "chat":
        return [(c["id"], c["function"]["name"]) for c in result["choices"][0]["message"].get("tool_calls", [])]
    blocks = result["content"] if name == "messages" else result["output"]
    names = {"tool_use": "id", "function_call": "call_id"}
    return [(block[names[block["type"]]], block["name"]) for block in blocks if block["type"] in names]


API_NAMES = ["chat", "messages", "responses"]
OPENED = CHAT_TEMPLATE.replace("{% if enable_thinking %}", "{% if true %}")


# --- Thoughts


@pytest.mark.parametrize("name", API_NAMES)
@pytest.mark.parametrize(
    ("template", "reply", "count"),
    [
        (CHAT_TEMPLATE, f"<think>maybe {DRAFT}</think>42<eos>", 0),
        (CHAT_TEMPLATE, f"<think>maybe {DRAFT}", 0),
        (CHAT_TEMPLATE, f"<think>maybe {DRAFT}</think>so {CALL}<eos>", 1),
        (CHAT_TEMPLATE, f"so <think>maybe {DRAFT}</think>{CALL}<eos>", 1),
        (OPENED, f"maybe {DRAFT}</think>42<eos>", 0),
        (OPENED, f"maybe {DRAFT}", 0),
        (OPENED, f"maybe {DRAFT}</think>{CALL}<eos>", 1),
    ],
)
def test_a_call_that_is_drafted_in_a_thought_is_not_told_to_the_agent(name, template, reply, count):
    tokenizer = make_tokenizer(template)
    result = ask(session_of(tokenizer, reply), apis(tokenizer)[name], body_of(name))
    assert len(calls_in(name, result)) == count
    assert count or "add" not in json.dumps(calls_in(name, result))


# --- Histories that come back in another form


def told(session, *replies):
    """A dialogue of a question, a reply that calls, and its result."""
    message = ask(session, ChatApi(session.options.tokenizer), body_of("chat"))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
    return [dict(QUESTION), message, result]


def with_arguments(change):
    def edit(messages):
        function = messages[1]["tool_calls"][0]["function"]
        function["arguments"] = change(json.loads(function["arguments"]))

    return edit


def renamed(messages):
    messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = "other"


def set_content(number, content):
    return lambda messages: messages[number].update(content=content)


@pytest.mark.parametrize(
    "edit",
    [
        with_arguments(lambda given: json.dumps(given, separators=(",", ":"))),
        with_arguments(lambda given: json.dumps(dict(reversed(given.items())), ensure_ascii=False)),
        with_arguments(lambda given: json.dumps(given | {"x": 12.0}, indent=2)),
        with_arguments(lambda given: json.dumps(given).replace("<", "\\u003c")),
        renamed,
        set_content(1, "so"),
        set_content(1, " <think>hm</think>\n\nso \n"),
        set_content(1, [{"type": "text", "text": "so"}]),
        set_content(0, f"{QUESTION['content']}\n"),
    ],
)
def test_a_history_that_was_written_anew_continues_its_trajectory(tokenizer, edit):
    session = session_of(tokenizer, f"<think>hm</think>so {CALL}<eos>", "42<eos>")
    messages = told(session)
    edit(messages)
    ask(session, ChatApi(tokenizer), {"messages": messages, "tools": [TOOL]})
    (trajectory,) = session.trajectories(1.0)
    assert trajectory.sequence["turns"] == 2 and trajectory.split == ""


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (with_arguments(lambda given: json.dumps(given | {"x": 13})), "assistant"),
        (set_content(1, "something else"), "assistant"),
        (set_content(0, "Another question"), "user"),
        (lambda messages: messages.insert(0, {"role": "system", "content": "Be brief."}), "system"),
    ],
)
def test_a_trajectory_that_splits_says_why(tokenizer, edit, why):
    session = session_of(tokenizer, f"so {CALL}<eos>", "42<eos>")
    messages = told(session)
    edit(messages)
    ask(session, ChatApi(tokenizer), {"messages": messages, "tools": [TOOL]})
    assert [trajectory.split for trajectory in session.trajectories(1.0)] == ["", why]


def test_other_tools_and_a_second_way_are_splits_and_their_number_is_a_metric(tokenizer):
    session = session_of(tokenizer, f"so {CALL}<eos>", "42<eos>", "43<eos>", "44<eos>")
    messages = told(session)
    other = {"type": "function", "function": {"name": "sub", "parameters": {}}}
    for tools in ([TOOL], [TOOL], [TOOL, other]):
        ask(session, ChatApi(tokenizer), {"messages": messages, "tools": tools})
    trajectories = session.trajectories(1.0)
    assert [trajectory.split for trajectory in trajectories] == ["", "again", "tools"]
    added = {}

    class Metrics:
        def add(self, **amounts):
            added.update(amounts)

    without_cut_off(None, trajectories, Metrics(), masks=False)
    assert (added["rollout/splits/again"], added["rollout/splits/tools"]) == (1, 1)


def test_of_replies_that_differ_in_their_thoughts_alone_the_very_same_one_is_continued(tokenizer):
    session = session_of(tokenizer, "<think>one</think>42<eos>", "<think>two</think>42<eos>", "so<eos>")
    api = ChatApi(tokenizer)
    said = [ask(session, api, {"messages": [QUESTION]})["choices"][0]["message"] for _ in range(2)]
    ask(session, api, {"messages": [QUESTION, said[1], {"role": "user", "content": "Sure?"}]})
    turns = {tokenizer.decode(t.input_ids).count("two"): t.sequence["turns"] for t in session.trajectories(1.0)}
    assert turns == {0: 1, 1: 2}


# --- Ids of calls


@pytest.mark.parametrize("name", API_NAMES)
def test_ids_of_calls_are_nine_letters_and_digits(tokenizer, name):
    result = ask(session_of(tokenizer, CALL + CALL), apis(tokenizer)[name], body_of(name))
    ids = [identity for identity, _ in calls_in(name, result)]
    assert len(set(ids)) == 2 and all(len(one) == 9 and one.isascii() and one.isalnum() for one in ids)


def test_ids_that_a_policy_or_an_agent_gave_are_kept_and_shown_to_the_template():
    shown = "{{ call['id'] }}={{ call['function']['name'] }}{{ call['function']['arguments'] | tojson }}"
    tokenizer = make_tokenizer(CHAT_TEMPLATE.replace("{{ call['function'] | tojson }}", shown))
    session = session_of(tokenizer, '[TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS]{"x": 1}<eos>', "42<eos>", form="mistral")
    message = ask(session, ChatApi(tokenizer), body_of("chat"))["choices"][0]["message"]
    assert message["tool_calls"][0]["id"] == "abc123XYZ"
    call = {"id": "given1234", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "given1234", "content": "1"})
    ask(session, ChatApi(tokenizer), {"messages": [QUESTION, *history]})
    assert "given1234=add" in tokenizer.decode(session.engine.served[-1][0].input_ids)


# --- Stop strings, prefills, options


@pytest.mark.parametrize(
    ("stop", "reply", "said"),
    [
        ("END", "it is 42 END<eos>", "it is 42 "),
        (["no", "is"], "it is 42<eos>", "it "),
        (["\n"], "it\nis", "it"),
        ("</tool_call>", f"so {CALL}<eos>", None),
    ],
)
def test_a_stop_string_of_the_agent_is_cut_from_its_text_and_its_tokens_are_trained(tokenizer, stop, reply, said):
    session = session_of(tokenizer, reply)
    choice = ask(session, ChatApi(tokenizer), body_of("chat", stop=stop))["choices"][0]
    assert choice["finish_reason"] == ("stop" if said else "tool_calls")
    assert said is None or choice["message"]["content"] == said
    (trajectory,) = session.trajectories(1.0)
    assert tokenizer.decode(trajectory.input_ids[trajectory.loss_mask]) == reply


def test_anthropics_api_tells_which_stop_sequence_ended_a_reply(tokenizer):
    session = session_of(tokenizer, "<think>hm</think>it is 42 END<eos>", "42<eos>")
    body = body_of("messages", stop_sequences=["END", "x"])
    result = ask(session, MessagesApi(), body)
    assert (result["stop_reason"], result["stop_sequence"]) == ("stop_sequence", "END")
    assert [block.get("text") for block in result["content"]] == [None, "it is 42 "]
    result = ask(session, MessagesApi(), body)
    assert (result["stop_reason"], result["stop_sequence"]) == ("end_turn", None)


def test_a_stream_never_tells_the_beginning_of_a_stop_string(tokenizer):
    reply = tokenizer("it is 42 STOP<eos>", add_special_tokens=False)["input_ids"]

    class Streaming(RecordingEngine):
        async def agenerate(self, req):
            for length in range(1, len(reply)):
                req.on_tokens(reply[:length])
                await asyncio.sleep(0)
                assert not progress.said.rstrip().endswith(("S", "ST", "STO", "STOP"))
            return await super().agenerate(req)

    session, progress = session_of(tokenizer), None
    session.engine = Streaming(tokenizer, script=lambda _: "it is 42 STOP<eos>")

    async def asking():
        nonlocal progress
        progress = Progress()
        return await session.answer({"messages": [QUESTION], "stop": "STOP"}, progress=progress)

    assert asyncio.run(asking()).message["content"] == "it is 42 " and progress.said == "it is 42"


@pytest.mark.parametrize("name", API_NAMES)
def test_a_request_that_ends_with_the_assistants_words_is_refused(tokenizer, name):
    messages = [QUESTION, {"role": "assistant", "content": "It is"}]
    body = {"input": messages} if name == "responses" else {"messages": messages}
    with pytest.raises(BadRequest, match="the last one is the assistant's"):
        ask(session_of(tokenizer), apis(tokenizer)[name], body)


REFUSED = {
    "chat": [{"logit_bias": {"5": 1}}, {"n": 2}, {"top_logprobs": 3}, {"presence_penalty": 0.5}, {"audio": {"a": 1}}]
    + [{"frequency_penalty": -1}, {"functions": [{"name": "f"}]}, {"function_call": "auto"}, {"top_k": 5}]
    + [{"modalities": ["audio"]}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"ignore_eos": True}, {"stop": ""}]
    + [{"chat_template_kwargs": {"a": 1}}, {"continue_final_message": True}, {"guided_json": {"a": 1}}]
    + [{"response_format": {"type": "json_object"}}, {"stop_token_ids": [1]}, {"web_search_options": {"a": 1}}],
    "messages": [{"top_k": 5}, {"container": "c"}, {"mcp_servers": [{"type": "url"}]}, {"logit_bias": {"5": 1}}]
    + [
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"output_config": {"format": {"a": 1}}},
    ],
    "responses": [{"top_logprobs": 2}, {"truncation": "auto"}, {"include": ["message.output_text.logprobs"]}]
    + [{"background": True}, {"conversation": "c"}, {"prompt": {"id": "p"}}, {"stop": ["a"]}, {"logit_bias": {"5": 1}}],
}
TAKEN = {
    "chat": {"user": "u", "metadata": {"a": "b"}, "seed": 5, "store": True, "service_tier": "auto", "logit_bias": {}}
    | {"n": 1, "top_logprobs": None, "frequency_penalty": 0, "modalities": ["text"], "parallel_tool_calls": True}
    | {"response_format": {"type": "text"}, "reasoning_effort": "low", "prompt_cache_key": "k", "temperature": 0.3},
    "messages": {"metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "disabled"}}
    | {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    | {"output_config": {"effort": "low"}, "tool_choice": {"type": "auto"}, "temperature": 0.3},
    "responses": {"metadata": {"a": "b"}, "user": "u", "store": False, "include": ["reasoning.encrypted_content"]}
    | {"reasoning": {"effort": "low"}, "truncation": "disabled", "text": {"verbosity": "low"}, "max_tool_calls": 3},
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in REFUSED for field in REFUSED[name]])
def test_an_option_that_would_change_the_reply_is_refused_by_its_name(tokenizer, name, field):
    with pytest.raises(BadRequest, match="|".join([*field, "response_format"])):
        ask(session_of(tokenizer), apis(tokenizer)[name], body_of(name, **field))


@pytest.mark.parametrize("name", API_NAMES)
def test_options_that_change_nothing_are_taken(tokenizer, name):
    assert ask(session_of(tokenizer, "42<eos>"), apis(tokenizer)[name], body_of(name, **TAKEN[name]))


@pytest.mark.parametrize(
    ("options", "client", "path"),
    [
        (agent_request.OPTIONS, "openai", "types.chat.completion_create_params:CompletionCreateParamsBase"),
        (responses_api.OPTIONS, "openai", "types.responses.response_create_params:ResponseCreateParamsBase"),
        (messages_api.OPTIONS, "anthropic", "types.message_create_params:MessageCreateParamsBase"),
    ],
)
def test_every_option_of_the_published_clients_is_taken_or_refused_by_name(options, client, path):
    pytest.importorskip(client, reason=f"the {client} client is not installed: pip install {client}")
    module, _, name = path.partition(":")
    published = getattr(importlib.import_module(f"{client}.{module}"), name)
    fields = {field for kind in published.__mro__ for field in getattr(kind, "__annotations__", {})}
    assert len(fields) > 10 and fields <= options.keys()


def test_log_probabilities_are_streamed_to_agents_that_ask(tokenizer):
    session, api = session_of(tokenizer, "42<eos>"), ChatApi(tokenizer)
    body = {"messages": [QUESTION], "logprobs": True}
    events = list(api.stream(body).finish(asyncio.run(session.answer(body))))
    given = [event["choices"][0].get("logprobs") for _, event in events]
    (reply,) = [reply for _, reply in session.engine.served]
    assert [entry["logprob"] for entry in given[-1]["content"]] == reply.output_logprobs


@pytest.mark.parametrize("name", API_NAMES)
def test_two_calls_are_told_as_text_where_the_agent_takes_one(tokenizer, name):
    one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    fields = one if name == "messages" else {"parallel_tool_calls": False}
    session = session_of(tokenizer, CALL + CALL, CALL)
    assert calls_in(name, ask(session, apis(tokenizer)[name], body_of(name, **fields))) == []
    assert len(calls_in(name, ask(session, apis(tokenizer)[name], body_of(name, **fields)))) == 1


# --- Numbers that are none, sizes


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_a_fault_in_both_directions(tokenizer, value):
    reply = CALL.replace("12", value)
    choice = ask(session_of(tokenizer, reply), ChatApi(tokenizer), body_of("chat"))["choices"][0]
    assert "tool_calls" not in choice["message"] and value in choice["message"]["content"]
    call = {"id": "1", "function": {"name": "add", "arguments": f'{{"x": {value}}}'}}
    messages = [QUESTION, {"role": "assistant", "tool_calls": [call]}, QUESTION]
    with pytest.raises(BadRequest, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        ask(session_of(tokenizer), ChatApi(tokenizer), {"messages": messages})


@pytest.mark.parametrize(
    "schema",
    [{"properties": {f"argument_{n}": {} for n in range(65_536)}}, {"enum": list(range(300_000))}],
    ids=["keys", "numbers"],
)
def test_a_schema_is_measured_with_its_keys_and_numbers(tokenizer, schema):
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    with pytest.raises(ContextOutgrown, match="characters, more than the 2000 tokens"):
        ask(session_of(tokenizer), ChatApi(tokenizer), {"messages": [QUESTION], "tools": [tool]})
