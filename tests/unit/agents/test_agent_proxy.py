"""An unmodified agent on OpenAI's client: every token that was served is recorded as it was, and trained once."""

import asyncio
import dataclasses
import json
import random
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megatron_rl.agents import AgentWorkflow
from megatron_rl.agents.agent_session import AgentSession, ProxyOptions
from megatron_rl.agents.agent_workers import AgentFailed
from megatron_rl.agents.tool_formats import tool_format
from megatron_rl.api import RequestRefused
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics, metrics_of
from megatron_rl.workflows.rendering import ChatTemplate
from tests.kit.optional import later
from tests.kit.replies import RecordingEngine, check_trajectory
from tests.kit.tokenizers import CHAT_TEMPLATE, make_tokenizer
from tests.unit.agent_relay import here

openai = later("openai", reason="the openai client is not installed: pip install openai")
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


def run(agent, engine, *, n_samples=1, reward=lambda **_: 0.0, max_tokens=400, **options):
    gconfig = GenerationConfig(n_samples=n_samples, max_new_tokens=40)
    workflow = AgentWorkflow(reward, gconfig, engine.tokenizer, max_tokens=max_tokens, **here(agent), **options)
    return asyncio.run(workflow.arun_episode(engine, {"messages": QUESTION, "sample_key": "k"}))


def client_of(base_url, api_key):
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def test_a_dialogue_through_the_client_is_recorded_token_by_token(tokenizer):
    def agent(base_url, api_key, data):
        client, messages = client_of(base_url, api_key), list(data["messages"])
        assert [model.id for model in client.models.list()] == ["policy"]
        for turn in range(4):
            answer = client.chat.completions.create(model="policy", messages=messages, temperature=0.3)
            # As agents do: the message object itself in one turn, a dict of role and content in another.
            message = answer.choices[0].message
            messages.append(message if turn % 2 else {"role": "assistant", "content": message.content})
            messages.append({"role": "user", "content": f"and {turn}?"})
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        return 2

    engine = RecordingEngine(tokenizer, seed=5)
    trajectories = run(agent, engine, n_samples=3)
    assert [t.reward for t in trajectories] == [2.0] * 3 and len(engine.served) == 12
    for trajectory in trajectories:
        assert len(check_trajectory(trajectory, engine.served)) == trajectory.sequence["turns"] == 4
    assert {req.gconfig.temperature for req, _ in engine.served} == {1.0}, "the run's, which the trainer computes with"


