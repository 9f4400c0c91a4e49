"""An index of samples.jsonl, which may be larger than memory. Only the rows that are asked for are parsed."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.telemetry.run_log import EMPTY, is_line

HEAD = re.compile(rb'\{"step": (\d+), "split": "([^"\\]*)", "number": (\d+)[,}]')
"""Beginning of the rows that RunLog writes. A row that begins otherwise is parsed for its step, split and number."""

Key = tuple[str, int]
"""Split and step of a row."""


class SampleIndex:
    """Places of all rows of a samples.jsonl, in the order of the file. Not thread-safe.

    For example:

        index = SampleIndex(Path("runs/demo/samples.jsonl"))
        index.update()
        newest = index.rows(index.places()[-20:])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_id = (0, 0)
        self._clear()

    def _clear(self) -> None:
        self._read = 0
        self._begins, self._sizes, self._numbers = array("q"), array("q"), array("q")
        """For each row: its offset and length in bytes, and its number among the samples of its split and step."""
        self.blocks: dict[Key, list[range]] = {}
        """{split and step: blocks of its rows}. There are several blocks only if a step was logged again."""
        self._replaced: set[int] = set()
        self.damaged: set[int] = set()
        """Offsets of those lines that were parsed and found to be no valid rows."""
        self._key: Key | None = None
        self._earlier: dict[int, int] = {}
        """{number of a sample: place of its row}, for earlier rows of the newest block's split and step."""

    def update(self) -> None:
        """Add the rows that were written since the last call. A file that was replaced or cut is read anew."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            about = os.fstat(file.fileno())
            if (about.st_dev, about.st_ino) != self._file_id or about.st_size < self._read:
                self._clear()
                self._file_id = (about.st_dev, about.st_ino)
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):  # a row that is being written, or that a killed process left
                    break
                self._add(line)
                self._read += len(line)

    def _add(self, line: bytes) -> None:
        head = HEAD.match(line)
        if head is not None:
            key, number = (head[2].decode(errors="replace"), int(head[1])), int(head[3])
        else:
            row = _parsed(line)
            if row is None:
                self.damaged.add(self._read)
                return
            key, number = (row["split"], row["step"]), row["number"]
        place = len(self._begins)
        blocks = self.blocks.get(key, [])
        if key != self._key or number <= self._numbers[-1]:  # logged again, after it or after others
            self._earlier = {self._numbers[it]: it for block in blocks for it in block}
            self._key = None
        if number in self._earlier:
            if head is not None and _parsed(line) is None:  # a damaged row replaces none
                self.damaged.add(self._read)
                return
            self._replaced.add(self._earlier[number])
        if self._key is None:
            self.blocks.setdefault(key, []).append(range(place, place))
            self._key = key
        blocks = self.blocks[key]
        blocks[-1] = range(blocks[-1].start, place + 1)
        self._begins.append(self._read)
        self._sizes.append(len(line))
        self._numbers.append(number)

    def __len__(self) -> int:
        return len(self._begins) - len(self._replaced)

    def places(self, keys: Iterable[Key] | None = None) -> list[int]:
        """Return the places (indices) of the rows that have these splits and steps, by default of all rows.

        Without `keys`, the places are sorted by split and step, then by their order in the file.
        """
        chosen = sorted(self.blocks) if keys is None else keys
        return [it for key in chosen for block in self.blocks[key] for it in block if it not in self._replaced]

    def size(self, place: int) -> int:
        """Return a row's length in bytes."""
        return self._sizes[place]

    def rows(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """Parse the rows at these places. Damaged rows are left out."""
        return [row for _, row in self.rows_by_place(places)]

    def rows_by_place(self, places: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        for place, line in self._lines(places):
            row = _parsed(line)
            if row is None:
                self.damaged.add(self._begins[place])
            else:
                yield place, EMPTY | row

    def search(self, words: Sequence[str], places: Sequence[int], *, most: int) -> list[dict[str, Any]]:
        """Return the first `most` rows among `places` that contain all words, in upper or lower case.

        Each word may be in any of the row's texts (see `has_words`).
        """
        words = [word.lower() for word in words]
        # A line is parsed only if it may have the words: ASCII words are in it as they are, but for JSON's escapes.
        sure = [json.dumps(word)[1:-1].encode() for word in words if word.isascii()]
        found: list[dict[str, Any]] = []
        for _, line in self._lines(places):
            if len(found) == most:
                break
            small = line.lower()
            if not all(word in small for word in sure):
                continue
            row = _parsed(line)
            if row is not None and has_words(EMPTY | row, words):
                found.append(EMPTY | row)
        return found

    def _lines(self, places: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        if not places or not self.path.is_file():
            return
        with self.path.open("rb") as file:
            for place in places:
                file.seek(self._begins[place])
                yield place, file.read(self._sizes[place])


def has_words(row: dict[str, Any], words: Sequence[str]) -> bool:
    """Return True if each of the words, in lower case, is in the row's prompt, answer or reply."""
    said = "\n".join(turn["text"] for turn in row.get("turns") or []) or row["reply"]
    texts = [text.lower() for text in (row["prompt"], row["answer"], said)]
    return all(any(word in text for text in texts) for word in words)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode(errors="replace").lstrip("\0"))
    except (ValueError, RecursionError):
        return None
    return row if is_line(row, of_samples=True) else None
