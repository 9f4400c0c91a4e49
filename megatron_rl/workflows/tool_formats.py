"""How models of several families write the calls of tools, and how their text becomes calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.workflows.tools import BEGIN, END, LONGEST_CALL, ToolCall, split_tool_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TextArguments = dict[str, set[str]]
"""Tool -> its arguments that are text: in a form without quotes, 12 may be a number or a text."""
Split = Callable[[str, TextArguments], tuple[str, list[ToolCall]]]

BETWEEN = re.compile(r"[ \n\t;]*")
"""Of values."""
PYTHON_TAG, MISTRAL, MISTRAL_ARGUMENTS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"


@dataclass(frozen=True)
class ToolFormat:
    """One family's way to write calls."""

    split: Split
    """Takes a reply's text; returns it without its calls, and them."""
    sign: str
    """A mark of the family's chat template that no other's has."""
    begins: tuple[str, ...] = (BEGIN,)
    """The beginning of a call, behind text."""
    is_whole: bool = False
    """A reply that is nothing but a JSON object may be a call, too."""
    forced: tuple[str, str, str] | None = None
    """A call as a grammar has it: what stands before the name, between it and the arguments, and behind these; the name
    and the arguments are JSON. None for a form that is no JSON."""
    marks: tuple[str, ...] = ()
    """Special tokens that the form needs, and decoding would leave out."""

    def text(self, tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
        """Decode a reply without its special tokens, except those of the form."""
        special = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        if not any(special.get(token) in self.marks for token in tokens):
            return str(tokenizer.decode(tokens, skip_special_tokens=True))
        kept = [token for token in tokens if token not in special or special[token] in self.marks]
        return str(tokenizer.decode(kept, skip_special_tokens=False))


def text_arguments(tools: list[dict[str, Any]] | None) -> TextArguments:
    """Return which arguments of the tools are text by their schemas."""
    found: TextArguments = {}
    for function in (tool["function"] for tool in tools or ()):
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        kinds = properties.items() if isinstance(properties, dict) else ()
        found[function["name"]] = {n for n, kind in kinds if isinstance(kind, dict) and kind.get("type") == "string"}
    return found


def split_hermes(text: str, _: TextArguments) -> tuple[str, list[ToolCall]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen 2.5 and 3, Hermes."""
    return split_tool_calls(text)


def blocks(text: str) -> tuple[str, list[str]]:
    """Return a text without its <tool_call> blocks, and what is in them."""
    inner, kept, place = [], [], 0
    while (begin := text.find(BEGIN, place)) >= 0 and (end := text.find(END, begin)) >= 0:
        inner.append(text[begin + len(BEGIN) : end])
        kept.append(text[place:begin])
        place = end + len(END)
    return ("".join([*kept, text[place:]]).strip() if inner else text), inner


def value_of(text: str, *, is_text: bool) -> Any:
    if is_text or len(text) > LONGEST_CALL:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def pieces(text: str, begin: str, middle: str, end: str) -> Iterator[tuple[str, str]]:
    """Go through what stands as `begin`, key, `middle`, value, `end`."""
    place = 0
    while (start := text.find(begin, place)) >= 0 and (cut := text.find(middle, start + len(begin))) >= 0:
        place = text.find(end, cut + len(middle))
        if place < 0:
            return
        yield text[start + len(begin) : cut], text[cut + len(middle) : place]
        place += len(end)


def split_glm(text: str, texts: TextArguments) -> tuple[str, list[ToolCall]]:
    """A block of a name and `<arg_key>`, `<arg_value>` pairs: GLM 4.5 and later."""
    kept, inner = blocks(text)
    calls = []
    for block in inner:
        name = block.partition("<arg_key>")[0].strip()
        values = pieces(
            block.replace("</arg_key>\n", "</arg_key>"), "<arg_key>", "</arg_key><arg_value>", "</arg_value>"
        )
        found = {key: value_of(value, is_text=key in texts.get(name, ())) for key, value in values}
        fault = "" if name else "a call must begin with the tool's name"
        calls.append(ToolCall(name=name, arguments=found, fault=fault))
    return kept, calls


def split_qwen3_coder(text: str, texts: TextArguments) -> tuple[str, list[ToolCall]]:
    """A block of `<function=name>` with `<parameter=key>` values: Qwen3-Coder and Qwen3.5."""
    kept, inner = blocks(text)
    calls = []
    for block in inner:
        ((name, body),) = list(pieces(block, "<function=", ">", "</function>"))[:1] or [("", "")]
        found = {
            key: value_of(value.removeprefix("\n").removesuffix("\n"), is_text=key in texts.get(name, ()))
            for key, value in pieces(body, "<parameter=", ">", "</parameter>")
        }
        fault = "" if name else "a call must be <function=name> to </function>"
        calls.append(ToolCall(name=name, arguments=found, fault=fault))
    return kept, calls


def json_values(text: str) -> list[Any] | None:
    """Return the JSON values that a text is, one behind the other with blanks or semicolons between; None otherwise."""
    if len(text) > LONGEST_CALL:
        return None
    values, place, decoder = [], BETWEEN.match(text).end(), json.JSONDecoder()
    try:
        while place < len(text):
            value, end = decoder.raw_decode(text, place)
            values.append(value)
            place = BETWEEN.match(text, end).end()
    except (ValueError, RecursionError):
        return None
    return values


def as_call(value: Any) -> ToolCall:
    """Return the call that an object of a name and arguments (or parameters, as Llama says) is."""
    if not (isinstance(value, dict) and isinstance(value.get("name"), str)):
        return ToolCall(name="", arguments={}, fault="a call must be a JSON object with a name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(name=value["name"], arguments={}, fault="the arguments must be a JSON object")
    return ToolCall(name=value["name"], arguments=arguments)


def split_llama(text: str, _: TextArguments) -> tuple[str, list[ToolCall]]:
    """The whole reply is one JSON object of name and parameters, or several: Llama 3.1 and later."""
    said, tag, rest = text.partition(PYTHON_TAG)
    body = rest if tag else said
    calls = [as_call(value) for value in json_values(body) or ()]
    # Without the tag an answer may be JSON, too.
    if not calls or (not tag and any(call.fault for call in calls)):
        return text, []
    return (said.strip() if tag else ""), calls


def split_mistral(text: str, _: TextArguments) -> tuple[str, list[ToolCall]]:
    """`[TOOL_CALLS]` and a JSON list of calls, or for each call `[TOOL_CALLS]name[ARGS]{...}`: Mistral."""
    said, *parts = text.split(MISTRAL)
    calls: list[ToolCall] = []
    for part in parts:
        name, has_arguments, arguments = part.partition(MISTRAL_ARGUMENTS)
        values = json_values(arguments if has_arguments else part)
        if values is None or len(values) != 1:
            calls.append(ToolCall(name="", arguments={}, fault="what follows [TOOL_CALLS] must be JSON"))
        elif has_arguments:
            calls.append(as_call({"name": name.partition("[CALL_ID]")[0].strip(), "arguments": values[0]}))
        else:
            calls += map(as_call, values[0] if isinstance(values[0], list) else values)
    return (said.strip() if calls else text), calls


FORMATS = {
    "hermes": ToolFormat(
        split_hermes, '{"name": <function-name>', forced=(f'{BEGIN}\n{{"name": ', ', "arguments": ', f"}}\n{END}")
    ),
    "qwen3_coder": ToolFormat(split_qwen3_coder, "<function="),
    "glm": ToolFormat(split_glm, "<arg_key>"),
    "llama": ToolFormat(
        *(split_llama, PYTHON_TAG, (PYTHON_TAG,)),
        is_whole=True,
        forced=('{"name": ', ', "parameters": ', "}"),
        marks=(PYTHON_TAG,),
    ),
    "mistral": ToolFormat(split_mistral, MISTRAL, (MISTRAL,), marks=(MISTRAL, MISTRAL_ARGUMENTS, "[CALL_ID]")),
}


def tool_format(name: str, tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """Return the format of that name; of `auto` the one whose sign the tokenizer's chat template has, else Hermes'.

    ValueError for a name that is none.
    """
    if name == "auto":
        templates = tokenizer.chat_template
        text = " ".join(templates.values()) if isinstance(templates, dict) else str(templates or "")
        name = next((known for known, form in FORMATS.items() if form.sign in text), "hermes")
    if name not in FORMATS:
        raise ValueError(f"tool_format = {name!r}: must be auto or one of {', '.join(FORMATS)}.")
    return FORMATS[name]
