"""Dialogues of every family's manner in tokens: what transformers renders, or an error that names what is wrong."""

from __future__ import annotations

import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.workflows.rendering import ChatTemplate, PlainText, form_of, prompt_ids, with_replies
from tests.kit.chat_zoo import KINDS, ZOO, make_tokenizer
from tests.kit.examples import max_examples

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call00007", "type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}
ASKED = [{"role": "user", "content": "What is 12 + 30?"}]
tokenizer_of = functools.cache(lambda name, kind="byte BPE", adds=(): make_tokenizer(ZOO[name], kind, adds=adds))
FAMILIES = pytest.mark.parametrize("family", ZOO)


def rendered(tokenizer, messages, *, opens, tools=None, **arguments):
    options = {"tokenize": True, "return_dict": False, "add_generation_prompt": opens}
    return list(tokenizer.apply_chat_template(messages, tools=tools, **options, **arguments))


def has(family, feature):
    return feature not in ZOO[family].lacks


@FAMILIES
@pytest.mark.parametrize("said", ["The answer is 42.", "Two\n\nlines, and é."])
def test_reply_ends_as_the_template_ends_a_turn(family, said):
    tokenizer = tokenizer_of(family)
    if not has(family, "reply"):
        with pytest.raises(ValueError, match=r"the chat template ends the prompt with '<think>\\n'"):
            with_replies(tokenizer, {"messages": ASKED}, [said])
        return
    prompt, reply = with_replies(tokenizer, {"messages": ASKED}, [said])
    assert prompt == rendered(tokenizer, ASKED, opens=True, enable_thinking=False)
    whole = rendered(tokenizer, [*ASKED, {"role": "assistant", "content": said}], opens=False, enable_thinking=False)
    assert tokenizer.decode(reply).strip().endswith(said + ZOO[family].end), "the turn's end, and nothing behind it"
    closed = reply if ZOO[family].end != "<eos>" or whole[-1] == reply[-1] else reply[:-1]
    assert whole[: len(prompt) + len(closed)] == prompt + closed


@FAMILIES
def test_thought_is_trained_or_the_row_is_refused(family):
    tokenizer = tokenizer_of(family)
    for reply in (
        {"role": "assistant", "content": "The answer is 42.", "reasoning_content": "carry one"},
        {"role": "assistant", "content": "<think>\ncarry one\n</think>\n\nThe answer is 42."},
    ):
        try:
            prompt, ids = with_replies(tokenizer, {"messages": ASKED}, [reply])
        except ValueError as error:
            assert re.search("does not show|ends the prompt with", str(error))
            assert "reasoning_content" not in reply or not has(family, "thought")
            continue
        text = tokenizer.decode(ids)
        assert "carry one" in text and "The answer is 42." in text and tokenizer.decode(prompt).count("think>") == 0


@FAMILIES
def test_calls_of_a_reply_are_trained(family):
    tokenizer = tokenizer_of(family)
    reply = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    if not has(family, "tool"):
        with pytest.raises(ValueError, match=r"tool_calls\[0\]: the chat template .* does not show it"):
            with_replies(tokenizer, {"messages": ASKED, "tools": [TOOL]}, [reply])
        return
    prompt, ids = with_replies(tokenizer, {"messages": ASKED, "tools": [TOOL]}, [reply])
    assert "Adds." in tokenizer.decode(prompt)
    text = tokenizer.decode(ids)
    assert "add" in text and "12" in text and "30" in text
    assert text.endswith(ZOO[family].end) or text.endswith("<|call|>")


@FAMILIES
def test_result_is_shown_behind_a_reply_or_refused_by_its_role(family):
    tokenizer = tokenizer_of(family)
    template, result = ChatTemplate(tokenizer), {"role": "tool", "name": "add", "content": "42 it is"}
    if not has(family, "tool"):
        with pytest.raises(ValueError, match="message of the role tool|roles user assistant tool"):
            template.following([result], [])
        return
    history = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    _, call = with_replies(tokenizer, {"messages": ASKED}, [history[-1]])
    answer = result | {"tool_call_id": "call00007"}
    added = template.following([answer], call, [CALL])
    whole = rendered(tokenizer, [*history, answer], opens=True, enable_thinking=False)
    assert "42 it is" in tokenizer.decode(added)
    joined = rendered(tokenizer, ASKED, opens=True, enable_thinking=False) + call + added
    # Some templates write no end of a turn, and no empty thought in front of a reply that is not the last.
    first, second = (re.sub(r"<think>\s*</think>|<eos>|\s", "", tokenizer.decode(ids)) for ids in (joined, whole))
    assert first == second


