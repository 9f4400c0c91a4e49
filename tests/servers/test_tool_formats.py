"""Each family's calls are read as SGLang's parser of that family reads them, and no text holds the reader for long."""

import json
import os
import random
import subprocess
import sys
import time

import pytest

from megatron_rl.agents.tool_formats import FORMATS, text_arguments, tool_format
from megatron_rl.servers.server_process import SGLANG_CPU, SGLANG_CPU_PACKAGES
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S, SLOWNESS

PEER = """
import json, sys
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
for kind, tools, text in json.load(sys.stdin):
    parser = lambda: FunctionCallParser([Tool(**tool) for tool in tools], kind)
    said, calls = parser().parse_non_stream(text)
    streamed, stream = {}, parser()
    for letter in text:
        for call in stream.parse_stream_chunk(letter)[1]:
            entry = streamed.setdefault(call.tool_index, [None, ""])
            entry[0], entry[1] = call.name or entry[0], entry[1] + (call.parameters or "")
    print(json.dumps([said, [[call.name, json.loads(call.parameters)] for call in calls], list(streamed.values())]))
"""
PROPERTIES = {
    "count": {"type": "integer"},
    "text": {"type": "string"},
    "whole": {"type": "boolean"},
    "names": {"type": "array", "items": {"type": "string"}},
    "more": {"type": "object"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("add", "look_up")
]


def as_written(value):
    return value if isinstance(value, str) else json.dumps(value)


def hermes(calls):
    return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def qwen3_coder(calls):
    def one(name, arguments):
        inner = "".join(f"<parameter={k}>\n{as_written(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm(calls):
    def one(name, arguments):
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{as_written(v)}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def llama(calls):
    return "<|python_tag|>" + "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def mistral(calls):
    return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls])


def mistral_compact(calls):
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)


WAYS = {  # ours, SGLang's name of it, how a model writes it
    "hermes": ("hermes", "qwen25", hermes),
    "qwen3_coder": ("qwen3_coder", "qwen3_coder", qwen3_coder),
    "glm": ("glm", "glm45", glm),
    "llama": ("llama", "llama3", llama),
    "mistral": ("mistral", "mistral", mistral),
    "mistral, compact": ("mistral", "mistral", mistral_compact),
}


def some_calls(draw):
    values = {
        "count": lambda: draw.randint(-9, 10**6),
        # Not the text true: of GLM's calls SGLang's parser makes it True.
        "text": lambda: draw.choice(["12", "[1]", "two\nlines", 'a "quoted" word', "x < 3; {y}", "é 漢", ""]),
        "whole": lambda: draw.random() < 0.5,
        "names": lambda: draw.sample(["a", "b c", "12"], draw.randrange(3)),
        "more": lambda: {"deep": {"n": draw.randrange(9)}},
    }
    chosen = lambda: draw.sample(sorted(values), draw.randrange(1, 5))  # noqa: E731
    return [
        (draw.choice(["add", "look_up"]), {key: values[key]() for key in chosen()}) for _ in range(draw.randint(1, 3))
    ]


def some_replies():
    """(our format, SGLang's name of it, words before the calls, the whole text, its calls)."""
    draw = random.Random(7)
    for ours, theirs, write in WAYS.values():
        for _ in range(25):
            calls = some_calls(draw)
            said = "" if ours == "llama" else draw.choice(["", "I look. "])
            yield ours, theirs, said, said + write(calls), calls


def test_calls_are_read_as_they_were_written():
    for ours, _, said, text, calls in some_replies():
        kept, found = FORMATS[ours].split(text, text_arguments(TOOLS))
        assert [(call.name, call.arguments) for call in found] == calls, text
        assert kept.strip() == said.strip(), text


