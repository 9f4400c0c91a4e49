"""Tools that a policy may call, and the parser for its calls.

A tool describes itself in a schema, takes the call's arguments and returns text. The model writes the arguments; no
tool in this module executes them as code.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from megatron_rl.api import InfrastructureFailure
from megatron_rl.config.strict_json import DECODER
from megatron_rl.rewards.arithmetic import NotArithmetic, evaluate_expression

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN, END = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
BLANKS, BETWEEN = re.compile(r"\s*+"), re.compile(r"[\s;,]*+")
"""BLANKS matches what may follow a call, and BETWEEN what may separate two calls."""
LONGEST_CALL = 20_000  # characters
MOST_DIGITS = 30
"""Maximum number of digits in a numerator or denominator of the calculator, also in intermediate results."""


class ToolError(Exception):
    """The policy's call is wrong. The policy reads the message and may try again; other exceptions fail the episode."""


class Rewarded(str):
    """A tool's result text with a reward for the reply that called it, as a tool's `__call__` may return it:

    return Rewarded("3 of 4 tests pass", 0.3)
    """

    reward: float

    def __new__(cls, text: str, reward: float) -> Self:
        shown = super().__new__(cls, text)
        shown.reward = reward
        return shown


class Tool(abc.ABC):
    """Base class of tools. Each sample has its own object, which may keep state.

    class Shout(Tool):
        name, description = "shout", "Repeats a text in capitals."
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        async def __call__(self, text):
            return str(text).upper()
    """

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema

    @abc.abstractmethod
    async def __call__(self, **arguments: Any) -> str:
        """Return the text shown to the policy, a `Rewarded` if the call earns a reward. ToolError for a wrong call."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the form that chat templates and OpenAI's API use."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A parsed call. If it could not be parsed, `fault` says why. id: the id that the policy gave it, or empty."""

    name: str
    arguments: dict[str, Any]
    fault: str = ""
    id: str = ""


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, keeps: Collection[str]) -> str:
    """Decode a reply without special tokens, except those in `keeps`."""
    special = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    if not any(special.get(token) in keeps for token in tokens):
        return str(tokenizer.decode(tokens, skip_special_tokens=True))
    kept = [token for token in tokens if token not in special or special[token] in keeps]
    return str(tokenizer.decode(kept, skip_special_tokens=False))


def next_mark(text: str, mark: str, place: int) -> int:
    """Return the position of the next `mark` outside thoughts, from `place` on; -1 if there is none.

    An unclosed thought extends to the text's end.
    """
    found = text.find(mark, place)
    while found >= 0 and (thought := text.find(THINK, place, found)) >= 0:
        place = text.find(THOUGHT, thought)
        if place < 0:
            return -1
        found = found if found >= place else text.find(mark, place)
    return found


def ends_a_thought(text: str) -> bool:
    """Return whether the text closes a thought that it does not open, as when the prompt has opened the thought."""
    end = text.find(THOUGHT)
    return end >= 0 and text.find(THINK, 0, end) < 0


Read = Callable[[int], "tuple[list[ToolCall], int] | None"]
"""Function that returns the calls that begin at a position of the reply, and the position of their end. It returns None
if the reply was cut off inside the calls."""


def split_calls(text: str, mark: str, read: Read) -> tuple[str, list[ToolCall]]:
    """Return the text without its calls, and the calls. A call inside a thought is a draft and stays in the text."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    place = 0
    while (begin := next_mark(text, mark, place)) >= 0 and (found := read(begin)) is not None:
        if ends_a_thought(text[place:begin]):
            calls, kept = [], []  # everything up to here was the thought
        kept.append(text[place if kept else 0 : begin])
        more, place = found
        calls += more
    if not calls or ends_a_thought(text[place:]):
        return text, []
    return "".join([*kept, text[place:]]).strip(), calls


def split_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text without its calls, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and the calls."""
    last_end = text.rfind(END)

    def read(begin: int) -> tuple[list[ToolCall], int] | None:
        start = begin + len(BEGIN)
        try:
            values, end = values_at(text, start)
        except (ValueError, RecursionError) as error:
            values, end, fault = [], start, f"a call must be a JSON object with a name and arguments; {told(error)}"
        else:
            fault = "a call must be a JSON object with a name and arguments"
        end = BLANKS.match(text, end).end()
        if values and text.startswith(END, end):
            return [as_call(value) for value in values], end + len(END)
        if values and (end == len(text) or text.startswith(BEGIN, end)):  # complete JSON needs no end mark
            return [as_call(value) for value in values], end
        if start > last_end:
            # Invalid JSON without an end mark was cut off.
            fault = f"a call must end with {END}"
            return ([faulty(fault)], len(text)) if values else None
        fault = fault if not values else f"after a call's JSON must come {END}"
        return [faulty(fault)], text.index(END, start) + len(END)

    return split_calls(text, BEGIN, read)


