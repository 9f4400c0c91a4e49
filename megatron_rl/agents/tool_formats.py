"""Tool-call formats of several model families, and their parsers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.agents.argument_values import Schemas, argument_value
from megatron_rl.workflows.tools import (
    BEGIN,
    END,
    LONGEST_CALL,
    THINK,
    THOUGHT,
    ToolCall,
    as_call,
    decoded,
    ends_a_thought,
    faulty,
    next_mark,
    split_calls,
    split_tool_calls,
    told,
    value_at,
    values_at,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TextArguments = dict[str, Any]
"""{tool's name: schema of the tool's parameters}, by which unquoted arguments are parsed."""
Split = Callable[[str, TextArguments], tuple[str, list[ToolCall]]]
"""Function that takes a reply's text and TextArguments, and returns the text without its calls, and the calls."""

PYTHON_TAG, MISTRAL, MISTRAL_ARGUMENTS, MISTRAL_ID = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME = re.compile(r"[^\s<>{}\[\]\"'=,;]++")
"""Matches a tool's name in a format that does not quote names."""


@dataclass(frozen=True)
class ToolFormat:
    """One model family's format for tool calls.

    sign: a string that only this family's chat template contains.
    begins: strings that begin a call after other text. is_whole: True if a reply that is only a JSON object may be a
    call.
    forced: the parts of a call's text from which a grammar is made: the text before the name, between the name and the
    JSON arguments, and after these. None for a format whose arguments are not JSON.
    marks: special tokens of the format, which decoding would otherwise drop.
    """

    split: Split
    sign: str
    begins: tuple[str, ...] = (BEGIN,)
    is_whole: bool = False
    forced: tuple[str, str, str] | None = None
    marks: tuple[str, ...] = ()

    def text(self, tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, keeps: Sequence[str] = ()) -> str:
        """Decode a reply without special tokens, except the format's own and those in `keeps`."""
        return decoded(tokenizer, tokens, keeps={*self.marks, *keeps})


def text_arguments(tools: list[dict[str, Any]] | None) -> TextArguments:
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools or ()}


@dataclass(frozen=True)
class Tag:
    """One tag of a text, from position `begin` to `end`.

    is_close: True if only white space stands between this tag and the next tag or the text's end.
    """

    kind: str
    name: str
    begin: int
    end: int
    is_close: bool


@dataclass(frozen=True)
class Step:
    """A kind of tag that may come next in a call.

    then: the parser's state after the tag. is_close: True if the tag must be one with `is_close`.
    """

    kind: str
    then: str
    is_close: bool = False

    def fits(self, tag: Tag) -> bool:
        return tag.kind == self.kind and (tag.is_close or not self.is_close)