@pytest.mark.parametrize("seed", range(5))
def test_every_generated_token_is_trained_once_whatever_way_an_agent_takes(tokenizer, seed):
    def agent(base_url, api_key, data):
        """Walks at random: goes on, goes back, begins anew, in several threads."""
        client, lock, known = client_of(base_url, api_key), threading.Lock(), [list(data["messages"])]

        def walk(number):
            draw = random.Random(f"{seed} {number}")
            for turn in range(5):
                with lock:
                    messages = list(draw.choice(known))
                text = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{number} {turn}"}]
                with lock:
                    known.append(messages)

        threads = [threading.Thread(target=walk, args=[number]) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 1.0

    engine = RecordingEngine(tokenizer, seed=seed)
    trajectories = run(agent, engine, max_tokens=2000)
    assert len(engine.served) == 15
    prompts = [req.input_ids for req, _ in engine.served]
    for trajectory in trajectories:
        # It ends with a reply, to the very prompt that was served.
        ids = trajectory.input_ids.tolist()
        assert any(ids == req.input_ids + reply.output_tokens for req, reply in engine.served)
        assert ids[: len(min(prompts, key=len))] == min(prompts, key=len)
    trained = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
    assert trained == sum(reply.output_len for _, reply in engine.served)


def test_a_long_dialogue_keeps_its_tokens_once(tokenizer):
    async def talk():
        template = ChatTemplate(tokenizer)
        tools = tool_format("auto", tokenizer)
        options = ProxyOptions(
            tokenizer=tokenizer, gconfig=GenerationConfig(), max_tokens=10**6, template=template, tools=tools
        )
        session, messages = AgentSession(RecordingEngine(tokenizer, seed=1), options, "k"), list(QUESTION)
        for turn in range(20):
            answer = await session.complete({"messages": messages})
            messages += [answer.message, {"role": "user", "content": f"and {turn}?"}]
        return session

    session = asyncio.run(talk())
    (trajectory,) = session.trajectories(1.0)
    kept = {id(state.line.conversation): len(state.line.conversation) for (state,) in session._states.values()}
    assert trajectory.sequence["turns"] == 20 and sum(kept.values()) == len(trajectory.input_ids)


def test_tools_are_called_and_their_results_answered(tokenizer):
    call = '<tool_call>{"name": "add", "arguments": {"x": 12, "y": 30}}</tool_call>'
    script = lambda req: "42<eos>" if "forty-two" in tokenizer.decode(req.input_ids) else f"so {call}<eos>"  # noqa: E731
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]

    def agent(base_url, api_key, data):
        client, messages = client_of(base_url, api_key), list(data["messages"])
        first = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.content == "so"
        (asked,) = first.message.tool_calls
        assert json.loads(asked.function.arguments) == {"x": 12, "y": 30}
        messages += [first.message, {"role": "tool", "tool_call_id": asked.id, "content": "forty-two"}]
        last = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0]
        assert (last.finish_reason, last.message.content) == ("stop", "42")

    engine = RecordingEngine(tokenizer, script=script)
    (trajectory,) = run(agent, engine, reward=lambda completions, **_: float(completions))
    assert trajectory.reward == 42.0, "the reward function scores the last reply where the agent gives none"
    assert len(check_trajectory(trajectory, engine.served)) == 2
    assert tokenizer.decode(trajectory.input_ids[trajectory.loss_mask]) == f"so {call}<eos>42<eos>"
    assert tokenizer.decode(trajectory.input_ids).startswith('<|system|>[{"type"')


def test_streams_and_coroutines_are_served_in_parallel(tokenizer):
    async def agent(base_url, api_key, data):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

        async def one(number):
            messages = [{"role": "user", "content": f"count {number}"}]
            for _ in range(2):
                options = {"stream": True, "stream_options": {"include_usage": True}}
                events = await client.chat.completions.create(model="policy", messages=messages, **options)
                text, finish = "", None
                async for event in events:
                    for choice in event.choices:
                        text, finish = text + (choice.delta.content or ""), choice.finish_reason
                assert finish in ("stop", "length") and event.usage.completion_tokens > 0
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]

        await asyncio.gather(*map(one, range(4)))
        return 0.5

    engine = RecordingEngine(tokenizer, seed=3)
    trajectories = run(agent, engine)
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert len(check_trajectory(trajectory, engine.served)) == 2


def test_an_agent_has_the_key_of_its_own_session_only(tokenizer):
    keys = []

    def agent(base_url, api_key, data):
        assert base_url.startswith("http://127.0.0.1:") and "sample_key" not in data
        keys.append(api_key)
        with pytest.raises(openai.AuthenticationError):
            client_of(base_url, "guess").chat.completions.create(model="policy", messages=QUESTION)
        for path, data in (("/models", None), ("/chat/completions", b"{}")):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(base_url + path, data=data))

    assert run(agent, RecordingEngine(tokenizer), n_samples=2) is None, "who asked nothing has no trajectory"
    assert len(set(keys)) == 2 and min(map(len, keys)) >= 32