def value_at(text: str, place: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `place`, and its end. ValueError or RecursionError if there is none."""
    # Decode a slice: an error counts the lines before it, which is quadratic for many errors in a long text.
    value, length = DECODER.raw_decode(text[place : place + LONGEST_CALL])
    return value, place + length


def values_at(text: str, place: int) -> tuple[list[Any], int]:
    """Return the JSON objects that begin at `place`, in sequence or in a list, and their end position.

    ValueError or RecursionError if the first of them begins like JSON but cannot be decoded.
    """
    values: list[Any] = []
    while text.startswith("{" if values else ("{", "["), start := BETWEEN.match(text, place).end()):
        try:
            value, end = value_at(text, start)
        except (ValueError, RecursionError):
            if not values:
                raise
            break
        place = end
        if isinstance(value, list):
            return value, place
        values.append(value)
    return values, place


def told(error: Exception) -> str:
    return f"{error} (of at most {LONGEST_CALL} characters)" if isinstance(error, ValueError) else "it is too deep"


def faulty(fault: str, name: str = "") -> ToolCall:
    return ToolCall(name=name, arguments={}, fault=fault)


def as_call(value: Any) -> ToolCall:
    """Convert a JSON object with a name and arguments (Llama: parameters) to a call; anything else to a faulty call."""
    if not (isinstance(value, dict) and isinstance(value.get("name"), str)):
        return faulty("a call must be a JSON object with a name and arguments")
    if "arguments" in value and "parameters" in value:
        return faulty("a call has arguments or parameters, not both", value["name"])
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return faulty("the arguments must be a JSON object", value["name"])
    identity = value.get("id")
    return ToolCall(name=value["name"], arguments=arguments, id=identity if isinstance(identity, str) else "")


async def run_call(call: ToolCall, tools: dict[str, Tool]) -> str:
    """Run a call and return the text shown to the policy, which is an error message if the call is wrong."""
    if call.fault:
        return f"error: {call.fault}"
    if call.name not in tools:
        return f"error: there is no tool {call.name[:100]!r}, only {', '.join(tools)}"
    tool = tools[call.name]
    # Argument names are checked here. The tool checks the values, which may be of any JSON type.
    known = tool.parameters.get("properties", {})
    strange = [name for name in call.arguments if name not in known]
    missing = [name for name in tool.parameters.get("required", []) if name not in call.arguments]
    if strange or missing:
        return f"error: {call.name} takes {', '.join(known)}"
    try:
        return await tool(**call.arguments)
    except ToolError as error:
        return f"error: {error}"


def middle_left_out(text: str, characters: int) -> str:
    """Return a text. If it is longer than `characters`, replace its middle by a note."""
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[len(text) - half :]}"


class Calculator(Tool):
    """Exact arithmetic with + - * / and brackets, over numbers of at most 30 digits, without running code.

    await Calculator()(expression="(12 + 30) / 8")  # "21/4 = 5.25"
    """

    name = "calculator"
    description = "Evaluates an arithmetic expression of numbers, + - * / and brackets."
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "e.g. (12 + 30) / 2"}},
        "required": ["expression"],
    }

    async def __call__(self, expression: Any) -> str:
        try:
            value, _ = evaluate_expression(str(expression), most_digits=MOST_DIGITS)
        except NotArithmetic as error:
            raise ToolError(str(error)) from error
        return str(value) if value.denominator == 1 else f"{value} = {float(value):.10g}"


REFUSALS = (400, 413, 414, 422)
"""HTTP status codes that blame the query, not the service."""


class Search(Tool):
    """Queries a search service by POST: {"query": ..., "top": n} -> {"results": [{"title": ..., "text": ...}]}.

    search = Search("http://127.0.0.1:8321/", top=3)
    await search(query="height of Mont Blanc")  # examples/search_tool has such a service
    """

    name = "search"
    description = "Searches documents and returns the passages that fit best."
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}

    def __init__(self, url: str, top: int = 3, timeout_s: float = 30.0, characters: int = 1000) -> None:
        """characters: maximum number of characters of each result shown to the policy."""
        self.url, self.top, self.timeout_s, self.characters = url, top, timeout_s, characters

    async def __call__(self, query: Any) -> str:
        """Run a query. InfrastructureFailure if the service fails, ToolError if it rejects the query."""
        body = {"query": str(query), "top": self.top}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.post(self.url, json=body) as answer:
                # ToolError is not caught below: the policy reads it, and the episode continues.
                if answer.status in REFUSALS:
                    raise ToolError(f"the search service refuses this query (status {answer.status})")
                answer.raise_for_status()
                results = (await answer.json())["results"]
                found = [f"[{n}] {entry['title']}\n{entry['text']}" for n, entry in enumerate(results[: self.top], 1)]
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            raise InfrastructureFailure(
                f"search at {self.url}: {type(error).__name__}: {error}.", kind="search"
            ) from error
        return "\n\n".join(text[: self.characters] for text in found) or "nothing found"
