"""Converts unquoted tool arguments to values: the tool's JSON schema decides whether 12 is a number or a string."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_rl.config.strict_json import read_json
from megatron_rl.workflows.tools import LONGEST_CALL

KINDS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
PYTHON_KINDS = {"str": "string", "text": "string", "bool": "boolean", "int": "integer", "float": "number"}
PYTHON_KINDS |= {"double": "number", "list": "array", "tuple": "array", "dict": "object", "none": "null"}
"""Python's type names, which some tool datasets use in place of JSON's, with the JSON type for each."""
HINTS = {
    "object": ("properties", "additionalProperties", "patternProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""{JSON type: keywords that imply this type in a schema without `type`}."""
WORDS = {"true": True, "false": False, "none": None}
"""Python's spellings of JSON's literals, in lower case."""
MOST_STEPS, MOST_DEPTH = 1000, 32
"""Maximum number of schemas visited per value, and of their nesting depth. References between schemas may form
cycles."""


def argument_value(text: str, name: str, parameters: Any) -> Any:
    """Convert an argument's text to a value that the argument's schema accepts.

    The text `null` becomes None if the schema accepts null. Otherwise the text itself is returned, unless the schema
    excludes this string but accepts another of the text's `readings`; then the first accepted reading is returned.
    name: the argument's name.
    parameters: schema of all parameters of the tool.
    """
    schemas = Schemas(parameters)
    schema = schemas.of_argument(name, parameters)
    if schema is None or len(text) > LONGEST_CALL:
        return text
    if text.strip() == "null" and schemas.takes(schema, None):
        return None
    if schemas.takes(schema, text) is not False:
        return text
    return next((value for value in readings(text) if schemas.takes(schema, value)), text)


def readings(text: str) -> Iterator[Any]:
    """Yield the values that an argument's text may stand for, other than the unchanged text."""
    bare = text.strip()
    yield bare
    try:
        value = read_json(bare)
    except (ValueError, RecursionError):
        if (word := bare.lower()) in WORDS:
            yield WORDS[word]
        return
    yield value
    if isinstance(value, float) and value.is_integer():
        yield int(value)


class Schemas:
    """The schemas of one tool's parameters. `root` is the document in which references are resolved."""

    def __init__(self, root: Any) -> None:
        self.root, self.steps = root, 0

    def is_enough(self, depth: int) -> bool:
        self.steps += 1
        return self.steps > MOST_STEPS or depth > MOST_DEPTH

    def target(self, reference: Any) -> Any:
        """Return the schema to which a reference within the root points; None if it cannot be resolved."""
        if not (isinstance(reference, str) and reference.startswith("#")):
            return None
        found = self.root
        for part in reference[1:].split("/")[1 : MOST_DEPTH + 1]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def of_argument(self, name: str, schema: Any, depth: int = 0) -> Any:
        """Return the schema of argument `name` in the `schema` of all arguments; None if there is none."""
        if not isinstance(schema, dict) or self.is_enough(depth):
            return None
        found = []
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            found.append(properties[name])
        for part in [self.target(schema.get("$ref")), *parts(schema, "allOf")]:
            found.append(self.of_argument(name, part, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            choices = [self.of_argument(name, part, depth + 1) for part in parts(schema, keyword)]
            if known := [choice for choice in choices if choice is not None]:
                found.append({"anyOf": known})
        found = [part for part in found if part is not None]
        if not found and isinstance(schema.get("additionalProperties"), dict):
            return schema["additionalProperties"]
        return {"allOf": found} if found else None

    def takes(self, schema: Any, value: Any, depth: int = 0) -> bool | None:
        """Return True if a schema accepts a value, False if not, and None if the schema leaves that open.

        The schema's types, `const` and `enum` are checked, including those in schemas that it combines or refers to.
        """
        if schema is False:
            return False
        if not isinstance(schema, dict) or self.is_enough(depth):
            return None
        if schema.get("nullable") is True and value is None:
            return True
        said: list[bool | None] = [self.takes(self.target(schema.get("$ref")), value, depth + 1)]
        said += [self.takes(part, value, depth + 1) for part in parts(schema, "allOf")]
        for keyword in ("anyOf", "oneOf"):
            choices = {self.takes(part, value, depth + 1) for part in parts(schema, keyword)}
            said.append(True if True in choices else None if None in choices or not choices else False)
        if kinds := list(kinds_of(schema.get("type"))):
            said.append(any(KINDS[kind](value) for kind in kinds))
        if "const" in schema:
            said.append(is_same(value, schema["const"]))
        if isinstance(schema.get("enum"), list):
            said.append(any(is_same(value, one) for one in schema["enum"]))
        if rules := [one for one in said if one is not None]:
            return all(rules)
        hinted = [kind for kind, keywords in HINTS.items() if any(keyword in schema for keyword in keywords)]
        return any(KINDS[kind](value) for kind in hinted) if hinted else None


def parts(schema: dict[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def kinds_of(names: Any) -> Iterator[str]:
    """Yield the JSON types in a schema's `type`; unknown names are skipped."""
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str):
            kind = PYTHON_KINDS.get(name.lower(), name.lower())
            if kind in KINDS:
                yield kind


def is_same(value: Any, other: Any) -> bool:
    # In Python True == 1.
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