UNSUPPORTED = [
    ({"n": 2}, "n = 2: is not supported; leave it out"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice = "),
    ({"messages": []}, r"messages = \[\]: must be a list"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text alone"),
    ({"messages": [{"role": "user", "content": "x " * 500}]}, "the context is 400"),
    ({"max_tokens": -1}, "max_tokens = -1"),
]
"""Fields and message of each refusal."""


def test_what_is_not_supported_is_refused_with_the_reason(tokenizer):
    told = []

    def agent(base_url, api_key, data):
        client = client_of(base_url, api_key)
        for fields, message in UNSUPPORTED:
            with pytest.raises(openai.BadRequestError, match=message):
                client.chat.completions.create(**({"model": "policy", "messages": QUESTION} | fields))
            told.append(message)

    assert run(agent, RecordingEngine(tokenizer)) is None
    assert len(told) == len(UNSUPPORTED)


CALL = {"id": "1", "function": {"name": "add", "arguments": "{}"}}


def asked(**fields):
    return {"messages": QUESTION} | fields


def said(**fields):
    return asked(messages=[{"role": "user", "content": "12"} | fields])


MALFORMED = [
    (b"no JSON", None, "Expecting value"),
    (b'{"messages": "\xff"}', None, "can't decode byte 0xff"),
    (b"[" * 100_000, None, "recursion"),
    ([], None, "the body is a JSON list: must be an object"),
    (None, None, "the body is a JSON NoneType: must be an object"),
    ({}, "messages", "messages = None: must be a list of one message or more"),
    (asked(messages={"role": "user"}), "messages", "must be a list"),
    (asked(messages=[*QUESTION, 5]), "messages[1]", "messages[1] = 5: must be an object with a role and content"),
    (said(role=None), "messages[0].role", "must be text"),
    (said(content=5), "messages[0].content", "messages[0].content = 5: must be text or a list of parts"),
    (said(content={"text": "12"}), "messages[0].content", "must be text"),
    (said(content=[{"text": 5}]), "messages[0].content", "must be text"),
    (said(name=5), "messages[0].name", "must be text"),
    (said(tool_call_id=["1"]), "messages[0].tool_call_id", "must be text"),
    (said(tool_calls=5), "messages[0].tool_calls", "must be a list"),
    (said(tool_calls=[CALL, 5]), "messages[0].tool_calls[1]", "must have an id and a function"),
    (said(tool_calls=[CALL | {"id": 5}]), "messages[0].tool_calls[0]", "must have an id and a function"),
    (said(tool_calls=[CALL | {"function": "add"}]), "messages[0].tool_calls[0]", "must have an id and a function"),
    (
        said(tool_calls=[CALL | {"function": {"name": "add", "arguments": "[1"}}]),
        "messages[0].tool_calls[0].function.arguments",
        "must be the text of a JSON object",
    ),
    (asked(model=5), "model", "must be text"),
    (asked(max_tokens="many"), "max_tokens", "max_tokens = 'many': must be a whole number of at least 1"),
    (asked(max_tokens=0), "max_tokens", "max_tokens = 0: must be"),
    (asked(max_tokens=True), "max_tokens", "max_tokens = True: must be"),
    (asked(max_completion_tokens=2.5), "max_completion_tokens", "max_completion_tokens = 2.5: must be"),
    (asked(temperature="hot"), "temperature", "temperature = 'hot': must be a number"),
    (asked(top_p=[1]), "top_p", "must be a number"),
    (asked(n="2"), "n", "n = '2': is not supported"),
    (asked(stop=5), "stop", "stop = 5: must be text, or a list of texts"),
    (asked(stop=["a", None]), "stop", "must be text, or a list of texts"),
    (asked(stream="yes"), "stream", "must be true or false"),
    (asked(stream=True, stream_options=[1]), "stream_options", "must be an object"),
    (asked(logprobs=5), "logprobs", "must be true or false"),
    (asked(tools=5), "tools", "must be a list of objects, each with a function that has a name"),
    (asked(tools=[{"function": {"name": None}}]), "tools", "must be a list of objects"),
    (asked(response_format="json"), "response_format", "is not supported"),
    (asked(tool_choice={"type": "function"}), "tool_choice", "is not supported"),
]
"""Body, field and message of each refusal."""


def test_a_malformed_request_is_refused_by_the_name_of_its_field_and_the_agent_goes_on(tokenizer):
    def agent(base_url, api_key, data):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json; charset=odd"}
        for body, field, message in MALFORMED:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            request = urllib.request.Request(f"{base_url}/chat/completions", data=content, headers=headers)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            error = json.load(refused.value)["error"]
            assert refused.value.code == 400 and error["type"] == "invalid_request_error", (message, error)
            assert error["param"] == field and message in error["message"] and len(error["message"]) < 300, error
        client_of(base_url, api_key).chat.completions.create(model="policy", messages=data["messages"])
        return 1.0

    engine = RecordingEngine(tokenizer)
    (trajectory,) = run(agent, engine)
    assert len(check_trajectory(trajectory, engine.served)) == len(engine.served) == 1
    assert trajectory.reward == 1.0


def test_fields_that_are_null_are_as_good_as_none(tokenizer):
    def agent(base_url, api_key, data):
        client, nothing = client_of(base_url, api_key), dict.fromkeys(["max_tokens", "stop", "n", "tools", "stream"])
        return len(client.chat.completions.create(model="policy", messages=QUESTION, extra_body=nothing).choices)

    assert run(agent, RecordingEngine(tokenizer))[0].reward == 1.0


def test_half_of_a_surrogate_pair_in_a_message_is_served_with_a_mark_in_its_place(tokenizer):
    def agent(base_url, api_key, data):
        body = b'{"messages": [{"role": "user", "content": "\\ud800 12"}]}'
        headers = {"Authorization": f"Bearer {api_key}"}
        urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", data=body, headers=headers))

    engine = RecordingEngine(tokenizer)
    run(agent, engine)
    assert "? 12" in tokenizer.decode(engine.served[0][0].input_ids)


def test_tools_that_the_chat_template_cannot_show_are_refused(tokenizer):
    def agent(base_url, api_key, data):
        with pytest.raises(openai.BadRequestError, match="chat template refuses"):
            client_of(base_url, api_key).chat.completions.create(model="policy", messages=QUESTION, tools=tools)

    tools = [{"type": "function", "function": {"name": "add", "parameters": 5}}]
    strict = make_tokenizer("{% for key in tools[0]['function']['parameters'] %}{% endfor %}" + CHAT_TEMPLATE)
    run(agent, RecordingEngine(strict))


def test_an_agent_that_fails_fails_the_episode(tokenizer):
    def failing(base_url, api_key, data):
        raise KeyError("bug")

    with pytest.raises(AgentFailed, match="KeyError: 'bug'"):
        run(failing, RecordingEngine(tokenizer))
    with pytest.raises(ValueError, match="returned nan; must be a finite number"):
        run(lambda *_: float("nan"), RecordingEngine(tokenizer))


def test_log_probabilities_are_given_to_agents_that_ask(tokenizer):
    def agent(base_url, api_key, data):
        client = client_of(base_url, api_key)
        choice = client.chat.completions.create(model="policy", messages=QUESTION, logprobs=True).choices[0]
        given.extend(entry.logprob for entry in choice.logprobs.content)
        return 0

    given = []
    engine = RecordingEngine(tokenizer)
    run(agent, engine)
    assert given == engine.served[0][1].output_logprobs


def test_the_agent_of_the_documentation_is_trained_on_both_tries(tokenizer):
    page = (Path(__file__).parents[3] / "docs" / "workflows.md").read_text(encoding="utf-8")
    (code,) = (part for part in page.split("```python\n")[1:] if "def solve(" in part)
    names = {}
    exec(code.split("```")[0], names)
    replies = iter(["41<eos>", "42<eos>"])
    engine = RecordingEngine(tokenizer, script=lambda _: next(replies))
    workflow = AgentWorkflow(
        lambda **_: 0.0, GenerationConfig(max_new_tokens=8), tokenizer, max_tokens=400, **here(names["solve"])
    )
    (trajectory,) = asyncio.run(workflow.arun_episode(engine, {"messages": QUESTION, "answer": "42"}))
    assert trajectory.reward == 1.0 and len(check_trajectory(trajectory, engine.served)) == 2


def in_an_executor(workflow, engine, **config):
    """One episode as the executor runs it: what it gave and how many tries it took, or its error."""

    async def main():
        metrics = RolloutMetrics()
        executor = RolloutExecutor(engine, RolloutConfig(**config), metrics)
        try:
            return await executor.rollout_batch([{"messages": QUESTION}], workflow), metrics_of([metrics.take()])
        except RuntimeError as error:
            return error.__cause__, metrics_of([metrics.take()])

    return asyncio.run(main())


class Counting(RecordingEngine):
    def get_version(self):
        return 0


def workflow_of(agent, tokenizer, n_samples=1, max_tokens=150, **options):
    gconfig = GenerationConfig(n_samples=n_samples, max_new_tokens=40)
    return AgentWorkflow(lambda **_: 0.25, gconfig, tokenizer, max_tokens=max_tokens, **here(agent), **options)


def test_an_agent_that_outgrows_its_context_is_scored_as_it_stands_and_costs_its_group_nothing(tokenizer):
    codes, started = [], []

    def agent(base_url, api_key, data):
        client, messages = client_of(base_url, api_key), list(data["messages"])
        started.append(api_key)
        number = len(started)
        try:
            for _ in range(50 if number == 2 else 2):
                reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
                messages += [reply, {"role": "user", "content": "and what is the half of that?"}]
        except openai.BadRequestError as error:
            codes.append(error.code)
            raise
        return 1.0

    engine = Counting(tokenizer, seed=2, ends=("stop",))
    batch, metrics = in_an_executor(workflow_of(agent, tokenizer, n_samples=4), engine)
    assert sorted(batch["rewards"].tolist()) == [0.25, 1.0, 1.0, 1.0] and codes == ["context_length_exceeded"]
    assert len(started) == 4 and metrics["rollout/episodes_retried"] == 0
    assert batch["turns"].sum() == len(engine.served) and max(batch.lengths.tolist()) <= 150


def test_a_prompt_without_room_is_a_dead_letter_at_once(tokenizer):
    started = []

    def agent(base_url, api_key, data):
        started.append(api_key)
        messages = [{"role": "user", "content": "x " * 500}]
        client_of(base_url, api_key).chat.completions.create(model="policy", messages=messages)

    error, metrics = in_an_executor(workflow_of(agent, tokenizer), Counting(tokenizer))
    assert isinstance(error, RequestRefused) and "the context is 150" in str(error)
    assert len(started) == 1 and metrics["rollout/episodes_retried"] == 0


def test_only_the_agent_that_failed_runs_again_with_the_replies_that_it_had(tokenizer):
    started = []

    def agent(base_url, api_key, data):
        client, messages = client_of(base_url, api_key), list(data["messages"])
        started.append(api_key)
        number = len(started)
        for _ in range(2):
            reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages += [reply, {"role": "user", "content": "go on"}]
        if number == 1:
            raise OSError("its own database is down")
        return 1.0

    engine = Counting(tokenizer, seed=4)
    batch, metrics = in_an_executor(workflow_of(agent, tokenizer, n_samples=3, max_tokens=400), engine)
    assert len(batch) == 3 and len(started) == 4 and metrics["rollout/episodes_retried"] == 1
    assert len(engine.served) == 6, "nothing is generated twice"


def test_long_messages_are_tokenised_beside_the_event_loop_and_longer_than_any_context_not_at_all(tokenizer):
    here, threads, codes = threading.current_thread(), [], []

    class Watched(ChatTemplate):
        def opening(self, data):
            threads.append(threading.current_thread() is here)
            return super().opening(data)

    def agent(base_url, api_key, data):
        client = client_of(base_url, api_key)
        for text in ("12", "12 + 30 " * 5000, "x" * 2_000_000, "x" * 3_000_000):
            try:
                client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
            except openai.BadRequestError as error:
                codes.append(error.code)

    workflow = workflow_of(agent, tokenizer, max_tokens=20_000)
    workflow.options = dataclasses.replace(workflow.options, template=Watched(tokenizer))
    assert workflow.options.longest_token < 100
    asyncio.run(workflow.arun_episode(RecordingEngine(tokenizer), {"messages": QUESTION}))
    assert threads == [True, False] and codes == ["context_length_exceeded"] * 2
