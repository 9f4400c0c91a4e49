"""Agents that demand JSON of a schema, or the call of a tool: refused, or by a grammar and not trained."""

import json

import pytest

from megatron_rl.api import RequestRefused
from megatron_rl.config import GenerationConfig
from megatron_rl.rollout.kept_replies import request_name
from megatron_rl.types import LLMRequest
from tests.kit.replies import RecordingEngine
from tests.kit.tokenizers import CHAT_TEMPLATE, make_tokenizer
from tests.unit.agents.test_agent_apis import PARAMETERS, claude
from tests.unit.agents.test_agent_proxy import client_of, openai, run

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 12, "y": 30}}\n</tool_call>'


def scripted(tokenizer, *replies):
    rest = iter(replies)
    return RecordingEngine(tokenizer, script=lambda req: next(rest))


def rule_of(request):
    """The format of the structural tag that a request was sent with."""
    (name,) = request.grammar
    assert name == "structural_tag"
    tag = json.loads(request.grammar[name])
    assert tag["type"] == "structural_tag"
    return tag["format"]


def tag_of(name, schema):
    begin, end = f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def test_json_of_a_schema_is_context_and_the_reply_behind_it_is_trained(tokenizer):
    def agent(base_url, api_key, data):
        client, messages = client_of(base_url, api_key), list(data["messages"])
        first = client.chat.completions.create(model="policy", messages=messages, response_format=FORMAT)
        assert json.loads(first.choices[0].message.content) == {"city": "Rome"}
        messages += [first.choices[0].message, {"role": "user", "content": "Why?"}]
        client.chat.completions.create(model="policy", messages=messages)
        return 1.0

    engine = scripted(tokenizer, '{"city": "Rome"}', "Because.<eos>")
    (trajectory,) = run(agent, engine, constrained="untrained")
    (first, _), (second, _) = engine.served
    assert rule_of(first) == {"type": "json_schema", "json_schema": SCHEMA} and second.grammar is None
    text = tokenizer.decode(trajectory.input_ids)
    assert '<|assistant|>{"city": "Rome"}' in text, "it is there as it was generated"
    assert tokenizer.decode(trajectory.input_ids[trajectory.loss_mask]) == "Because.<eos>"


@pytest.mark.parametrize(
    ("choice", "rule"),
    [
        ({"type": "function", "function": {"name": "add"}}, tag_of("add", PARAMETERS)),
        ("required", {"type": "or", "elements": [tag_of("add", PARAMETERS), tag_of("sub", {"type": "object"})]}),
    ],
)
def test_a_tool_that_must_be_called_is_called_by_a_grammar_of_the_familys_form(tokenizer, choice, rule):
    def agent(base_url, api_key, data):
        asked = {"messages": data["messages"], "tools": [TOOL, OTHER], "tool_choice": choice}
        message = client_of(base_url, api_key).chat.completions.create(model="policy", **asked).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": 12, "y": 30})
        return 1.0

    engine = scripted(tokenizer, f"{CALL}<eos>")
    (trajectory,) = run(agent, engine, constrained="untrained")
    assert rule_of(engine.served[0][0]) == rule and not trajectory.loss_mask.any()


def test_anthropics_client_forces_a_tool_and_openais_responses_a_schema(tokenizer):
    def agent(base_url, api_key, data):
        tool = {"name": "add", "description": "adds", "input_schema": PARAMETERS}
        asked = {"messages": data["messages"], "tools": [tool], "tool_choice": {"type": "tool", "name": "add"}}
        answer = claude(base_url, api_key).messages.create(model="policy", max_tokens=100, **asked)
        assert answer.stop_reason == "tool_use" and answer.content[-1].input == {"x": 12, "y": 30}
        text = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
        said = client_of(base_url, api_key).responses.create(model="policy", input="Where?", text=text)
        assert json.loads(said.output_text) == {"city": "Rome"}
        return 1.0

    engine = scripted(tokenizer, f"{CALL}<eos>", '{"city": "Rome"}<eos>')
    run(agent, engine, constrained="untrained")
    asked = [rule_of(request) for request, _ in engine.served]
    assert asked == [tag_of("add", PARAMETERS), {"type": "json_schema", "json_schema": SCHEMA}]