@dataclass(frozen=True)
class TagForm:
    """A call format made of tags. Values are not quoted, so a value may contain the format's own tags.

    steps: {parser's state: tags that may come next}; in the state `value`, any other tags may precede these.
    is_named_first: True if the tool's name follows <tool_call> directly, without a tag of its own.

    A closing tag ends a value only if the rest of the reply can then be parsed. Therefore `readable` computes from the
    reply's end backwards where parsing can succeed. Of several parses, the one with the shortest values is taken.
    """

    pattern: re.Pattern[str]
    steps: dict[str, tuple[Step, ...]]
    opens_value: str
    closes_value: str
    rule: str
    is_named_first: bool = False

    def tags(self, text: str, place: int) -> list[Tag]:
        found = list(self.pattern.finditer(text, place))
        ends = [match.start() for match in found[1:]] + [len(text)]
        tags = []
        for match, end in zip(found, ends, strict=False):  # `ends` has one entry too many if there are no tags
            kind, is_named, name = match[0].removesuffix(">").partition("=")
            is_close = not text[match.end() : end].strip()
            tags.append(Tag(kind if is_named else match[0], name.strip(), match.start(), match.end(), is_close))
        return tags

    def readable(self, tags: list[Tag]) -> dict[str, list[bool]]:
        """Return {parser's state: list}, in which entry i says whether parsing can go on in this state from tags[i].

        Parsing can go on if the rest of the text can then be parsed. The last entry, after all tags, is for the text's
        end.
        """
        count = len(tags)
        can = {name: [False] * (count + 1) for name in (*self.steps, "text", "thought")}
        can["text"][count] = can["thought"][count] = True  # an unclosed thought extends to the end
        has_end = False
        for i in reversed(range(count)):
            tag = tags[i]
            has_end |= tag.kind == END
            for name, steps in self.steps.items():
                can[name][i] = any(step.fits(tag) and can[step.then][i + 1] for step in steps)
                can[name][i] |= name == "value" and can["value"][i + 1]
            can["thought"][i] = can["text" if tag.kind == THOUGHT else "thought"][i + 1]
            match tag.kind:
                case "<think>":
                    can["text"][i] = can["thought"][i + 1]
                case "</think>":
                    can["text"][i] = can["text"][i + 1]
                case "<tool_call>":  # a call without an end was cut off
                    can["text"][i] = not has_end or can["call"][i + 1]
        return can

    def paths(self, text: str, begin: int) -> list[list[Tag]] | None:
        """Return the tags of each <tool_call> block from position `begin` on; None if the text cannot be parsed.

        Tags that are part of an argument's value are left out.
        """
        tags = self.tags(text, begin)
        can = self.readable(tags)
        if not can["text"][0]:
            return None
        found: list[list[Tag]] = []
        expected = "text"
        for i, tag in enumerate(tags):
            if expected == "thought":
                expected = "text" if tag.kind == THOUGHT else expected
            elif expected == "text" and tag.kind == THINK:
                expected = "thought"
            elif expected == "text" and tag.kind == BEGIN:
                if not can["call"][i + 1]:
                    break  # cut off
                expected = "call"
                found.append([tag])
            elif steps := [step for step in self.steps.get(expected, ()) if step.fits(tag) and can[step.then][i + 1]]:
                expected = steps[0].then
                found[-1].append(tag)
        return found

    def calls(self, text: str, path: list[Tag], texts: TextArguments) -> list[ToolCall]:
        """Return the calls of one <tool_call> block.

        path: the block's tags, as `paths` returns them.
        """
        found: list[ToolCall] = []
        key, faults = "", dict[int, str]()
        for tag, following in zip(path, path[1:], strict=False):
            inner = text[tag.end : following.begin]
            match tag.kind:
                case "<tool_call>" if self.is_named_first:
                    found.append(ToolCall(name=inner.strip(), arguments={}))
                case "<tool_call>" if inner.strip():
                    found.append(faulty(self.rule))
                case "<function":
                    found.append(ToolCall(name=tag.name, arguments={}))
                case "<arg_key>":
                    key = inner.strip()
                case "<parameter" | "<arg_value>":
                    key = tag.name or key
                    value = inner.removeprefix("\n").removesuffix("\n") if tag.name else inner
                    call, parameters = found[-1], texts.get(found[-1].name)
                    if not key:
                        faults[len(found) - 1] = "an argument has no name"
                    if key in call.arguments:
                        faults[len(found) - 1] = f"the argument {key[:100]!r} stands there twice"
                    if self.swallows(value, parameters):
                        faults[len(found) - 1] = f"the argument {key[:100]!r} has no {self.closes_value}"
                    call.arguments[key] = argument_value(value, key, parameters)
        return [
            faulty(faults.get(n, self.rule)) if n in faults or not NAME.fullmatch(call.name) else call
            for n, call in enumerate(found)
        ]

    def swallows(self, value: str, parameters: Any) -> bool:
        """Return True if a value seems to lack its closing tag: it opens another argument and does not close it."""
        names: list[str] = []
        for tag in self.tags(value, 0):
            if tag.kind == self.opens_value:
                names.append(tag.name)
            elif tag.kind == self.closes_value and names:
                names.pop()
        schemas, has_names = Schemas(parameters), isinstance(parameters, dict) and "properties" in parameters
        return any(not (name and has_names) or schemas.of_argument(name, parameters) is not None for name in names)

    def split(self, text: str, texts: TextArguments) -> tuple[str, list[ToolCall]]:
        begin = next_mark(text, BEGIN, 0)
        if begin < 0 or END not in text[begin:]:
            return text, []
        paths = self.paths(text, begin)
        if paths is None:
            return text[:begin].strip(), [faulty(self.rule)]
        found = {path[0].begin: (self.calls(text, path, texts), path[-1].end) for path in paths}
        return split_calls(text, BEGIN, found.get)


QWEN3_CODER = TagForm(
    pattern=re.compile(r"</?tool_call>|</?think>|</function>|</parameter>|<(?:function|parameter)=[^<>\n]*>"),
    steps={
        "call": (Step("<function", "body", is_close=True),),
        "body": (Step("<parameter", "value"), Step("</function>", "after", is_close=True)),
        "value": (Step("</parameter>", "body", is_close=True),),
        "after": (Step(END, "text"), Step("<function", "body", is_close=True)),
    },
    opens_value="<parameter",
    closes_value="</parameter>",
    rule="a call must be <function=name>, <parameter=key>value</parameter> for each argument, </function>",
)
GLM = TagForm(
    pattern=re.compile(r"</?tool_call>|</?think>|</?arg_key>|</?arg_value>"),
    steps={
        "call": (Step("<arg_key>", "key"), Step(END, "text")),
        "key": (Step("</arg_key>", "pair", is_close=True),),
        "pair": (Step("<arg_value>", "value"),),
        "value": (Step("</arg_value>", "after", is_close=True),),
        "after": (Step("<arg_key>", "key"), Step(END, "text")),
    },
    is_named_first=True,
    opens_value="<arg_value>",
    closes_value="</arg_value>",
    rule="a call must be its name, and <arg_key>key</arg_key><arg_value>value</arg_value> for each argument",
)


