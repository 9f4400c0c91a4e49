"""JSON files of model folders, which others have written: read strictly, with one-line errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.config.strict_json import repeated


def read_object(path: str | Path, remedy: str = "copy the folder again") -> dict[str, Any]:
    """Return the object that a JSON file holds. ValueError names file and fault, and ends with the remedy.

    Refused are files that are not UTF-8, NaN and infinities, keys that come twice and deep nesting, besides what is no
    JSON.
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
