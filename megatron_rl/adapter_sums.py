"""Sums of published adapters: a file beside them, with which servers compare what they have read of the folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

FILE = "checksums.json"


def sum_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's numbers as they lie in memory."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    (folder / FILE).write_text(json.dumps(sums, indent=0) + "\n", encoding="utf-8")


def check_sums(folder: str | Path, found: dict[str, str]) -> None:
    """Raise ValueError where tensors of a folder are others than were written, by their names in its files.

    Folders that others have made have no sums, and are believed.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return
    sent = json.loads(path.read_text(encoding="utf-8"))
    wrong = sorted(name for name in sent.keys() | found.keys() if sent.get(name) != found.get(name))
    if wrong:
        raise ValueError(
            f"{folder}: {len(wrong)} tensors are not what was published, the first is {wrong[0]}; see that all hosts "
            f"have the same files there."
        )