@FAMILIES
def test_developer_is_the_system_where_a_template_knows_no_other(family):
    tokenizer = tokenizer_of(family)
    messages = [{"role": "developer", "content": "Be brief."}, *ASKED]
    if not has(family, "system"):
        with pytest.raises(ValueError, match="refuses messages of the roles"):
            prompt_ids(tokenizer, {"messages": messages})
    else:
        assert "Be brief." in tokenizer.decode(prompt_ids(tokenizer, {"messages": messages}))


words = st.sampled_from(
    ["42", "The answer is 42.", " two  spaces ", "a\n\nb", "naïve", "x</tool_call>", "[1, 2]", "é\t"]
)
calls = st.lists(st.just(CALL), min_size=1, max_size=2)
asked = st.builds(lambda text: {"role": "user", "content": text}, words)
answers = st.one_of(
    st.builds(lambda text: {"role": "assistant", "content": text}, words),
    st.builds(lambda text, why: {"role": "assistant", "content": text, "reasoning_content": why}, words, words),
    st.builds(
        lambda text, made: {"role": "assistant", "content": text, "tool_calls": made}, words | st.just(""), calls
    ),
)


@st.composite
def dialogues(draw):
    found = draw(
        st.lists(st.builds(lambda text, role: {"role": role, "content": text}, words, st.just("system")), max_size=1)
    )
    for _ in range(draw(st.integers(1, 3))):
        found += [draw(asked), answer := draw(answers)]
        for call in answer.get("tool_calls", ()):
            found.append({"role": "tool", "tool_call_id": call["id"], "name": "add", "content": draw(words)})
        if found[-1]["role"] == "tool":
            found.append(draw(answers))
    while found[-1]["role"] != "assistant":
        found.pop()
    return found


@settings(max_examples=max_examples(60, 600), deadline=None)
@given(st.sampled_from(sorted(ZOO)), st.sampled_from(KINDS), dialogues(), st.booleans())
def test_dialogue_is_what_transformers_renders_or_is_refused(family, kind, dialogue, has_tools):
    tokenizer = tokenizer_of(family, kind)
    *before, last = dialogue
    row = {"messages": before} | ({"tools": [TOOL]} if has_tools else {})
    try:
        prompt, reply = with_replies(tokenizer, row, [last])
    except ValueError:
        return
    tools, ways = row.get("tools"), []
    for thinks in (False, True):
        arguments = {"tools": tools, "enable_thinking": thinks}
        ways.append(
            (
                rendered(tokenizer, before, opens=True, **arguments),
                rendered(tokenizer, dialogue, opens=False, **arguments),
            )
        )
    for asked_ids, whole in ways:
        behind = whole[len(prompt) :]
        same = next(
            (n for n, (a, b) in enumerate(zip(reply, behind, strict=False)) if a != b), min(len(reply), len(behind))
        )
        rest = [*reply[same:], *behind[same:]]
        # What differs is the end of the turn: an EOS that the template leaves out, or what it writes behind the end.
        ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
        if prompt == asked_ids and all(token in ends or not tokenizer.decode([token]).strip() for token in rest):
            return
    pytest.fail(f"{family}, {kind}: {tokenizer.decode(prompt)!r} and {tokenizer.decode(reply)!r} for {dialogue}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adds", [(), ("bos",), ("bos", "eos")])
def test_text_and_its_reply_are_one_text_with_one_beginning(kind, adds):
    tokenizer = tokenizer_of("gemma", kind, adds)
    row = {"prompt": "What is 12 + 30? The answer"}
    try:
        prompt, reply = with_replies(tokenizer, row, [" is 42."])
    except ValueError as error:
        assert "the tokenizer joins the prompt's end" in str(error)
        return
    whole = tokenizer("What is 12 + 30? The answer is 42.", add_special_tokens=False)["input_ids"]
    front = [tokenizer.bos_token_id] if "bos" in adds else []
    assert prompt + reply == [*front, *whole, tokenizer.eos_token_id]
    assert prompt_ids(tokenizer, {"prompt": "<bos>What is 12"}).count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in prompt_ids(tokenizer, row)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "words"])
def test_text_behind_a_reply_begins_as_it_does_inside_a_text(kind):
    tokenizer = tokenizer_of("gemma", kind)
    following = PlainText(tokenizer).following([{"role": "user", "content": "quick fox"}], [])
    assert tokenizer.decode([*tokenizer("lazy.", add_special_tokens=False)["input_ids"], *following]).endswith(
        "lazy.quick fox"
    )


def test_reply_that_its_tokenizer_joins_to_the_prompt_is_refused():
    tokenizer = tokenizer_of("gemma")
    with pytest.raises(ValueError, match="joins the prompt's end to the reply's beginning.* move the space"):
        with_replies(tokenizer, {"prompt": "The quick "}, ["brown fox"])