def split_llama(text: str, texts: TextArguments) -> tuple[str, list[ToolCall]]:
    """Parse a reply that begins with one or more JSON objects of name and parameters (Llama 3.1 and later)."""

    def read(begin: int) -> tuple[list[ToolCall], int]:
        try:
            values, end = values_at(text, begin + len(PYTHON_TAG))
        except (ValueError, RecursionError) as error:
            return [faulty(f"what follows {PYTHON_TAG} must be JSON; {told(error)}")], len(text)
        if not values:
            return [faulty(f"what follows {PYTHON_TAG} must be JSON")], len(text)
        return [as_call(value) for value in values], end

    if next_mark(text, PYTHON_TAG, 0) >= 0:
        return split_calls(text, PYTHON_TAG, read)
    # Without the tag, an ordinary answer may be JSON too.
    is_thought = text.lstrip().startswith(THINK) or (ends_a_thought(text) and not text.lstrip().startswith("{"))
    place = text.find(THOUGHT) + len(THOUGHT) if is_thought and THOUGHT in text else 0
    if not text[place : place + LONGEST_CALL].lstrip().startswith("{"):
        return text, []
    try:
        values, end = values_at(text, place)
    except (ValueError, RecursionError):
        return text, []
    if not all(calls_a_tool(value, texts) for value in values):
        return text, []
    return (text[:place] + text[end:]).strip(), [as_call(value) for value in values]


def calls_a_tool(value: dict[str, Any], texts: TextArguments) -> bool:
    """Return True if a JSON object must be a call, because it has arguments and the name of a known tool."""
    given = [value[name] for name in ("arguments", "parameters") if name in value]
    return len(given) == 1 and isinstance(given[0], dict) and value.get("name") in list(texts)


COMPACT = re.compile(
    rf"[\s;,]*+({NAME.pattern})\s*+(?:{re.escape(MISTRAL_ID)}\s*+(\w*+)\s*+)?{re.escape(MISTRAL_ARGUMENTS)}\s*+"
)


def split_mistral(text: str, _: TextArguments) -> tuple[str, list[ToolCall]]:
    """Parse `[TOOL_CALLS]` with a JSON list of calls, or `[TOOL_CALLS]name[ARGS]{...}` per call (Mistral)."""

    def read(begin: int) -> tuple[list[ToolCall], int]:
        place = begin + len(MISTRAL)
        calls: list[ToolCall] = []
        try:
            while head := COMPACT.match(text, place):
                given, place = value_at(text, head.end())
                named = {"name": head[1], "arguments": given} | ({"id": head[2]} if head[2] else {})
                calls.append(as_call(named))
            if calls:
                return calls, place
            values, end = values_at(text, place)
            if values:
                return [as_call(value) for value in values], end
            fault = ""
        except (ValueError, RecursionError) as error:
            fault = f"; {told(error)}"
        end = text.find(MISTRAL, place)
        return [*calls, faulty(f"what follows {MISTRAL} must be JSON{fault}")], end if end >= 0 else len(text)

    return split_calls(text, MISTRAL, read)


FORMATS = {
    "hermes": ToolFormat(  # Qwen 2.5 and 3 too
        lambda text, _: split_tool_calls(text),
        '{"name": <function-name>',
        forced=(f'{BEGIN}\n{{"name": ', ', "arguments": ', f"}}\n{END}"),
    ),
    "qwen3_coder": ToolFormat(QWEN3_CODER.split, "<function="),
    "glm": ToolFormat(GLM.split, "<arg_key>"),
    "llama": ToolFormat(
        *(split_llama, PYTHON_TAG, (PYTHON_TAG,)),
        is_whole=True,
        forced=('{"name": ', ', "parameters": ', "}"),
        marks=(PYTHON_TAG,),
    ),
    "mistral": ToolFormat(split_mistral, MISTRAL, (MISTRAL,), marks=(MISTRAL, MISTRAL_ARGUMENTS, MISTRAL_ID)),
}


def tool_format(name: str, tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """Return the format called `name`; for `auto`, the first whose `sign` is in the chat template, or else Hermes."""
    if name == "auto":
        templates = tokenizer.chat_template
        text = " ".join(templates.values()) if isinstance(templates, dict) else str(templates or "")
        name = next((known for known, form in FORMATS.items() if form.sign in text), "hermes")
    if name not in FORMATS:
        raise ValueError(f"tool_format = {name!r}: must be auto or one of {', '.join(FORMATS)}.")
    return FORMATS[name]
