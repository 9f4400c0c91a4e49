"""Grammars for replies whose form the agent demands: a JSON schema, or the call of a tool.

A grammar masks tokens when a reply is sampled. With generation.top_k, servers report which tokens the grammar allowed,
and the reply can be trained with log-probabilities over these. Without top_k, the trainer's log-probabilities would
include the masked tokens, so the reply is not trained and serves only as context.
"""

from __future__ import annotations

import json
from typing import Any

from megatron_rl.agents.agent_request import BadRequest, is_object, require
from megatron_rl.agents.streamed_text import THOUGHT
from megatron_rl.agents.tool_formats import ToolFormat
from megatron_rl.workflows.messages import Message

CHOICES = ("refuse", "untrained", "trained")
REMEDY = "is not supported; leave it out, or set rollout.workflow_args.constrained=untrained"


def grammar_of(
    body: dict[str, Any], tools: list[Message] | None, form: ToolFormat, *, choice: str, is_opened: bool
) -> dict[str, str] | None:
    """Return the grammar for the reply to a request; None for free sampling.

    choice: `refuse` raises BadRequest for a schema or a tool by name, and returns None for `required`; the other
    choices return a grammar for all three. is_opened: True if the prompt has opened a thought, which must end before
    the grammar begins.
    """
    wanted, format = body.get("tool_choice"), body.get("response_format") or {"type": "text"}
    is_named, is_schema = is_object(wanted), format["type"] != "text"
    if choice == "refuse":
        require(not is_named, "tool_choice", wanted, REMEDY)
        require(not is_schema, "response_format", format, REMEDY)
        return None
    if is_named or wanted == "required":
        require(not is_schema, "response_format", format, "is for a reply that calls no tool; leave out one of the two")
        rule = called(wanted, tools or [], form)
    elif is_schema:
        rule = {"type": "json_schema", "json_schema": schema_of(format)}
    else:
        return None
    if is_opened:
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": THOUGHT}
        rule = {"type": "sequence", "elements": [thought, rule]}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": rule})}


def schema_of(format: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema in a request's response_format. Raises BadRequest if there is none."""
    if format["type"] == "json_object":
        return {"type": "object"}
    given = format.get("json_schema")
    schema = given.get("schema") if is_object(given) else None
    require(is_object(schema), "response_format.json_schema.schema", schema, "must be an object")
    return dict(schema or {})


def called(wanted: Any, tools: list[Message], form: ToolFormat) -> dict[str, Any]:
    """Return the grammar's rule for a reply that calls the tool named in `wanted`, or any tool if that is `required`.

    Raises BadRequest if there is no such tool, or if the model's call format has no grammar.
    """
    given = wanted.get("function") if is_object(wanted) else None
    name = given.get("name") if is_object(given) else None
    functions = [tool["function"] for tool in tools]
    chosen = [it for it in functions if wanted == "required" or it["name"] == name]
    names = ", ".join(it["name"] for it in functions)
    require(
        bool(chosen), "tool_choice", wanted, f"must be a tool of the request, of which there are: {names or 'none'}"
    )
    if form.forced is None:
        raise BadRequest(
            "tool_choice", f"tool_choice = {wanted!r}: the model's form of calls has no grammar here; leave it out"
        )
    before, between, behind = form.forced
    rules = [
        {
            "type": "tag",
            "begin": f"{before}{json.dumps(it['name'])}{between}",
            "content": {"type": "json_schema", "json_schema": it.get("parameters") or {"type": "object"}},
            "end": behind,
        }
        for it in chosen
    ]
    return rules[0] if len(rules) == 1 else {"type": "or", "elements": rules}
