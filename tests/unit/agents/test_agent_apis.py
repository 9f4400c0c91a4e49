"""Real clients of OpenAI's Responses and of Anthropic's Messages lead dialogues whose tokens are trained as served."""

import asyncio
import ipaddress
import itertools
import json
import socket
import ssl
import struct
import subprocess
import threading
import urllib.error
import urllib.request

import pytest

from megatron_rl.agents import AgentWorkflow, agent_proxy
from megatron_rl.agents.agent_proxy import ProxyAddress
from megatron_rl.config import GenerationConfig
from tests.kit.optional import later
from tests.kit.replies import RecordingEngine, check_trajectory
from tests.kit.waiting import growing_deadlines, until, wait_until
from tests.unit.agent_relay import here
from tests.unit.agents.test_agent_proxy import QUESTION

openai = later("openai", reason="the openai client is not installed: pip install openai")
anthropic = later("anthropic", reason="the anthropic client is not installed: pip install anthropic")
CALLS = "".join(f'<tool_call>{{"name": "add", "arguments": {{"x": {x}, "y": 30}}}}</tool_call>' for x in (12, 13))
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}


def run(agent, engine, *, max_tokens=600, **options):
    gconfig = GenerationConfig(max_new_tokens=200)
    workflow = AgentWorkflow(
        lambda **_: 0.0, gconfig, engine.tokenizer, max_tokens=max_tokens, **here(agent), **options
    )
    return asyncio.run(workflow.arun_episode(engine, {"messages": QUESTION, "sample_key": "k"}))


def scripted(tokenizer, *replies):
    """An engine that gives these, one after the other."""
    rest = iter(replies)
    return RecordingEngine(tokenizer, script=lambda _: next(rest))


def claude(base_url, api_key):
    return anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)


def of_openai(base_url, api_key):
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def trained_text(trajectory, tokenizer):
    return tokenizer.decode(trajectory.input_ids[trajectory.loss_mask])


# --- Anthropic's Messages


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_anthropics_client_thinks_calls_two_tools_at_once_and_answers(tokenizer, streams):
    def ask(client, **fields):
        fields = {"model": "policy", "max_tokens": 200} | fields
        if not streams:
            return client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            shown.append("".join(stream.text_stream))
            return stream.get_final_message()

    def agent(base_url, api_key, data):
        client, messages = claude(base_url, api_key), list(data["messages"])
        options = {"system": "Be brief.", "tools": [{"name": "add", "description": "adds", "input_schema": PARAMETERS}]}
        first = ask(client, messages=messages, **options)
        assert first.stop_reason == "tool_use"
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert first.content[0].thinking == "what is it" and first.content[1].text == "so"
        results = []
        for block in first.content[2:]:
            total = str(block.input["x"] + block.input["y"])
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": total})
        # The thought comes back in one of the runs, and not in the other.
        kept = first.content if streams else first.content[1:]
        messages += [{"role": "assistant", "content": kept}, {"role": "user", "content": results}]
        last = ask(client, messages=messages, **options)
        assert last.stop_reason == "end_turn" and last.content[-1].text == "42 and 43"
        asked = [[*req.input_ids] for req, _ in engine.served]
        assert (last.usage.input_tokens, last.usage.output_tokens) == (len(asked[1]), engine.served[1][1].output_len)
        return 1.0

    shown = []
    engine = scripted(tokenizer, f"<think>what is it</think>so {CALLS}<eos>", "42 and 43<eos>")
    (trajectory,) = run(agent, engine)
    assert len(check_trajectory(trajectory, engine.served)) == 2
    assert trained_text(trajectory, tokenizer) == f"<think>what is it</think>so {CALLS}<eos>42 and 43<eos>"
    text = tokenizer.decode(trajectory.input_ids)
    assert "Be brief." in text and "<|user|>42<|end|><|user|>43<|end|>" in text
    assert shown == (["so", "42 and 43"] if streams else [])


def test_a_full_context_and_a_reply_that_is_cut_off_are_told_as_anthropic_tells_them(tokenizer):
    def agent(base_url, api_key, data):
        client = claude(base_url, api_key)
        cut_off = client.messages.create(model="policy", max_tokens=3, messages=data["messages"])
        assert cut_off.stop_reason == "max_tokens"
        client.messages.create(model="policy", max_tokens=3, messages=[{"role": "user", "content": "x " * 500}])

    engine = RecordingEngine(tokenizer, ends=("length",))
    (trajectory,) = run(agent, engine, max_tokens=400)
    assert trajectory.reward == 0.0, "scored as it stands"

    def asks(base_url, api_key, data):
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: messages: have"):
            claude(base_url, api_key).messages.create(
                model="policy", max_tokens=3, messages=[{"role": "user", "content": "x " * 500}]
            )
        with pytest.raises(anthropic.AuthenticationError, match="wrong API key"):
            claude(base_url, "guess").messages.create(model="policy", max_tokens=3, messages=data["messages"])

    assert run(asks, RecordingEngine(tokenizer), max_tokens=400) is None


