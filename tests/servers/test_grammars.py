"""Replies that obey a grammar: real SGLang gives them, and the embedded server says that it cannot."""

import asyncio
import json

import pytest

from megatron_rl.api import RequestRefused
from megatron_rl.config import GenerationConfig
from megatron_rl.telemetry.rollout_metrics import metrics_of
from megatron_rl.types import LLMRequest, LLMResponse
from tests.kit.tokenizers import make_tokenizer

SCHEMA = {"enum": [{"city": "Rome", "n": 12}, {"city": "Oslo", "n": 30}]}
CALL = {"begin": '<tool_call>\n{"name": "go", "arguments": ', "end": "}\n</tool_call>"}


def request_for(rule, **fields):
    tag = json.dumps({"type": "structural_tag", "format": rule})
    gconfig = GenerationConfig(max_new_tokens=100)
    return LLMRequest(rid="r", input_ids=[11, 200, 37], gconfig=gconfig, grammar={"structural_tag": tag}, **fields)


def test_real_sglang_obeys_schemas_and_forms_of_calls_and_the_tokens_are_counted(real_sglang, connect):
    engine, tokenizer = connect(real_sglang, seed=1), make_tokenizer()
    schema = {"type": "json_schema", "json_schema": SCHEMA}
    begun = LLMResponse(
        input_tokens=[11, 200, 37], output_tokens=[5], output_logprobs=[-1.0], output_versions=[0], stop_reason="abort"
    )
    texts, tokens = [], 0
    for request in (
        request_for(schema),
        request_for({"type": "tag", "content": schema} | CALL),
        request_for(schema, begun=begun),
    ):
        reply = asyncio.run(engine.agenerate(request))
        assert reply.stop_reason == "stop"
        texts.append(tokenizer.decode(reply.output_tokens, skip_special_tokens=True))
        tokens += reply.output_len
    assert json.loads(texts[0]) in SCHEMA["enum"]
    assert texts[1].startswith(CALL["begin"]) and texts[1].endswith(CALL["end"])
    assert json.loads(texts[2]) in SCHEMA["enum"], "one that was begun before begins anew, with its grammar"
    assert metrics_of([engine.service.client.metrics.take()])["rollout/constrained_tokens"] == tokens


def test_the_embedded_server_says_that_it_has_no_grammar(embedded_servers, connect):
    engine = connect(embedded_servers[:1])
    words = (
        f"{embedded_servers[0]}.*structural_tag is not supported by the embedded server; .*serve the model with SGLang"
    )
    with pytest.raises(RequestRefused, match=words):
        asyncio.run(engine.agenerate(request_for({"type": "json_schema", "json_schema": SCHEMA})))
