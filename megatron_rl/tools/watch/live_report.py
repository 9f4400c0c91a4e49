"""The live report of a run that may still be running. The page is rendered again after the run's files have changed.

GET /report        the page with its ETag; 304 if the request names the current ETag
GET /samples.json  ?find=WORDS&split=SPLIT&order=ORDER: the run's samples that contain all words
"""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from megatron_rl.telemetry.run_log import METRICS, SAMPLES, TEXT, RunRecord, read_run
from megatron_rl.tools.report.report import render
from megatron_rl.tools.report.report_samples import LETTERS, as_columns, choose_samples, shortened
from megatron_rl.tools.report.sample_index import SampleIndex

MOST_FOUND = 2000
"""Maximum number of found samples that are sorted by reward or length. If more are found, only the newest are
sorted."""
MOST_SENT = 100
REST = 4
"""A page that took t seconds to render is kept for at least REST * t seconds, to leave the processor free."""
ORDERS = {
    "best": lambda row: -(-1e9 if row["reward"] is None else row["reward"]),
    "worst": lambda row: 1e9 if row["reward"] is None else row["reward"],
    "longest": lambda row: -len(row["reply"]) - sum(len(turn["text"]) for turn in row.get("turns") or []),
}


class LiveReport:
    """The page and the samples of one run's folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._one_reads = folder, threading.Lock()
        self._index = SampleIndex(folder / SAMPLES)
        self._seen: list[tuple[int, int]] | None = None
        self._tag, self._page, self._next = "", b"", 0.0

    def page(self) -> tuple[str, bytes]:
        """Return the page's ETag and its bytes. Renders the page again if it is out of date."""
        with self._one_reads:
            seen = [_state(self._folder / name) for name in (METRICS, SAMPLES)]
            begin = time.monotonic()
            if seen != self._seen and begin >= self._next:
                self._index.update()
                self._page = render(self._run(), self._folder, choose_samples(self._index, is_live=True)).encode(**TEXT)
                self._tag = f'"{hashlib.blake2b(self._page, digest_size=12).hexdigest()}"'
                self._seen, now = seen, time.monotonic()
                self._next = now + REST * (now - begin)
            return self._tag, self._page

    def samples(self, query: str) -> dict[str, Any]:
        """Search the samples. Return at most MOST_SENT `rows`, and a `note` that says how many were found.

        query: the query string of the URL.
        """
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        order, split = asked.get("order", "newest"), asked.get("split", "all")
        with self._one_reads:
            self._index.update()
            keys = [key for key in self._index.blocks if split in ("all", key[0])]
            keys.sort(key=lambda key: key[1], reverse=order != "oldest")
            most = MOST_FOUND if order in ORDERS else MOST_SENT + 1
            found = self._index.search(asked.get("find", "").split(), self._index.places(keys), most=most)
        count, kind = f"{len(found):,}", "oldest" if order == "oldest" else "newest"
        if order in ORDERS:
            note = f"the newest {count} found" if len(found) == most else f"{count} found"
            found.sort(key=ORDERS[order])
        else:
            note = f"the {kind} {MOST_SENT} of those found" if len(found) == most else f"{count} found"
        return {"rows": [as_columns(shortened(row, LETTERS)) for row in found[:MOST_SENT]], "note": note}

    def _run(self) -> RunRecord:
        if not (self._folder / METRICS).is_file():  # the run has begun, but its first step has not ended
            return RunRecord(steps=[], evaluations=[], samples={}, config="")
        return read_run(self._folder, with_samples=False)


def _state(path: Path) -> tuple[int, int]:
    """Return a file's size in bytes and modification time in ns; zeros if it does not exist."""
    try:
        about = path.stat()
    except OSError:
        return 0, 0
    return about.st_size, about.st_mtime_ns
