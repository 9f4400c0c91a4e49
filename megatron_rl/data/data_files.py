"""Reads a data set's rows from JSON lines, Parquet, a folder saved by Hugging Face datasets, or Hugging Face's hub."""

from __future__ import annotations

import codecs
import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from megatron_rl.config.strict_json import read_unique_json

HUB = "hf:"
NEEDS = "run pip install 'megatron-rl[data]'"
ANSWER_S = 10.0
"""Timeout in seconds for the hub's first answer. Without it, `datasets` retries for minutes."""
LONGEST_REASON = 500
MADE_BY = (
    "The first lines of a shipped config have the command that makes its files; a data set of the hub can also be "
    "named as it is, hf:NAME[:CONFIG] with a split."
)


def is_file(source: str) -> bool:
    return source.endswith((".jsonl", ".parquet"))


def holds_rows(source: str) -> bool:
    """Return True for a name that `read_rows` accepts; other names are import paths."""
    return is_file(source) or source.startswith(HUB) or Path(source).is_dir()


def read_rows(source: str, *, key: str, split: str = "") -> list[dict[str, Any]]:
    """Read the rows of a .jsonl or .parquet file, of a folder that `datasets` saved, or of `hf:NAME[:CONFIG]`.

    key: the config key for error messages. split: required for a folder or hub name that has several splits; a file has
    none. Raises ValueError if the source cannot be read, and RuntimeError if a package is missing.
    """
    if is_file(source) and split:
        raise ValueError(f"{key} = {source!r}: is a file, which has no split {split!r}; name the split's own file.")
    if source.endswith(".jsonl"):
        return read_jsonl(source, key)
    return read_parquet(source, key) if is_file(source) else read_datasets(source, key, split)


def read_jsonl(source: str, key: str) -> list[dict[str, Any]]:
    try:
        lines = Path(source).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")  # strings may hold others
    except OSError as error:
        raise ValueError(
            f"{key} = {source!r}: cannot be read ({error}); give a UTF-8 file with one JSON object per line. {MADE_BY}"
        ) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(read_unique_json(line.decode("utf-8")))
                if b"\\ud" in line.lower():  # half of a surrogate pair, which no tokenizer accepts
                    json.dumps(rows[-1], ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:  # from UTF-8, JSON, or a number of 5,000 digits
                reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
                raise ValueError(
                    f"{key} = {source!r}, line {number}: not JSON ({reason}); write one JSON object per line."
                ) from error
            if not isinstance(rows[-1], dict):
                kind = type(rows[-1]).__name__
                raise ValueError(f"{key} = {source!r}, line {number}: is a {kind}; write one JSON object per line.")
    return rows


def read_parquet(source: str, key: str) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise RuntimeError(f"{key} = {source!r}: needs pyarrow, which is not installed; {NEEDS}.") from error
    try:
        return list(parquet.read_table(source).to_pylist())
    except (OSError, ArrowException, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        raise ValueError(f"{key} = {source!r}: cannot be read ({reason}); give a Parquet file. {MADE_BY}") from error


def read_datasets(source: str, key: str, split: str) -> list[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise RuntimeError(f"{key} = {source!r}: needs datasets, which is not installed; {NEEDS}.") from error
    try:
        if source.startswith(HUB):
            name, _, config = source.removeprefix(HUB).partition(":")
            # Ask the hub first, with our own timeout: load_dataset retries an unreachable hub for minutes.
            if not datasets.config.HF_HUB_OFFLINE:
                find_hub(name)
            found = datasets.load_dataset(name, config or None)
        else:
            found = datasets.load_from_disk(source)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{key} = {source!r}: cannot be read ({with_cause(error)}); give a folder that save_to_disk wrote, or "
            f"hf:NAME[:CONFIG]."
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"{key} = {source!r}: has no split {split!r}; its splits are {', '.join(found)}.")
        found = found[split]
    elif split:
        raise ValueError(f"{key} = {source!r}: holds one split, and {split!r} is asked for; leave it out.")
    return [dict(row) for row in found]


def find_hub(name: str) -> None:
    """Raise ConnectionError if the hub does not answer. Whether the data set exists is checked later, by `datasets`."""
    from huggingface_hub import constants

    try:
        # Not with huggingface_hub: its exceptions come from httpx, or from httpx2 since version 2.0.
        urllib.request.urlopen(f"{constants.ENDPOINT}/api/datasets/{name}", timeout=ANSWER_S).close()
    except (urllib.error.HTTPError, http.client.HTTPException):
        pass  # the hub did answer
    except OSError as error:
        raise ConnectionError(
            f"the hub at {constants.ENDPOINT} does not answer, HF_HUB_OFFLINE=1 takes what it once gave"
        ) from error


def with_cause(error: Exception) -> str:
    """Return an error's message and that of its cause, on one line.

    `datasets` itself may only say that an error occurred.
    """
    reasons = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
    return " ".join(reasons.split())[:LONGEST_REASON]
