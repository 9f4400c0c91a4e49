"""Read the JSON files of model folders strictly, because other programs write them. Errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.config.strict_json import repeated


def read_object(path: str | Path, remedy: str = "copy the folder again") -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises ValueError for an unreadable or non-UTF-8 file, invalid JSON, NaN and infinity, duplicate keys, and nesting
    that is too deep. The error is one line that names the file and the fault, and ends with the remedy.
    """
    try:
        found = json.loads(Path(path).read_bytes().decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}); {remedy}.") from error
    except RecursionError as error:
        raise ValueError(f"{path}: not JSON (it is nested too deeply); {remedy}.") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise ValueError(f"{path}: not JSON ({error}); {remedy}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, and must hold an object {{...}}; {remedy}.")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (name := repeated(pairs)) is not None:
        raise ValueError(f"an object has the key {name!r} twice")
    return dict(pairs)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
