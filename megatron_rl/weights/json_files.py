"""Read the JSON files of model folders strictly, because other programs write them. Errors name the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.config.strict_json import read_unique_json


def read_object(path: str | Path, remedy: str = "copy the folder again") -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises ValueError if the file is unreadable, not in UTF-8, not valid JSON, nested too deeply, or has NaN, infinity
    or duplicate keys. The error is one line that names the file and the fault, and ends with `remedy`.
    """
    try:
        found = read_unique_json(Path(path).read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}); {remedy}.") from error
    except RecursionError as error:
        raise ValueError(f"{path}: not JSON (it is nested too deeply); {remedy}.") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise ValueError(f"{path}: not JSON ({error}); {remedy}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, and must hold an object {{...}}; {remedy}.")
    return found
