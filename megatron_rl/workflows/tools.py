"""Tools that a policy may call, and how its text calls them.

A tool says what it is in a schema, takes the call's arguments and returns text. What it is given is the model's: no
tool here runs it as code.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import aiohttp

from megatron_rl.api import InfrastructureFailure
from megatron_rl.config.strict_json import DECODER
from megatron_rl.rewards.arithmetic import NotArithmetic, evaluate_expression

BEGIN, END = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
BLANKS, BETWEEN = re.compile(r"\s*+"), re.compile(r"[\s;,]*+")
"""After a call; between two of them."""
LONGEST_CALL = 20_000
"""Characters."""
MOST_DIGITS = 30
"""Most digits of a number that the calculator shows."""


class ToolError(Exception):
    """The call was wrong, and the policy is told why: it may try again. Other errors fail the episode."""


class Rewarded(str):
    """A tool's text, with a reward for the reply that called it.

    For example, at the end of a tool's `__call__`:

        return Rewarded("3 of 4 tests pass", 0.3)
    """

    reward: float

    def __new__(cls, text: str, reward: float) -> Self:
        shown = super().__new__(cls, text)
        shown.reward = reward
        return shown


class Tool(abc.ABC):
    """A tool that a policy may call. Each sample has an object of its own, which may keep state.

    For example:

        class Shout(Tool):
            name, description = "shout", "Repeats a text in capitals."
            parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
            async def __call__(self, text):
                return str(text).upper()
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""

    @abc.abstractmethod
    async def __call__(self, **arguments: Any) -> str:
        """Return what the policy is shown, `Rewarded` where the call earns something. ToolError for a wrong call."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's description in the form of chat templates and OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """`arguments` is an object; where the text was none, `fault` says so."""

    name: str
    arguments: dict[str, Any]
    fault: str = ""
    id: str = ""
    """The one that the policy gave it, in a form that has them."""


def next_mark(text: str, mark: str, place: int) -> int:
    """Return where a mark comes next outside of thoughts; -1 if there is none. A thought without an end is the rest."""
    found = text.find(mark, place)
    while found >= 0 and (thought := text.find(THINK, place, found)) >= 0:
        place = text.find(THOUGHT, thought)
        if place < 0:
            return -1
        found = found if found >= place else text.find(mark, place)
    return found


def ends_a_thought(text: str) -> bool:
    """Return whether a text ends a thought that begins before it: the prompt may have opened one."""
    end = text.find(THOUGHT)
    return end >= 0 and text.find(THINK, 0, end) < 0


Read = Callable[[int], "tuple[list[ToolCall], int] | None"]
"""Takes where a mark begins; returns the calls there and where they end, or None if the reply was cut off in them."""


def split_calls(text: str, mark: str, read: Read) -> tuple[str, list[ToolCall]]:
    """Return a text without its calls, and them. Those in a thought are drafts, and stay in the text."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    place = 0
    while (begin := next_mark(text, mark, place)) >= 0 and (found := read(begin)) is not None:
        if ends_a_thought(text[place:begin]):
            calls, kept = [], []  # which is all of it up to here
        kept.append(text[place if kept else 0 : begin])
        more, place = found
        calls += more
    if not calls or ends_a_thought(text[place:]):
        return text, []
    return "".join([*kept, text[place:]]).strip(), calls


def split_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text without its calls, and them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
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
        if values and (end == len(text) or text.startswith(BEGIN, end)):  # JSON ends by itself
            return [as_call(value) for value in values], end
        if start > last_end:
            # What is no JSON and has no end was cut off.
            fault = f"a call must end with {END}"
            return ([faulty(fault)], len(text)) if values else None
        fault = fault if not values else f"after a call's JSON must come {END}"
        return [faulty(fault)], text.index(END, start) + len(END)

    return split_calls(text, BEGIN, read)


def value_at(text: str, place: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place, and where it ends. ValueError and RecursionError for none."""
    # Of a part: an error counts the lines before it, which for many errors in a long text would be quadratic.
    value, length = DECODER.raw_decode(text[place : place + LONGEST_CALL])
    return value, place + length


def values_at(text: str, place: int) -> tuple[list[Any], int]:
    """Return the JSON objects that stand at a place, one behind the other or in a list, and where they end.

    ValueError and RecursionError where the first begins as one and is none.
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
    """Return the call that an object of a name and arguments (or parameters, as Llama says) is."""
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
    """Return what the policy is shown of its call, wrong or right."""
    if call.fault:
        return f"error: {call.fault}"
    if call.name not in tools:
        return f"error: there is no tool {call.name[:100]!r}, only {', '.join(tools)}"
    tool = tools[call.name]
    # The names are checked here and the values by the tool: what a policy writes may be of any JSON type.
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
    """Return the text, or of one that is longer than `characters` the beginning and the end."""
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[len(text) - half :]}"


class Calculator(Tool):
    """Exact arithmetic: + - * / and brackets, over numbers of at most 30 digits. It evaluates a tree, no code.

    For example:

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
        value = calculate(str(expression))
        return str(value) if value.denominator == 1 else f"{value} = {float(value):.10g}"


def calculate(expression: str) -> Fraction:
    """Return the value of an arithmetic expression. ToolError for anything else, for one too long or too large."""
    try:
        return evaluate_expression(expression, most_digits=MOST_DIGITS)[0]
    except NotArithmetic as error:
        raise ToolError(str(error)) from error


REFUSALS = (400, 413, 414, 422)
"""HTTP statuses that say something of the query, and nothing of the service."""


class Search(Tool):
    """Asks a search service over HTTP: POST {"query": ..., "top": n} -> {"results": [{"title": ..., "text": ...}]}.

    For example:

        search = Search("http://127.0.0.1:8321/", top=3)
        await search(query="height of Mont Blanc")  # examples/search_tool has such a service
    """

    name = "search"
    description = "Searches documents and returns the passages that fit best."
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}

    def __init__(self, url: str, top: int = 3, timeout_s: float = 30.0, characters: int = 1000) -> None:
        """characters: most that the policy is shown of each result."""
        self.url, self.top, self.timeout_s, self.characters = url, top, timeout_s, characters

    async def __call__(self, query: Any) -> str:
        """InfrastructureFailure where the service fails: that is not the policy's fault. A query that it refuses is."""
        body = {"query": str(query), "top": self.top}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.post(self.url, json=body) as answer:
                # ToolError passes the `except` below: the policy reads it, and the episode goes on.
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