LONE = "SGLang ends a value at the first tag of the form in it"
QUOTED = "SGLang takes a text for the value that it would be as JSON, where the schema takes text alone"
WHOLE = {  # (way of writing, text in the call) -> why SGLang reads a whole reply otherwise than we do
    ("qwen3_coder", "</parameter> x"): LONE,
    ("qwen3_coder", "</tool_call> so"): LONE,
    ("glm", "a</arg_value> b"): LONE,
    ("glm", "</tool_call> so"): LONE,
    ("mistral, compact", "[TOOL_CALLS] ["): "SGLang takes a text in the arguments for the beginning of a list of calls",
    ("qwen3_coder", "null"): QUOTED,
    **{("glm", text): QUOTED for text in ("true", "null", '"quoted"', "1e3")},
}
STREAMED = {  # the same of a reply that comes in pieces
    ("qwen3_coder", "</parameter> x"): LONE,
    ("qwen3_coder", "null"): QUOTED,
    ("glm", "a</arg_value> b"): LONE,
    ("glm", "</tool_call> so"): LONE,
    ("mistral", ANY := "any"): "of several calls in a list SGLang streams the first",
}
DROPS_TEXT = ("hermes", "qwen3_coder", "glm")
"""SGLang drops what is said after the calls; we keep it, as for the other forms it does."""
SPECIAL_TEXTS = ["12", "true", "null", "[1]", '{"a": 1}', '"quoted"', "1e3", "</parameter> x", "a</arg_value> b"]
SPECIAL_TEXTS += ["</tool_call> so", "[TOOL_CALLS] [", "[ARGS]", "back\\slash", "<|python_tag|>"]


def strange_replies():
    """(way, text in the call, the whole text, its calls, words behind them)"""
    draw = random.Random(11)
    for way, (_, _, write) in WAYS.items():
        for text in SPECIAL_TEXTS:
            for after in ("", " and so on"):
                calls = [("add", {"text": text, "count": draw.randrange(99)}), ("look_up", {"whole": True})]
                yield way, text, write(calls) + after, calls, after


@pytest.mark.parametrize("way", WAYS)
def test_a_call_whose_text_looks_like_something_else_is_read_as_it_was_written(way):
    for _, _, text, calls, after in (reply for reply in strange_replies() if reply[0] == way):
        kept, found = FORMATS[WAYS[way][0]].split(text, text_arguments(TOOLS))
        assert [(call.name, call.arguments) for call in found] == calls and not any(c.fault for c in found), text
        assert kept == after.strip()


@pytest.mark.slow
@pytest.mark.thorough  # the tests before this one read the same texts; this one imports SGLang for ten seconds
def test_calls_are_read_as_sglang_reads_them_whole_and_cut_at_each_character(needs_sglang):
    cases = [(way, text, reply, after) for way, text, reply, _, after in strange_replies()]
    ways = {theirs: way for way, (_, theirs, _) in WAYS.items() if way != "mistral, compact"}
    for _, theirs, _, reply, _ in some_replies():
        cases.append(("mistral, compact" if "][ARGS]" in reply or "[ARGS]{" in reply else ways[theirs], "", reply, ""))
    asked = json.dumps([(WAYS[way][1], TOOLS, reply) for way, _, reply, _ in cases])
    path = os.pathsep.join([str(SGLANG_CPU), str(SGLANG_CPU_PACKAGES)])
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", PEER], input=asked, env=env, capture_output=True, text=True, timeout=LATE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for (way, value, reply, after), (said, whole, streamed) in zip(cases, read, strict=True):
        form = WAYS[way][0]
        kept, found = FORMATS[form].split(reply, text_arguments(TOOLS))
        ours = [[call.name, call.arguments] for call in found]
        assert whole == ours or (way, value) in WHOLE, (way, reply)
        pieces = [[name, arguments] for name, arguments in streamed]
        as_told = [[name, json.loads(arguments)] for name, arguments in pieces if is_json(arguments)]
        assert as_told == ours or {(way, value), (way, ANY)} & STREAMED.keys(), (way, reply)
        if (way, value) not in WHOLE:
            assert said.strip() == ("" if after and form in DROPS_TEXT else kept), (way, reply)


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>{</tool_call>"),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>"),
        ("qwen3_coder", "<tool_call>add</tool_call>"),
        ("glm", "<tool_call>\n<arg_key>x</arg_key></tool_call>"),
        ("llama", '<|python_tag|>{"name": 5}'),
        ("mistral", "[TOOL_CALLS] no JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{"),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": 5}]'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"count": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}} and so on</tool_call>'),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1<parameter=b>2</parameter></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></tool_call>"),
        ("qwen3_coder", "<tool_call><function=add><parameter=>1</parameter></function></tool_call>"),
        (
            "qwen3_coder",
            "<tool_call><function=add><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        ),
        (
            "glm",
            "<tool_call>add<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        ),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</tool_call>"),
        ("glm", '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
        ("llama", "<|python_tag|>add.call()"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"count": 1e999}'),
    ],
)
def test_a_call_that_cannot_be_read_has_its_fault(form, text):
    _, calls = FORMATS[form].split(text, {})
    assert any(call.fault for call in calls)