def test_arrow_fields_without_a_value_are_no_fields():
    tokenizer = tokenizer_of("qwen3")
    call = {"type": "function", "id": None, "function": {"name": "add", "arguments": {"a": 12, "c": None}}}
    messages = [
        {"role": "user", "content": "What?", "tool_calls": None, "reasoning_content": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None},
        {"role": "tool", "content": [{"type": "text", "text": "42", "image": None}], "tool_calls": None},
    ]
    clean = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 12}}}]},
        {"role": "tool", "content": "42"},
    ]
    tool = TOOL | {"strict": None, "function": TOOL["function"] | {"strict": None}}
    expected = rendered(tokenizer, clean, opens=True, tools=[TOOL], enable_thinking=False)
    assert prompt_ids(tokenizer, {"messages": messages, "tools": [tool]}) == expected


def test_arguments_that_are_text_are_the_object_they_hold():
    tokenizer = tokenizer_of("qwen2.5")
    as_text = CALL | {"function": CALL["function"] | {"arguments": '{"a": 12, "b": 30}'}}
    texts, objects = (
        with_replies(tokenizer, {"messages": ASKED}, [{"role": "assistant", "content": "", "tool_calls": [call]}])
        for call in (as_text, CALL)
    )
    assert texts == objects


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, r"messages = \[\]: must be a list of one message or more"),
        ({"messages": "hi"}, "messages = 'hi': must be a list"),
        ({"messages": [{"role": "user", "content": float("nan")}]}, r"messages\[0\].content = nan: must be text"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, r"messages\[0\].content = {'a': 1}: must be text"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] = .*: must be an object with a role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
            r"messages\[0\].content\[0\] = .*image.*: must be text.* leave other parts out",
        ),
        ({"messages": [{"role": "user", "content": "a", "images": ["b"]}]}, r"messages\[0\].images: is no text"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}]},
            r"messages\[0\].tool_calls\[0\] = .*: must have a function with a name",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "not JSON"}}]}
                ]
            },
            r"messages\[0\].tool_calls\[0\].function.arguments = 'not JSON': must be an object",
        ),
        ({"messages": ASKED, "tools": ["add"]}, r"tools = \['add'\]: entry 0 must be an object with a function"),
        ({"messages": ASKED, "tools": "{"}, "tools = '{': is no JSON"),
        (
            {"messages": ASKED, "chat_template_kwargs": {"enable_thinkng": 1}},
            "chat_template_kwargs.enable_thinkng = 1: ",
        ),
        (
            {"messages": ASKED, "chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs = .*: must be an object",
        ),
        ({"prompt": 5}, "prompt = 5: must be text"),
    ],
)
def test_what_cannot_be_rendered_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        prompt_ids(tokenizer_of("qwen3"), row)


def test_template_arguments_are_the_runs_and_a_rows_own_win():
    tokenizer = make_tokenizer(ZOO["qwen3"])
    tokenizer.init_kwargs["template_args"] = {"enable_thinking": True}
    opened = rendered(tokenizer, ASKED, opens=True, enable_thinking=True)
    closed = rendered(tokenizer, ASKED, opens=True, enable_thinking=False)
    assert prompt_ids(tokenizer, {"messages": ASKED}) == opened != closed
    assert prompt_ids(tokenizer, {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": False}}) == closed
    assert ChatTemplate(tokenizer).following(ASKED, [])[-2:] == opened[-2:]
    form = form_of({"messages": ASKED, "chat_template_kwargs": {"enable_thinking": False}}, tokenizer)
    assert form.following(ASKED, [])[-2:] == closed[-2:], "also behind its replies"
    prompt, reply = with_replies(tokenizer, {"messages": ASKED}, ["42"])
    assert prompt == opened and "<think>\n\n</think>\n\n42" in tokenizer.decode(reply)


def test_pair_of_which_one_reply_has_a_thought_has_one_prompt():
    tokenizer = tokenizer_of("qwen3")
    prompt, chosen, rejected = with_replies(
        tokenizer, {"messages": ASKED}, ["<think>\ncarry one\n</think>\n\n42", "It is 43."]
    )
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
    assert "carry one" in tokenizer.decode(chosen) and "<think>\n\n</think>\n\nIt is 43." in tokenizer.decode(rejected)


def test_tools_that_the_template_does_not_show_are_refused():
    with pytest.raises(ValueError, match=r"tools\[0\]: the chat template of .* does not show it"):
        prompt_ids(tokenizer_of("phi-3.5"), {"messages": ASKED, "tools": [TOOL]})


def test_empty_thought_in_front_of_a_thought_is_refused():
    tokenizer = make_tokenizer(ZOO["qwen3"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    assert with_replies(tokenizer, {"messages": ASKED}, ["42"])
    with pytest.raises(ValueError, match="an empty thought in front of the reply's own"):
        with_replies(tokenizer, {"messages": ASKED}, ["<think>\ncarry one\n</think>\n\n42"])
