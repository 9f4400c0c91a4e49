"""manifest.json: name, size and CRC-32 of every file in a folder, to detect modified or missing files.

If a subfolder has its own manifest, the outer manifest lists that manifest and not the subfolder's other files.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path

import torch.distributed as dist

from megatron_rl.parallel import ParallelGroups

NAME = "manifest.json"
_PART = ".sums-"
_READ_BYTES = 16 * 1024 * 1024


class CheckpointError(RuntimeError):
    """Failure to write a checkpoint. An earlier checkpoint of the same name stays intact."""


def write_part(folder: Path, files: list[Path], *, name: str) -> None:
    """Store the checksums of some of the folder's files, so that `write` need not read these files again.

    name: a name for this part of the checksums, which differs from those of other parts.
    """
    (folder / f"{_PART}{name}").write_text(json.dumps({str(path.relative_to(folder)): _entry(path) for path in files}))


def write(folder: Path) -> None:
    """Write the manifest of all files below `folder`, using the checksums that `write_part` has stored."""
    known: dict[str, dict[str, int]] = {}
    for part in folder.glob(f"{_PART}*"):
        with contextlib.suppress(ValueError):  # the disk was full; the checksums are computed below
            known |= json.loads(part.read_text())
        part.unlink()
    inner = [path.parent for path in folder.rglob(NAME) if path.parent != folder]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {}
    for path in files:
        if path.name != NAME and any(other in path.parents for other in inner):
            continue
        name = str(path.relative_to(folder))
        entries[name] = known.get(name) or _entry(path)
    (folder / NAME).write_text(json.dumps({"files": entries}, indent=1))


def faults(folder: Path, *, part: int = 0, parts: int = 1) -> list[str]:
    """Describe every file that is missing, modified, or not in the manifest. Hidden files are ignored.

    parts: into how many equal shares the files are divided. part: the number of the share to check, from 0.
    """
    try:
        entries = _read(folder)
    except (OSError, ValueError, KeyError) as error:
        return [f"{NAME} is not readable ({error})"]
    there = sorted(str(path.relative_to(folder)) for path in folder.rglob("[!.]*") if path.is_file())
    found = [f"{name} is not in {NAME}" for name in there[part::parts] if name not in entries and name != NAME]
    for name in sorted(entries)[part::parts]:
        path, expected = folder / name, entries[name]
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            found.append(f"{name} has {path.stat().st_size:,} bytes, but {expected['bytes']:,} were written")
        elif _entry(path) != expected:
            found.append(f"the content of {name} is not what was written (CRC-32 differs)")
    return found


def faults_for_all(path: Path, groups: ParallelGroups) -> list[str]:
    """Return the `faults` of all files on every rank. Collective: each rank checks a share of the files."""
    of_ranks: list[list[str]] = [[] for _ in range(groups.world_size)]
    found = faults(path, part=groups.rank, parts=groups.world_size)
    dist.all_gather_object(of_ranks, found, group=groups.control)
    return [fault for found in of_ranks for fault in found]


def _read(folder: Path) -> dict[str, dict[str, int]]:
    entries: dict[str, dict[str, int]] = json.loads((folder / NAME).read_text())["files"]
    for name in [name for name in entries if name != NAME and Path(name).name == NAME]:
        inner = Path(name).parent
        entries |= {str(inner / other): entry for other, entry in _read(folder / inner).items()}
    return entries


def _entry(path: Path) -> dict[str, int]:
    crc, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": crc}
