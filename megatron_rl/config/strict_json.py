"""Strict JSON parsing. Python's reader also accepts NaN, Infinity, 1e999 and duplicate keys."""

from __future__ import annotations

import json
import math
from typing import Any


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON; leave it out, or write null")


def finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def repeated(pairs: list[tuple[str, Any]]) -> str | None:
    """Return a key that occurs more than once in a JSON object's pairs; None if there is none."""
    if len(dict(pairs)) == len(pairs):
        return None
    names = [name for name, _ in pairs]
    return next(name for name in names if names.count(name) > 1)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (name := repeated(pairs)) is not None:
        raise ValueError(f"an object has {name!r} twice")
    return dict(pairs)


DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite)


def read_json(text: str | bytes) -> Any:
    """Parse a JSON text. If an object has duplicate keys, the last value counts.

    Raises ValueError, or RecursionError if the nesting is too deep.
    """
    return json.loads(text, parse_constant=refuse_constant, parse_float=finite)


def read_unique_json(text: str | bytes) -> Any:
    """Parse a JSON text like read_json, but raise ValueError for duplicate keys."""
    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant, parse_float=finite)
