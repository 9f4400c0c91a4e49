"""Checksums of a published adapter, in a file in its folder. Servers compare them with what they have read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

FILE = "checksums.json"


def sum_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in memory."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    (folder / FILE).write_text(json.dumps(sums, indent=0) + "\n", encoding="utf-8")


def check_sums(folder: str | Path, found: dict[str, str]) -> None:
    """Raise ValueError if the tensors that were read from a folder differ from those that were published.

    found: the checksum of each tensor that was read, by name. If the folder has no file of checksums, another program
    wrote it, and it is not checked.
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