@pytest.mark.parametrize("text", ["42", "so", "[1, 2]", '{"x": 1}', '{"name": "add"', "a <tool_call> b"])
@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_without_a_call_is_left_as_it_is(form, text):
    assert FORMATS[form].split(text, {}) == (text, [])


@pytest.mark.parametrize(
    "text",
    ['{"name": "x", "parameters": {}}', '{"name": "add"}', '{"name": "add", "count": 1}', '[{"name": "add"}]'],
)
def test_an_answer_in_json_that_has_a_name_is_no_call(text):
    assert FORMATS["llama"].split(text, text_arguments(TOOLS)) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "names", "kept"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}, {"name": "b"}</tool_call> so', ["a", "b"], "so"),
        ("hermes", '<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>', ["a", "b"], ""),
        ("hermes", '<tool_call>{"name": "a"}<tool_call>{"name": "b"}', ["a", "b"], ""),
        ("qwen3_coder", "<tool_call><function=a></function><function=b></function></tool_call> so", ["a", "b"], "so"),
        ("glm", "<tool_call>a</tool_call> and <tool_call>b\n</tool_call> so", ["a", "b"], "and  so"),
        ("llama", '{"name": "add", "parameters": {}}, {"name": "add", "parameters": {}} so', ["add", "add"], "so"),
        ("mistral", "[TOOL_CALLS]a[ARGS]{}, b[ARGS]{} so", ["a", "b"], "so"),
        ("mistral", '[TOOL_CALLS] [{"name": "a"}, {"name": "b"}] so', ["a", "b"], "so"),
    ],
)
def test_several_calls_in_a_block_and_text_behind_them_are_all_read(form, text, names, kept):
    found, calls = FORMATS[form].split(text, text_arguments(TOOLS))
    assert ([call.name for call in calls], found) == (names, kept) and not any(call.fault for call in calls)


UNITS = ["<tool_call>", "<tool_call></tool_call>", "<function=", "<parameter=", "<function=f>", "<parameter=a>", ">"]
UNITS += ["<arg_key>", "</arg_key><arg_value>", "[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]f[ARGS]", "<|python_tag|>"]
UNITS += ["1 ", "{", "[", ";", " ", '{"a":', '{"name": "f"};', "</function>", "</parameter>"]
LENGTH, MOST_S = 50_000, 1.0 * SLOWNESS
"""Seconds that it computes: what grows faster than the text would take minutes."""


@pytest.mark.parametrize("form", FORMATS)
def test_no_text_holds_its_reader_for_long(form):
    for begin in (
        "",
        "<tool_call>",
        "<tool_call><function=f>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f[ARGS]",
    ):
        for unit in UNITS:
            for end in ("", "</function></tool_call>"):
                text, start_s = begin + unit * (LENGTH // len(unit)) + end, time.thread_time()
                FORMATS[form].split(text, {})
                assert time.thread_time() - start_s < MOST_S, (begin, unit, end)


SIGNS = {
    "hermes": '{"name": <function-name>, "arguments": <args-json-object>}',
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=value>",
    "glm": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>",
    "llama": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
}


def test_the_format_is_the_chat_templates():
    tokenizer = make_tokenizer()
    for name, sign in SIGNS.items():
        tokenizer.chat_template = f"{{{{ messages }}}} {sign}"
        assert tool_format("auto", tokenizer) is FORMATS[name]
        assert tool_format("hermes", tokenizer) is FORMATS["hermes"], "what the config names comes first"
    tokenizer.chat_template = "{{ messages }}"
    assert tool_format("auto", tokenizer) is FORMATS["hermes"]
    with pytest.raises(ValueError, match="tool_format = 'yaml': must be auto or one of hermes, qwen3_coder"):
        tool_format("yaml", tokenizer)


@pytest.mark.parametrize("is_special", [False, True])
def test_marks_of_a_form_are_read_where_decoding_would_leave_them_out(is_special):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["[TOOL_CALLS]", "[ARGS]"], special_tokens=is_special)
    tokens = tokenizer('so [TOOL_CALLS]add[ARGS]{"x": 1}<eos>', add_special_tokens=False)["input_ids"]
    form = FORMATS["mistral"]
    said, (call,) = form.split(form.text(tokenizer, tokens), {})
    assert (said, call.name, call.arguments) == ("so", "add", {"x": 1})