def test_a_thought_that_the_template_opens_ends_before_the_grammar_begins(tokenizer):
    def agent(base_url, api_key, data):
        client_of(base_url, api_key).chat.completions.create(
            model="policy", messages=data["messages"], response_format={"type": "json_object"}
        )
        return 1.0

    opening = make_tokenizer(CHAT_TEMPLATE.replace("{% if enable_thinking %}", "{% if true %}"))
    engine = scripted(opening, "hm</think>{}<eos>")
    run(agent, engine, constrained="untrained")
    thought, rule = rule_of(engine.served[0][0])["elements"]
    assert thought["end"] == "</think>" and rule["json_schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": FORMAT}, "response_format = .*set rollout.workflow_args.constrained=untrained"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            "tool_choice = .*set rollout.workflow_args.constrained=untrained",
        ),
    ],
)
def test_without_the_option_they_are_refused_with_the_way_out(tokenizer, fields, words):
    def agent(base_url, api_key, data):
        client = client_of(base_url, api_key)
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(model="policy", messages=data["messages"], **fields)
        # A reply that must call is sampled like any other then: the policy learns to call.
        client.chat.completions.create(model="policy", messages=data["messages"], tools=[TOOL], tool_choice="required")
        return 1.0

    engine = scripted(tokenizer, "no call<eos>")
    (trajectory,) = run(agent, engine)
    assert engine.served[0][0].grammar is None and trajectory.loss_mask.any()


@pytest.mark.parametrize(
    ("fields", "words", "options"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "there are: add", {}),
        ({"tool_choice": "required", "response_format": FORMAT}, "leave out one of the two", {}),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema = None: must be an object", {}),
        ({"tool_choice": "required"}, "form of calls has no grammar", {"tool_format": "glm"}),
    ],
)
def test_what_has_no_grammar_is_refused_by_its_field(tokenizer, fields, words, options):
    def agent(base_url, api_key, data):
        client = client_of(base_url, api_key)
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(model="policy", messages=data["messages"], tools=[TOOL], **fields)
        client.chat.completions.create(model="policy", messages=data["messages"])
        return 1.0

    run(agent, scripted(tokenizer, "free<eos>"), constrained="untrained", **options)


def test_a_server_that_has_no_grammar_is_named_to_the_agent(tokenizer):
    async def refuse_grammars(request):
        if request.grammar is not None:
            raise RequestRefused("http://n7:30000/generate: structural_tag is not supported by the embedded server")

    def agent(base_url, api_key, data):
        client = client_of(base_url, api_key)
        with pytest.raises(openai.BadRequestError, match="http://n7:30000/generate: .*not supported by the embedded"):
            client.chat.completions.create(model="policy", messages=data["messages"], response_format=FORMAT)
        client.chat.completions.create(model="policy", messages=data["messages"])
        return 1.0

    engine = RecordingEngine(tokenizer, script=lambda req: "free<eos>", before=refuse_grammars)
    (trajectory,) = run(agent, engine, constrained="untrained")
    assert trajectory.loss_mask.any()


def test_an_unknown_way_is_refused(tokenizer):
    with pytest.raises(ValueError, match="constrained = 'maybe': must be one of refuse, untrained, trained"):
        run(lambda *_: 1.0, RecordingEngine(tokenizer), constrained="maybe")


def test_a_kept_reply_is_that_of_the_same_grammar():
    gconfig = GenerationConfig()
    requests = [LLMRequest(rid="", input_ids=[1], gconfig=gconfig, grammar=it) for it in (None, {"regex": "a"})]
    free, bound = map(request_name, requests)
    assert free != bound


def test_replies_under_a_grammar_are_trained_only_if_servers_report_what_it_left(tokenizer):
    with pytest.raises(ValueError, match="constrained = 'trained': with generation.top_k = -1 .*from 2 to 256, or"):
        run(lambda *_: 1.0, RecordingEngine(tokenizer), constrained="trained")
