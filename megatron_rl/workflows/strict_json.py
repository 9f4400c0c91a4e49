"""JSON as its standard has it. Python's own reader also takes NaN, Infinity and 1e999, which no other reader does."""

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


DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite)


def read_json(text: str | bytes) -> Any:
    """Return the value that a text is. ValueError where it is no JSON, RecursionError where it is too deep."""
    return json.loads(text, parse_constant=refuse_constant, parse_float=finite)
