"""Append-only files of what a training server has accepted, from which a restarted server continues.

A record is an event in JSON and a body of bytes, written before the client hears that its request was accepted. Once
written, it survives the process, but not a power failure. A record that the process's end cut off is dropped when the
file is opened again.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<4sIQI")
"""Record header: magic, size of the event, size of the body (both in bytes), CRC-32 of both."""
_MAGIC = b"mts1"


class JournalFile:
    """A journal file that is open for appending.

    journal = JournalFile(path)
    for event, body in journal.records: ...  # the records that were already in the file
    journal.add({"kind": "session", "id": "a"})
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records, end = read(path)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._file, end)

    def add(self, event: dict[str, Any], body: bytes = b"") -> None:
        """Append a record. If it cannot be written completely, remove what was written of it and raise OSError."""
        said = json.dumps(event, separators=(",", ":")).encode()
        head = _HEAD.pack(_MAGIC, len(said), len(body), zlib.crc32(body, zlib.crc32(said)))
        end = self.size
        record = memoryview(b"".join((head, said, body)))
        try:
            while record:
                record = record[os.write(self._file, record) :]
        except OSError:
            os.ftruncate(self._file, end)
            raise

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> tuple[list[tuple[dict[str, Any], bytes]], int]:
    """Return the file's complete records, and the offset at which the last one ends. A missing file has no records."""
    content = path.read_bytes() if path.exists() else b""
    records, end = [], 0
    while (start := end + _HEAD.size) <= len(content):
        magic, said, size, crc = _HEAD.unpack(content[end:start])
        body, after = start + said, start + said + size
        if magic != _MAGIC or after > len(content) or zlib.crc32(content[start:after]) != crc:
            break
        records.append((json.loads(content[start:body]), content[body:after]))
        end = after
    return records, end
