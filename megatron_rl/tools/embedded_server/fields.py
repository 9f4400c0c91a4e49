"""Type and range checks of the fields of a client's JSON object, and abbreviated values for error messages.

A value is never shown whole: it may be megabytes long, or nested too deeply for repr().
"""

from __future__ import annotations

import reprlib
from typing import Any

MOST_LETTERS = 4096
"""Maximum length of a string field, such as a version, a group or a path."""
_REQUIRED: Any = object()
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 8
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """Return `repr(value)`, abbreviated if long or deeply nested."""
    return _SHORT.repr(value)


def field(body: dict[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """Return the field, or its default if missing or null. ValueError for a missing required field or a wrong value."""
    value = body.get(name)
    if value is None:
        if default is _REQUIRED:
            raise ValueError(f"{name}: required, must be of type {kind.__name__}")
        return default
    if type(value) is not kind:  # exactly: True is an int to isinstance
        raise ValueError(f"{name} = {shown(value)}: must be of type {kind.__name__}")
    if kind is str and len(value) > MOST_LETTERS:
        raise ValueError(f"{name}: has {len(value)} letters; must have at most {MOST_LETTERS}")
    if kind is str and "\0" in value:
        raise ValueError(f"{name} = {shown(value)}: must be text without NUL")
    return value


def integer(body: dict[str, Any], name: str, low: int, high: int, default: Any = _REQUIRED) -> Any:
    """Return an integer field, or its default if missing or null. ValueError if it is outside [low, high]."""
    value = field(body, name, int, default)
    if type(value) is int and not low <= value <= high:
        raise ValueError(f"{name} = {value}: must be an integer in [{low}, {high}]")
    return value


def flag(body: dict[str, Any], name: str) -> bool:
    """Return a boolean field; False if missing or null."""
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{name} = {shown(value)}: must be true or false")
    return bool(value)