# --- OpenAI's Responses


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("remembers", [False, True])
def test_an_agent_of_the_responses_api_goes_on_by_its_items_or_by_the_last_ones_id(tokenizer, streams, remembers):
    def ask(client, **fields):
        fields = {"model": "policy", "max_output_tokens": 200} | fields
        if not streams:
            return client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            kinds.update(event.type for event in stream)
            return stream.get_final_response()

    def agent(base_url, api_key, data):
        client, question = of_openai(base_url, api_key), data["messages"][0]["content"]
        tools = [{"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS, "strict": True}]
        first = ask(client, instructions="Be brief.", input=question, tools=tools)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output_text == "so" and first.status == "completed"
        results = []
        for item in first.output[2:]:
            given = json.loads(item.arguments)
            total = str(given["x"] + given["y"])
            results.append({"type": "function_call_output", "call_id": item.call_id, "output": total})
        if remembers:
            more = {"previous_response_id": first.id, "input": results}
        else:
            items = [item.model_dump(exclude_none=True) for item in first.output]
            more = {"input": [{"role": "user", "content": question}, *items, *results]}
        last = ask(client, instructions="Be brief.", tools=tools, **more)
        assert last.output_text == "42 and 43" and last.usage.input_tokens == len(engine.served[1][0].input_ids)
        with pytest.raises(openai.BadRequestError, match="previous_response_id = 'resp_of_another'"):
            ask(client, input="?", previous_response_id="resp_of_another")
        return 1.0

    kinds = set()
    engine = scripted(tokenizer, f"<think>what is it</think>so {CALLS}<eos>", "42 and 43<eos>")
    (trajectory,) = run(agent, engine)
    assert len(check_trajectory(trajectory, engine.served)) == 2
    assert "<|user|>42<|end|><|user|>43<|end|>" in tokenizer.decode(trajectory.input_ids)
    assert not streams or {"response.output_text.delta", "response.function_call_arguments.done"} <= kinds


def test_a_response_that_is_cut_off_says_so(tokenizer):
    def agent(base_url, api_key, data):
        answer = of_openai(base_url, api_key).responses.create(model="policy", input="12", max_output_tokens=2)
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
        return 1.0

    run(agent, RecordingEngine(tokenizer, ends=("length",)))


# --- What each API refuses


MALFORMED = [
    ("responses", {}, "input = None: must be text, or a list"),
    ("responses", {"input": []}, "must be text, or a list"),
    ("responses", {"input": [5]}, "input[0] = 5: must be an object"),
    ("responses", {"input": [{"type": "web_search_call"}]}, "input[0].type = 'web_search_call'"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ("responses", {"input": [{"type": "function_call", "name": "f"}]}, "must have call_id, name and arguments"),
    ("responses", {"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id = None"),
    ("responses", {"input": "12", "background": True}, "background = True: is not supported"),
    ("responses", {"input": "12", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice = "),
    ("responses", {"input": "12", "tools": [{"type": "web_search"}]}, "tools that a service runs itself"),
    ("responses", {"input": "12", "text": {"format": {"type": "json_schema"}}}, "constrained=untrained"),
    ("messages", {}, "messages = None: must be a list"),
    ("messages", {"messages": [{"role": "tool", "content": ""}]}, "messages[0].role = 'tool'"),
    ("messages", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content = 5"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].type = 'image'"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use'"),
    ("messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, "an input"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id = None"),
    ("messages", {"messages": QUESTION, "max_tokens": "3"}, "max_tokens = '3': must be a whole number"),
    ("messages", {"messages": QUESTION, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ("messages", {"messages": QUESTION, "tools": [{"name": "f"}]}, "tools[0]"),
    ("messages", {"messages": QUESTION, "temperature": float("inf")}, "Infinity is no JSON"),
    ("messages", {"messages": QUESTION, "system": [{"type": "image"}]}, "system[0]"),
]
"""Path, body and message of each refusal."""


def test_what_is_malformed_is_refused_by_the_name_of_its_field(tokenizer):
    told = []

    def agent(base_url, api_key, data):
        for path, body, message in MALFORMED:
            content, headers = json.dumps(body).encode(), {"x-api-key": api_key}
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(f"{base_url}/{path}", data=content, headers=headers))
            error = json.load(refused.value)["error"]
            assert refused.value.code == 400 and error["type"] == "invalid_request_error", (message, error)
            assert message in error["message"], error
            told.append(message)

    engine = RecordingEngine(tokenizer)
    assert run(agent, engine) is None and not engine.served
    assert len(told) == len(MALFORMED)


# --- Streams, hosts and certificates


@pytest.mark.slow
def test_a_stream_shows_that_it_lives_until_its_reply_is_there(tokenizer, monkeypatch):
    monkeypatch.setattr(agent_proxy, "SIGN_OF_LIFE_S", 0.05)
    may_end = threading.Event()

    async def slow(request):
        await until(may_end.is_set, "no sign of life came")
        await asyncio.sleep(0.2)  # in which a few more come

    def agent(base_url, api_key, data):
        body = json.dumps({"messages": data["messages"], "stream": True}).encode()
        headers = {"Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(f"{base_url}/chat/completions", data=body, headers=headers)
        with urllib.request.urlopen(request) as answer:
            signs = 0
            while signs < 3:
                signs += answer.readline() == b": the reply is being generated\n"
            may_end.set()
            assert answer.read().decode().split("\n\n")[-2] == "data: [DONE]"
        client = claude(base_url, api_key)
        with client.messages.stream(model="policy", max_tokens=20, messages=data["messages"]) as stream:
            assert stream.get_final_message().stop_reason == "end_turn"
        return 1.0

    run(agent, RecordingEngine(tokenizer, ends=("stop",), before=slow))


def test_an_error_behind_the_first_sign_of_life_is_an_event(tokenizer, monkeypatch):
    async def breaks(request):
        await asyncio.sleep(0.2)
        raise RuntimeError("no server can answer")

    monkeypatch.setattr(agent_proxy, "SIGN_OF_LIFE_S", 0.05)

    def agent(base_url, api_key, data):
        client = claude(base_url, api_key)
        with (
            pytest.raises(anthropic.APIStatusError, match="no server can answer"),
            client.messages.stream(model="policy", max_tokens=20, messages=data["messages"]) as stream,
        ):
            stream.get_final_message()

    assert run(agent, RecordingEngine(tokenizer, before=breaks)) is None


def test_what_an_agent_hangs_up_on_is_no_longer_generated(tokenizer):
    begun, ended = [], []

    async def endless(request):
        begun.append(request)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request)

    def agent(base_url, api_key, data):
        for streams in (False, True):
            before = len(begun)
            for timeout_s in growing_deadlines(0.2):
                client = of_openai(base_url, api_key).with_options(timeout=timeout_s)
                with pytest.raises(openai.APITimeoutError):
                    client.chat.completions.create(model="policy", messages=data["messages"], stream=streams)
                if len(begun) > before:
                    break
            wait_until(lambda: len(ended) == len(begun), streams)

    run(agent, RecordingEngine(tokenizer, before=endless))


def test_a_client_that_hangs_up_early_leaves_no_traceback(tokenizer, caplog):
    served = []

    async def slow(request):
        served.append(request)
        await asyncio.sleep(0.05)

    def agent(base_url, api_key, data):
        port = int(base_url.split(":")[2].split("/")[0])
        for path, stream in itertools.product(["chat/completions", "messages"], [False, True]):
            body = json.dumps({"messages": data["messages"], "stream": stream}).encode()
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\n".encode()
            whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
            long = head + b"Content-Length: 900000\r\n\r\n" + b" " * 300_000
            chunked = head + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"
            for sent, resets in itertools.product([head, whole[:-9], whole, long, chunked], [False, True]):
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.sendall(sent)
                    if resets:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client = of_openai(base_url, api_key)
        return float(len(client.chat.completions.create(model="policy", messages=data["messages"]).choices))

    (trajectory, *_) = run(agent, RecordingEngine(tokenizer, before=slow))
    assert trajectory.reward == 1.0 and not [record for record in caplog.records if record.exc_info], caplog.text


@pytest.fixture
def certificate(tmp_path):
    """Of 127.0.0.2, signed by itself."""
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.2", "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


def test_an_agent_of_another_host_has_its_address_and_a_certificate(tokenizer, certificate):
    given, key = certificate

    def agent(base_url, api_key, data):
        assert base_url.startswith("https://127.0.0.2:")
        body = json.dumps({"messages": data["messages"]}).encode()
        headers = {"Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(f"{base_url}/chat/completions", data=body, headers=headers)
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            urllib.request.urlopen(request)
        trusted = ssl.create_default_context(cafile=str(given))
        assert json.load(urllib.request.urlopen(request, context=trusted))["choices"]
        return 1.0

    proxy = {"host": "0.0.0.0", "name": "127.0.0.2", "certificate": str(given), "private_key": str(key)}
    assert len(run(agent, RecordingEngine(tokenizer), proxy=proxy)) == 1


def test_an_address_that_cannot_be_given_to_agents_is_refused():
    with pytest.raises(ValueError, match=r"host = '0\.0\.0\.0': every address of this host.*set name"):
        ProxyAddress(host="0.0.0.0")
    with pytest.raises(ValueError, match="certificate = '/no/file': there is no such file"):
        ProxyAddress(certificate="/no/file")
    assert ProxyAddress(host="::1").url(80) == "http://[::1]:80/v1"
    assert ipaddress.ip_address(ProxyAddress().host).is_loopback
