"""Values without quotes are read by the whole schema of their tool."""

import time

import pytest

from megatron_rl.agents.argument_values import argument_value
from megatron_rl.agents.tool_formats import FORMATS, text_arguments
from tests.kit.waiting import SLOWNESS

INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
REFERRED = {"$ref": "#/$defs/size"}
CASES = [
    (STRING, "12", "12"),
    (STRING, "null", "null"),
    (STRING, '"12"', '"12"'),
    (INTEGER, "12", 12),
    (INTEGER, " -3\n", -3),
    (INTEGER, "5.0", 5),
    (INTEGER, "5.5", "5.5"),
    (INTEGER, "twelve", "twelve"),
    ({"type": "number"}, "5.0", 5.0),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "boolean"}, "1", "1"),
    ({"type": "array"}, "[1, 2]", [1, 2]),
    ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
    (NULL, "None", None),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "integer"]}, "12", "12"),
    ({"type": ["integer", "null"]}, "12", 12),
    ({"type": "int"}, "12", 12),
    ({"anyOf": [STRING, NULL]}, "12", "12"),
    ({"anyOf": [STRING, NULL]}, "null", None),
    ({"anyOf": [INTEGER, NULL]}, "12", 12),
    ({"anyOf": [{"enum": ["auto"]}, INTEGER]}, "12", 12),
    ({"anyOf": [{"enum": ["auto"]}, INTEGER]}, "auto", "auto"),
    ({"oneOf": [{"type": "boolean"}, INTEGER]}, "True", True),
    ({"oneOf": [INTEGER, STRING]}, "12", "12"),
    ({"allOf": [INTEGER, {"minimum": 1}]}, "12", 12),
    ({"allOf": [STRING, {"maxLength": 5}]}, "12", "12"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["a", None]}, "null", None),
    ({"const": True}, "true", True),
    ({"const": "true"}, "true", "true"),
    (REFERRED, "12", 12),
    ({"$ref": "#/$defs/name"}, "12", "12"),
    ({"$ref": "#/$defs/round"}, "12", "12"),
    ({"$ref": "#/$defs/gone"}, "12", "12"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"properties": {"a": INTEGER}}, '{"a": 1}', {"a": 1}),
    ({"items": INTEGER}, "[1]", [1]),
    ({"minimum": 0}, "3", 3),
    ({"pattern": "^1"}, "12", "12"),
    ({}, "12", "12"),
    (True, "12", "12"),
    ({"description": "a size"}, "12", "12"),
    ({"type": 5}, "12", "12"),
    ({"anyOf": "x", "enum": 3, "type": {}}, "12", "12"),
]


@pytest.mark.parametrize(("schema", "text", "value"), CASES)
def test_a_value_has_the_type_that_the_schema_gives_it(schema, text, value):
    definitions = {"size": INTEGER, "name": STRING, "round": {"$ref": "#/$defs/round"}}
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    found = argument_value(text, "x", parameters)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        (None, "12"),
        ([], "12"),
        ({"properties": []}, "12"),
        ({"properties": {"y": INTEGER}}, "12"),
        ({"additionalProperties": INTEGER}, 12),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": INTEGER}}}}, 12),
        ({"allOf": [{"properties": {"x": INTEGER}}]}, 12),
        ({"oneOf": [{"properties": {"x": INTEGER}}, {"properties": {"y": STRING}}]}, 12),
        ({"anyOf": [{"properties": {"x": INTEGER}}, {"properties": {"x": STRING}}]}, "12"),
    ],
)
def test_an_argument_is_found_wherever_the_parameters_have_it(parameters, value):
    assert argument_value("12", "x", parameters) == value


def test_a_schema_that_doubles_at_each_step_is_read_in_no_time():
    definitions = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(100)}
    parameters = {"properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": definitions}
    start_s = time.thread_time()
    assert argument_value("12", "x", parameters) == "12"
    assert time.thread_time() - start_s < 1.0 * SLOWNESS


@pytest.mark.parametrize("form", ["qwen3_coder", "glm"])
def test_the_forms_in_tags_read_values_by_the_schema(form):
    properties = {"a": {"anyOf": [STRING, NULL]}, "b": {"$ref": "#/$defs/n"}, "c": {"type": "boolean"}}
    parameters = {"properties": properties, "$defs": {"n": INTEGER}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    begin, key, value, end = {
        "qwen3_coder": (
            "<tool_call>\n<function=f>\n",
            "<parameter={}>\n",
            "{}\n</parameter>\n",
            "</function>\n</tool_call>",
        ),
        "glm": ("<tool_call>f\n", "<arg_key>{}</arg_key>\n", "<arg_value>{}</arg_value>\n", "</tool_call>"),
    }[form]
    pairs = {"a": "12", "b": "12", "c": "True", "d": "12"}
    text = begin + "".join(key.format(name) + value.format(given) for name, given in pairs.items()) + end
    _, (call,) = FORMATS[form].split(text, text_arguments(tools))
    assert call.arguments == {"a": "12", "b": 12, "c": True, "d": "12"}
